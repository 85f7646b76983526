"""Properties of whole schedules, in a world that answers commands in random order and with random delays."""

from dataclasses import replace

from hypothesis import example, given, settings
from hypothesis import strategies as st

from gyre.config.choices import PolicyName
from gyre.schedule.commands import Drain
from gyre.schedule.policy import Forecast, SchedulerSettings, dispatch_bound
from gyre.schedule.scheduler import Scheduler
from tests.fakes.scheduling_world import SchedulingWorld

POLICIES = [policy for policy in PolicyName if policy is not PolicyName.WATERLEVEL]

plans = st.builds(
    SchedulerSettings,
    num_cells=st.integers(1, 4),
    cell_capacity=st.integers(1, 6),
    steps=st.integers(0, 4),
    groups_per_batch=st.integers(1, 3),
    rollouts_per_group=st.integers(2, 3),
    staleness=st.sampled_from((0.0, 0.5, 1.0, 2.0)),
    is_held=st.booleans(),
)
worlds = st.builds(
    SchedulingWorld,
    plans,
    seed=st.integers(0, 2**32),
    micro_steps=st.integers(0, 3),
    evaluations=st.sampled_from((0, 0, 5)),
)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(worlds)
def test_every_run_finishes_and_loses_nothing(world: SchedulingWorld) -> None:
    world.run()
    plan, scheduler = world.settings, world.scheduler
    assert world.published == list(range(1, plan.steps + 1))
    rollouts = plan.steps * plan.groups_per_batch * plan.rollouts_per_group + len(world.eval_ids())
    assert len(world.terminated) == len(world.started) == rollouts
    assert scheduler.rollouts.waterlevel == 0 and not world.routes and not world.ungraded
    assert world.done == world.claims
    assert len(world.done) == sum(world.work.values())


@settings(max_examples=20, deadline=None, derandomize=True)
@given(worlds)
def test_replaying_the_journal_gives_the_same_commands(world: SchedulingWorld) -> None:
    world.run()
    again = Scheduler(world.settings)
    for event, now, commands in world.journal:
        assert again.handle(event, now) == commands
    assert again.snapshot() == world.scheduler.snapshot()


@settings(max_examples=20, deadline=None, derandomize=True)
@given(worlds)
def test_cells_join_a_step_one_by_one_in_order(world: SchedulingWorld) -> None:
    world.run()
    for step in range(world.settings.steps):
        joined = [cell for of, cell in world.joins if of == step]
        assert joined == list(range(len(joined))) and joined


@settings(max_examples=60, deadline=None, derandomize=True)
@given(plans, st.sampled_from(POLICIES), st.integers(0, 2**32))
def test_every_policy_finishes_and_replays(plan: SchedulerSettings, policy: PolicyName, seed: int) -> None:
    cells = max(plan.num_cells, 2) if policy.is_async else plan.num_cells
    forecast = Forecast(limit_s=50.0, group_s=tuple(float(group % 5) for group in range(12)))
    plan = replace(plan, policy=policy, num_cells=cells, forecast=forecast)
    world = SchedulingWorld(plan, seed=seed)
    world.run()
    assert world.published == list(range(1, plan.steps + 1))
    assert world.done == world.claims and len(world.done) == sum(world.work.values())
    again = Scheduler(plan)
    assert all(again.handle(event, now) == commands for event, now, commands in world.journal)


def test_cells_of_a_fixed_split_never_change_sides() -> None:
    plan = SchedulerSettings(
        num_cells=4, cell_capacity=4, steps=5, groups_per_batch=3, rollouts_per_group=3, staleness=1.0,
        policy=PolicyName.ASYNC_STREAMING, training_cells=2,
    )  # fmt: skip
    world = SchedulingWorld(plan, seed=3)
    world.run()
    drains = [command.cell for _, _, commands in world.journal for command in commands if isinstance(command, Drain)]
    assert drains == [0, 1] and world.moves == 0
    assert {cell for _, cell in world.joins} == {0, 1}


def test_every_satellite_trains_and_live_rollouts_move() -> None:
    plan = SchedulerSettings(num_cells=3, cell_capacity=8, steps=12, groups_per_batch=4, rollouts_per_group=4)
    world = SchedulingWorld(plan, seed=1)
    world.run()
    assert {cell for _, cell in world.joins} == {0, 1, 2}
    assert {world.done[name] for name in world.done} == {0, 1, 2}
    assert world.moves > 0


@settings(max_examples=40, deadline=None, derandomize=True)
@example(version=0, hundredths=12, groups=25)
@given(version=st.integers(0, 9), hundredths=st.integers(0, 300), groups=st.integers(1, 64))
def test_dispatch_bound_takes_decimals_as_written(version: int, hundredths: int, groups: int) -> None:
    plan = SchedulerSettings(
        num_cells=1,
        cell_capacity=1,
        steps=100,
        groups_per_batch=groups,
        rollouts_per_group=2,
        staleness=hundredths / 100,
    )
    assert dispatch_bound(plan, version) == -(-(100 * (version + 1) + hundredths) * groups // 100)
