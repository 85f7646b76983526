"""The waterlevel rule and the life of a cell, one rule a test, with a hand-driven scheduler."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from gyre.errors import TransitionError
from gyre.schedule.audit import audit
from gyre.schedule.cells import TABLE, CellState
from gyre.schedule.commands import (
    Abort,
    Admit,
    CloseStep,
    Command,
    Dispatch,
    Drain,
    Finish,
    JoinStep,
    LoadWeights,
    Move,
    ReturnToRollout,
)
from gyre.schedule.events import (
    CellDrained,
    CellJoined,
    CellLost,
    CellReleased,
    CellServing,
    DispatchHeld,
    DispatchReleased,
    Evaluate,
    Event,
    GroupReady,
    MicroStepClaimed,
    MicroStepDone,
    RolloutStarted,
    RolloutTerminated,
    StepPublished,
    Tick,
)
from gyre.schedule.policy import SchedulerSettings
from gyre.schedule.scheduler import ResumePoint, Scheduler

Kind = TypeVar("Kind")
PLAN = SchedulerSettings(num_cells=2, cell_capacity=4, steps=2, groups_per_batch=2, rollouts_per_group=2)


class Played:
    """A scheduler with a clock of whole seconds; audited after every event."""

    def __init__(self, *, resume: ResumePoint | None = None, **changes: Any) -> None:
        self.scheduler = Scheduler(replace(PLAN, **changes), resume)
        self.now = 0.0

    def feed(self, *events: Event) -> list[Command]:
        """The commands of all events."""
        commands = []
        for event in events:
            self.now += 1
            commands += self.scheduler.handle(event, self.now)
            audit(self.scheduler)
        return commands

    def serve(self, version: int = 0) -> list[Command]:
        """All cells report that they serve."""
        return self.feed(*[CellServing(cell=cell.index, version=version) for cell in self.scheduler.cells])

    def end_group(self, group: int, micro_steps: int = 1) -> list[Command]:
        """All rollouts of the group terminate, and it is ready."""
        size = self.scheduler.settings.rollouts_per_group
        ended = [RolloutTerminated(rollout=f"{group}.{member}") for member in range(size)]
        return self.feed(*ended, GroupReady(group=group, num_micro_steps=micro_steps))

    def join(self, cell: int, step: int = 0) -> list[Command]:
        """A draining cell gets as far as training."""
        return self.feed(CellDrained(cell=cell), CellReleased(cell=cell), CellJoined(cell=cell, step=step))

    def work(self, cell: int, index: int, step: int = 0) -> list[Command]:
        """A cell does a micro-step."""
        claimed = MicroStepClaimed(cell=cell, step=step, index=index)
        return self.feed(claimed, MicroStepDone(cell=cell, step=step, index=index))

    @property
    def states(self) -> list[CellState]:
        return [cell.state for cell in self.scheduler.cells]


def of_kind(commands: list[Command], *kinds: type[Kind]) -> list[Kind]:
    return [command for command in commands if isinstance(command, kinds)]


def test_the_table_reaches_every_state_and_never_leaves_lost() -> None:
    assert set(TABLE.values()) == set(CellState)
    assert not any(before is CellState.LOST for before, _ in TABLE)


def test_a_transition_outside_the_table_tells_the_cells_story() -> None:
    played = Played()
    played.serve()
    with pytest.raises(TransitionError) as caught:
        played.feed(CellReleased(cell=0))
    text = "cell 0 is serving, CellReleased is not allowed there; its story: t=1.000 CellServing: loading -> serving"
    assert text in str(caught.value)


def test_a_micro_step_belongs_to_a_training_cell() -> None:
    played = Played()
    played.serve()
    played.end_group(0)
    with pytest.raises(TransitionError):
        played.feed(MicroStepClaimed(cell=1, step=0, index=0))


def test_groups_are_dispatched_to_the_bound_as_soon_as_one_cell_serves() -> None:
    played = Played(staleness=0.5)
    commands = played.feed(CellServing(cell=1, version=0))
    assert of_kind(commands, Dispatch) == [Dispatch(group=0), Dispatch(group=1), Dispatch(group=2)]
    assert [command.cell for command in of_kind(commands, Admit)] == [1, 1, 1, 1]
    assert played.scheduler.snapshot().waiting == 2
    assert played.feed(CellServing(cell=0, version=0)) == [Admit(rollout=name, cell=0) for name in ("2.0", "2.1")]


def test_rollouts_go_to_the_least_loaded_cell_and_later_ones_wait_for_room() -> None:
    played = Played(num_cells=1, groups_per_batch=3)
    commands = played.serve()
    assert [command.rollout for command in of_kind(commands, Admit)] == ["0.0", "0.1", "1.0", "1.1"]
    assert played.feed(RolloutTerminated(rollout="0.1")) == [Admit(rollout="2.0", cell=0)]
    wide = Played(is_held=True)
    wide.serve()
    assert [one.cell for one in of_kind(wide.feed(DispatchReleased()), Admit)] == [1, 0, 1, 0]


def test_dispatch_waits_while_it_is_held_and_evaluations_do_not() -> None:
    played = Played(is_held=True)
    assert played.serve() == []
    commands = played.feed(Evaluate(rollouts=("eval0.0", "eval0.1")))
    assert commands == [Admit(rollout="eval0.0", cell=1), Admit(rollout="eval0.1", cell=0)]
    assert played.scheduler.snapshot().waterlevel == 2
    played.feed(RolloutTerminated(rollout="eval0.0"), RolloutTerminated(rollout="eval0.1"))
    assert of_kind(played.feed(DispatchReleased()), Dispatch) == [Dispatch(group=0), Dispatch(group=1)]
    played.feed(DispatchHeld())
    assert played.scheduler.snapshot().is_held


def test_the_core_leaves_when_the_others_cover_what_is_unfinished_and_work_is_there() -> None:
    played = Played(cell_capacity=3)
    played.serve()
    assert played.feed(RolloutTerminated(rollout="0.0")) == []
    # w = 3 <= C_R - C_e = 3 already, but there is nothing to train.
    assert played.states == [CellState.SERVING] * 2
    played.feed(RolloutTerminated(rollout="0.1"))
    commands = played.feed(GroupReady(group=0, num_micro_steps=2))
    assert isinstance(commands[-1], Drain) and commands[-1].cell == 0
    moves = of_kind(commands, Move)
    assert moves and all((move.source, move.destination) == (0, 1) for move in moves)


def test_the_core_does_not_leave_above_the_waterlevel() -> None:
    played = Played(cell_capacity=2, groups_per_batch=3, steps=1)
    played.serve()
    assert of_kind(played.end_group(0), Drain) == []
    assert of_kind(played.feed(RolloutTerminated(rollout="1.0")), Drain) == []
    assert of_kind(played.feed(RolloutTerminated(rollout="1.1")), Drain) == [Drain(cell=0)]


def test_rollouts_move_to_the_cell_that_stays_longest_while_it_has_room() -> None:
    for capacity, destinations in ((8, [2, 2, 2]), (4, [2, 1, 1])):
        played = Played(num_cells=3, cell_capacity=capacity, groups_per_batch=5, is_held=True)
        played.serve()
        played.feed(DispatchReleased())
        assert [len(routed) for routed in played.scheduler.rollouts.routed] == [3, 3, 4]
        moves = of_kind(played.end_group(0), Move)
        assert [move.source for move in moves] == [0, 0, 0]
        assert [move.destination for move in moves] == destinations


def test_the_last_serving_cell_stays_while_anything_is_unfinished() -> None:
    played = Played(num_cells=2, cell_capacity=8)
    played.serve()
    played.end_group(0, micro_steps=5)
    played.join(0)
    assert played.states == [CellState.TRAINING, CellState.SERVING]
    assert of_kind(played.feed(RolloutTerminated(rollout="1.0")), Drain) == []
    assert played.feed(RolloutTerminated(rollout="1.1")) == [Drain(cell=1)]


def test_cells_leave_one_at_a_time_and_only_for_unclaimed_work() -> None:
    played = Played(num_cells=3, cell_capacity=8)
    played.serve()
    played.end_group(0, micro_steps=1)
    assert played.states[1] is CellState.SERVING
    commands = played.join(0)
    assert JoinStep(cell=0, step=0, version=0) in commands and commands[-1] == Drain(cell=1)
    played.join(1)
    assert played.feed(MicroStepClaimed(cell=0, step=0, index=0)) == []
    assert of_kind(played.end_group(1, micro_steps=0), Drain) == []
    assert played.states[2] is CellState.SERVING


def test_a_step_closes_with_its_members_when_every_micro_step_is_done() -> None:
    played = Played(cell_capacity=8, steps=1)
    played.serve()
    played.end_group(0, micro_steps=2)
    played.join(0)
    assert of_kind(played.work(0, 0), CloseStep) == []
    played.end_group(1, micro_steps=1)
    assert played.states[1] is CellState.DRAINING
    played.join(1)
    played.work(1, 1)
    assert played.work(0, 2) == [CloseStep(step=0, members=2)]
    commands = played.feed(StepPublished(step=0, version=1))
    assert commands == [ReturnToRollout(cell=0, version=1), ReturnToRollout(cell=1, version=1)]
    assert played.serve(version=1) == [Finish()]


def test_a_batch_without_micro_steps_is_published_all_the_same() -> None:
    played = Played(steps=1)
    played.serve()
    played.end_group(0, micro_steps=0)
    assert of_kind(played.end_group(1, micro_steps=0), Drain) == [Drain(cell=0)]
    assert played.join(0)[-1] == CloseStep(step=0, members=1)
    commands = played.feed(StepPublished(step=0, version=1))
    assert commands == [ReturnToRollout(cell=0, version=1), LoadWeights(cell=1, version=1)]


@pytest.mark.parametrize("reports", [(), (CellDrained,), (CellDrained, CellReleased)])
def test_a_satellite_that_comes_too_late_is_refused_and_returns(reports: tuple[Callable[..., Event], ...]) -> None:
    played = Played(cell_capacity=8, steps=1)
    played.serve()
    played.end_group(0)
    played.end_group(1)
    played.join(0)
    assert played.states[1] is CellState.DRAINING
    played.feed(*[kind(cell=1) for kind in reports])
    played.work(0, 0)
    assert played.work(0, 1) == [CloseStep(step=0, members=1)]
    returns = of_kind(played.feed(StepPublished(step=0, version=1)), ReturnToRollout)
    if not reports:
        # It loads only when nothing is in flight on it.
        assert [command.cell for command in returns] == [0]
        assert played.feed(CellDrained(cell=1)) == [ReturnToRollout(cell=1, version=1)]
    else:
        assert [command.cell for command in returns] == [0, 1]
        late = [CellReleased(cell=1), CellJoined(cell=1, step=0)][len(reports) - 1 :]
        assert played.feed(*late) == []
    assert played.serve(version=1) == [Finish()]


def test_a_step_is_not_closed_while_a_cell_still_loads_its_weights() -> None:
    played = Played(num_cells=3, cell_capacity=8, steps=1)
    played.feed(CellServing(cell=0, version=0), CellServing(cell=1, version=0))
    played.end_group(0, micro_steps=1)
    played.end_group(1, micro_steps=0)
    played.join(0)
    assert of_kind(played.work(0, 0), CloseStep) == []
    assert played.feed(CellServing(cell=2, version=0)) == [CloseStep(step=0, members=1)]


def test_the_core_stays_if_the_next_batch_is_ready_and_the_others_cover_the_rest() -> None:
    for capacity, first in ((8, JoinStep(cell=0, step=1, version=1)), (3, ReturnToRollout(cell=0, version=1))):
        played = Played(steps=3, staleness=1.0, num_cells=3, cell_capacity=capacity, groups_per_batch=4)
        played.serve()
        for group in range(5):
            played.end_group(group, micro_steps=int(group in (0, 4)))
        played.join(0)
        played.work(0, 0)
        commands = played.feed(StepPublished(step=0, version=1))
        assert commands[0] == first, capacity
        assert LoadWeights(cell=2, version=1) in commands, capacity


def test_micro_steps_of_a_later_step_wait_for_it() -> None:
    played = Played(steps=2, staleness=1.0, cell_capacity=8)
    played.serve()
    assert of_kind(played.end_group(2, micro_steps=3), Drain) == []
    played.end_group(0)
    played.end_group(1)
    played.join(0)
    with pytest.raises(AssertionError, match="micro-step of step 1; current is 0"):
        played.feed(MicroStepClaimed(cell=0, step=1, index=0))


def test_a_micro_step_is_claimed_once_and_done_once() -> None:
    played = Played(cell_capacity=8)
    played.serve()
    played.end_group(0, micro_steps=2)
    played.join(0)
    played.work(0, 0)
    with pytest.raises(AssertionError, match=r"micro-step 0/0 claimed twice: by cell 0 and cell 0"):
        played.feed(MicroStepClaimed(cell=0, step=0, index=0))
    with pytest.raises(AssertionError, match=r"micro-step 0/0 done twice by cell 0"):
        played.feed(MicroStepDone(cell=0, step=0, index=0))
    with pytest.raises(AssertionError, match=r"micro-step 0/1 done by cell 0, claimed by None"):
        played.feed(MicroStepDone(cell=0, step=0, index=1))
    with pytest.raises(AssertionError, match=r"micro-step 0/7 is not ready"):
        played.feed(MicroStepClaimed(cell=0, step=0, index=7))


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (RolloutStarted(rollout="9.0"), "rollout 9.0 started, but is not live"),
        (RolloutTerminated(rollout="9.0"), "rollout 9.0 terminated, but is not live"),
        (GroupReady(group=9, num_micro_steps=1), "group 9 is ready, 2 are dispatched"),
        (GroupReady(group=0, num_micro_steps=1), "group 0 is ready, yet ['0.0', '0.1'] have not terminated"),
        (StepPublished(step=0, version=1), "step 0 published, 0 is current"),
    ],
)
def test_an_event_that_contradicts_the_books_is_named(event: Event, text: str) -> None:
    played = Played()
    played.serve()
    with pytest.raises(AssertionError, match=re.escape(text)):
        played.feed(event)


def test_a_cell_may_not_serve_another_version() -> None:
    with pytest.raises(AssertionError, match="published is version 0"):
        Played().feed(CellServing(cell=0, version=3))


def test_a_lost_cell_aborts_the_run_and_nothing_follows() -> None:
    played = Played()
    played.serve()
    assert played.feed(CellLost(cell=1, reason="rank 1 died")) == [Abort(reason="cell 1 is lost: rank 1 died")]
    assert played.states[1] is CellState.LOST
    assert played.feed(RolloutTerminated(rollout="0.0"), CellLost(cell=1, reason="again")) == []


def test_a_run_of_no_steps_only_evaluates() -> None:
    played = Played(steps=0, is_held=True)
    assert played.feed(Evaluate(rollouts=("eval0.0",))) == []
    assert of_kind(played.serve(), Admit, Finish) == [Admit(rollout="eval0.0", cell=0)]
    played.feed(RolloutTerminated(rollout="eval0.0"))
    assert played.feed(DispatchReleased()) == [Finish()]
    assert played.feed(Evaluate(rollouts=("eval1.0",))) == [Admit(rollout="eval1.0", cell=1)]


def test_a_resumed_run_dispatches_what_was_not_published() -> None:
    played = Played(resume=ResumePoint(version=1))
    assert of_kind(played.serve(version=1), Dispatch) == [Dispatch(group=2), Dispatch(group=3)]
    assert Played(resume=ResumePoint(version=2)).serve(version=2) == [Finish()]


def test_time_alone_changes_nothing() -> None:
    played = Played()
    played.serve()
    before = played.scheduler.snapshot()
    assert played.feed(Tick(), Tick()) == [] and played.scheduler.snapshot() == before
    assert (before.capacity, before.waterlevel, before.dispatched, before.waiting) == (8, 4, 4, 0)
    assert before.batch is not None and (before.batch.step, before.batch.num_groups) == (0, 2)
