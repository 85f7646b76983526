"""The scheduler in virtual time: the cell's model, the bound, the world, the comparison and its picture."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from gyre.config.choices import PolicyName
from gyre.config.load import check_runnable, load_settings
from gyre.config.schema import Settings
from gyre.errors import ConfigError
from gyre.program.simulate import setting_of, table
from gyre.schedule.policy import SchedulerSettings
from gyre.simulate.bound import lower_bound_s
from gyre.simulate.cluster import Cluster
from gyre.simulate.compare import Setting, compare
from gyre.simulate.picture import draw
from gyre.simulate.sharing import SharedCell
from gyre.simulate.workload import group_work, parametric
from gyre.simulate.world import World

PAPER = sorted((Path(__file__).parents[2] / "configs" / "paper").glob("*.toml"))


SMALL = ("run.steps=4", "schedule.groups_per_batch=2", "schedule.rollouts_per_group=8", "placement.num_cells=4")


def small(*overrides: str) -> Settings:
    """A reference workload, a few steps of it."""
    path = next(one for one in PAPER if one.stem == "122b-nl2repo")
    return load_settings(path, [*SMALL, *overrides])


def test_a_lone_rollout_is_not_slowed_and_the_slowdown_solves_its_equation() -> None:
    cluster = replace(Cluster.of(small()), tool_share=0.3, half_speed_rollouts=7.0)
    speeds = [cluster.slowdown(load) for load in range(1, 40)]
    assert speeds[0] == 1.0 and all(low <= high for low, high in pairwise(speeds))
    for load, slowdown in enumerate(speeds, start=1):
        decoding = slowdown - 0.3
        at_once = load * decoding / slowdown
        assert decoding == pytest.approx(0.7 * (1 + max(at_once - 1, 0) / 7.0), rel=1e-9)


def test_rollouts_on_one_cell_share_its_speed() -> None:
    cell = SharedCell(lambda load: float(load))
    cell.run(True, 0.0)
    cell.put("a", 10.0, 0.0)
    cell.put("b", 4.0, 0.0)
    assert cell.next_end() == (8.0, "b")
    assert cell.take("b", 8.0) == 0.0
    assert cell.next_end() == (14.0, "a")
    cell.run(False, 10.0)
    assert cell.next_end()[0] == float("inf")
    assert cell.take("a", 50.0) == 4.0


def test_a_workload_is_a_function_of_its_seed_and_cut_at_the_limit() -> None:
    settings = small("simulate.sigma=2.0")
    assert parametric(settings, seed=3) == parametric(settings, seed=3) != parametric(settings, seed=4)
    lengths = [one for group in parametric(settings, seed=3).groups for one in group.rollouts_s]
    assert max(lengths) == settings.simulate.limit_s
    assert group_work([1.0, 2.0, 3.0], train_ratio=0.5, micro_step_rollouts=2).micro_steps_s == (1.5, 1.5)


@pytest.mark.parametrize("staleness", [0.0, 0.5, 1.0, 2.0])
def test_no_policy_beats_the_bound_and_each_runs_twice_the_same(staleness: float) -> None:
    setting = setting_of(small())
    bound = setting.bound_s(staleness)
    for policy in PolicyName:
        result = setting.run(policy, staleness=staleness)
        assert result.seconds >= bound, policy
        assert result == setting.run(policy, staleness=staleness)
        assert result.bias == pytest.approx(0.0, abs=1e-9)
        assert len(result.step_ends_s) == 4


def test_the_bound_is_exact_for_one_lone_rollout_at_a_time() -> None:
    plan = SchedulerSettings(num_cells=1, cell_capacity=1, steps=3, groups_per_batch=1, rollouts_per_group=1)
    settings = small()
    cluster = replace(Cluster.of(settings), grading_s=0.0, optimizer_s=0.0)
    workload = replace(
        parametric(settings, seed=0),
        groups=tuple(group_work([100.0], train_ratio=0.1, micro_step_rollouts=1) for _ in range(3)),
    )
    assert lower_bound_s(plan, cluster, workload) == pytest.approx(330.0, rel=1e-3)


def test_a_lost_cell_costs_a_restart_and_no_step() -> None:
    setting = setting_of(small("simulate.cell_loss_hours=8.0", "run.seed=1"))
    result = setting.run(PolicyName.WATERLEVEL, staleness=1.0)
    calm = setting_of(small("run.seed=1")).run(PolicyName.WATERLEVEL, staleness=1.0)
    assert result.restarts > 0 and result.seconds > calm.seconds and len(result.step_ends_s) == 4


def test_cell_seconds_add_up() -> None:
    setting = setting_of(small())
    result = setting.run(PolicyName.JUST_IN_TIME_HISTORY, staleness=1.0)
    for cell in range(4):
        mine = [one for one in result.segments if one.cell == cell]
        assert all(left.end_s == right.begin_s for left, right in pairwise(mine))
        assert mine[0].begin_s == 0.0 and mine[-1].end_s >= result.seconds


def test_the_comparison_names_every_baseline_and_its_picture_is_a_picture() -> None:
    settings = small()
    setting = setting_of(settings)
    rows = list(compare(setting, staleness=1.0, stalenesses=(1.0,)))
    names = [one.name for one in rows]
    assert {"colocate", "async, half split", "async, best split", "waterlevel", "just-in-time-history"} <= set(names)
    best = {one.name: one.result.seconds for one in rows}
    assert best["async, best split"] <= best["async, half split"]
    assert "waterlevel" in table(settings, rows, rows[-1])
    root = ElementTree.fromstring(draw(rows[-1].result, title="a & b", capacity=16, num_cells=4))
    assert root.tag.endswith("svg") and len(list(root)) > 20


@pytest.mark.parametrize("path", PAPER, ids=[path.stem for path in PAPER])
def test_reference_configs_load(path: Path) -> None:
    settings = load_settings(path)
    assert settings.run.name == path.stem and settings.run.steps == 48


def test_what_only_the_simulator_can_do_is_refused_for_a_run() -> None:
    check_runnable(small("schedule.policy=colocate-streaming"))
    with pytest.raises(ConfigError, match="given 'async-streaming'"):
        check_runnable(small("schedule.policy=async-streaming"))
    with pytest.raises(ConfigError, match=r"schedule.policy: wanted one of waterlevel, .* given 'just-in-time'"):
        check_runnable(small("schedule.policy=just-in-time"))
    with pytest.raises(ConfigError, match=r"placement.num_cells: wanted 2 or more for an async policy, given 1"):
        small("schedule.policy=async", "placement.num_cells=1")
    with pytest.raises(ConfigError, match=r"schedule.training_cells: wanted less than placement.num_cells = 4"):
        small("schedule.policy=async", "schedule.training_cells=4")


def test_the_world_accepts_one_cell() -> None:
    settings = small("placement.num_cells=1", "schedule.cell_capacity=200")
    setting: Setting = setting_of(settings)
    assert len(World(setting.plan, setting.cluster, setting.workload).run().step_ends_s) == 4
