"""A run folder as a workload: what was recorded predicts the step times of the run that recorded it."""

from dataclasses import replace
from pathlib import Path

import pytest

from gyre.config.dump import dump_settings
from gyre.config.load import load_settings
from gyre.errors import StoreError
from gyre.program.recorded import read_recorded
from gyre.program.simulate import predict
from gyre.schedule.commands import Command
from gyre.schedule.events import Event, MicroStepClaimed, MicroStepDone
from gyre.schedule.policy import SchedulerSettings
from gyre.simulate.cluster import Cluster
from gyre.simulate.result import Result
from gyre.simulate.workload import parametric
from gyre.simulate.world import World
from gyre.store import records
from gyre.store.store import RunStore
from tests.fakes.run_records import began

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.toml"
CHANGES = ("run.steps=4", "schedule.groups_per_batch=4", "schedule.rollouts_per_group=4", "schedule.cell_capacity=8",
           "simulate.median_s=20", "simulate.limit_s=90", "simulate.tool_share=0.99", "simulate.optimizer_s=0.5",
           "simulate.grading_s=2", "simulate.train_ratio=0.1", "trainer.micro_step_rollouts=2")  # fmt: skip


def record_run(folder: Path, *, staleness: float) -> Result:
    """Simulate a small run and write its folder as the front would."""
    settings = load_settings(CONFIG, [*CHANGES, f"schedule.staleness={staleness}"])
    plan = SchedulerSettings.of(settings)
    store = RunStore.open(folder, config_text=dump_settings(settings), lock_wait_s=0.0)
    store.record(
        records.RunBegan(
            name="toy", seed=0, policy="waterlevel", steps=4, num_cells=3, started_at=0.0, resumed_version=0,
            config_sha256="", groups_per_batch=4,
        )
    )  # fmt: skip
    claimed: dict[tuple[int, int], float] = {}

    def journal(now: float, event: Event, commands: list[Command]) -> None:
        store.record(records.schedule_event(now, event))
        for command in commands:
            store.record(records.schedule_command(now, command))
        match event:
            case MicroStepClaimed(step=step, index=index):
                claimed[step, index] = now
            case MicroStepDone(cell=cell, step=step, index=index):
                store.record(
                    records.MicroStepTrained(
                        step=step, index=index, cell=cell, seconds=now - claimed[step, index], num_targets=1, loss=0.0,
                        max_logprob_gap=0.0, mean_logprob_gap=0.0, clipped_rollouts=0, entropy=0.0,
                    )
                )  # fmt: skip

    workload = parametric(settings, seed=5)
    cluster = replace(Cluster.of(settings), tool_share=1.0, half_speed_rollouts=1.0, move_s=0.0)
    result = World(plan, cluster, workload, journal=journal).run()
    store.close()
    return result


@pytest.mark.parametrize("staleness", [0.0, 0.5, 1.0])
def test_a_recorded_run_predicts_its_own_step_time(tmp_path: Path, staleness: float) -> None:
    result = record_run(tmp_path, staleness=staleness)
    recorded = read_recorded(tmp_path)
    assert recorded.plan.staleness == staleness and recorded.plan.steps == 4
    report = predict(recorded)
    assert report["measured_step_s"] == pytest.approx(result.seconds / 4, rel=1e-6)
    assert abs(report["error"]) < 0.02


def test_a_run_without_a_published_step_is_refused(tmp_path: Path) -> None:
    store = RunStore.open(tmp_path, config_text=CONFIG.read_text(), lock_wait_s=0.0)
    store.record(began())
    store.close()
    with pytest.raises(StoreError, match="no published step"):
        read_recorded(tmp_path)
