"""The life of one cell, as one table: (state, event or command) -> state.

A cell serves, drains, releases its engine, joins a step, trains, waits for the step's weights, loads them and
serves again; a serving cell also loads newly published weights. What the table does not list raises
`TransitionError` with the cell's story: its last transitions and their times. A cell that was still on its way
when its step closed is refused: it waits like the members, and the reports of what it was doing may arrive
late. This module decides nothing: `policy.py` says when a cell leaves, `scheduler.py` sends the commands.
"""

from collections import deque
from enum import StrEnum

from gyre.errors import TransitionError
from gyre.schedule.commands import CloseStep, Command, Drain, JoinStep, LoadWeights, ReturnToRollout
from gyre.schedule.events import (
    CellDrained,
    CellJoined,
    CellLost,
    CellReleased,
    CellServing,
    Event,
    MicroStepClaimed,
    MicroStepDone,
)
from gyre.types import Role


class CellState(StrEnum):
    """What a cell does."""

    LOADING = "loading"
    """Its engine takes weights (at start, after training, or after a publication); it holds routes, but serves none."""
    SERVING = "serving"
    """Its engine answers model calls."""
    DRAINING = "draining"
    """Its routes point elsewhere; requests in flight are being continued there."""
    RELEASED = "released"
    """Nothing is in flight: the engine is giving its memory back."""
    JOINING = "joining"
    """Its replica takes the weights of the step."""
    TRAINING = "training"
    """It is a member of the step and claims micro-steps."""
    PUBLISHING = "publishing"
    """The step is closed (with it or without it): it waits until the new version is published."""
    LOST = "lost"
    """A rank of it is gone."""


S = CellState
Trigger = type[Event] | type[Command]

LOSSES: dict[tuple[CellState, Trigger], CellState] = {(state, CellLost): S.LOST for state in S if state is not S.LOST}
TABLE: dict[tuple[CellState, Trigger], CellState] = LOSSES | {
    (S.LOADING, CellServing): S.SERVING,
    (S.SERVING, LoadWeights): S.LOADING,
    (S.SERVING, Drain): S.DRAINING,
    (S.DRAINING, CellDrained): S.RELEASED,
    (S.RELEASED, CellReleased): S.JOINING,
    (S.JOINING, CellJoined): S.TRAINING,
    (S.TRAINING, MicroStepClaimed): S.TRAINING,
    (S.TRAINING, MicroStepDone): S.TRAINING,
    (S.TRAINING, CloseStep): S.PUBLISHING,
    (S.TRAINING, ReturnToRollout): S.LOADING,
    (S.DRAINING, CloseStep): S.PUBLISHING,
    (S.RELEASED, CloseStep): S.PUBLISHING,
    (S.JOINING, CloseStep): S.PUBLISHING,
    (S.PUBLISHING, JoinStep): S.JOINING,
    (S.PUBLISHING, ReturnToRollout): S.LOADING,
}

LATE: dict[CellState, tuple[Trigger, ...]] = {
    S.DRAINING: (CellDrained,),
    S.RELEASED: (CellReleased, CellJoined),
    S.JOINING: (CellJoined,),
}
"""What a refused cell may still report, in this order, by the state in which its step closed."""

IN_ROLLOUT = (S.LOADING, S.SERVING)
ON_THE_WAY = (S.DRAINING, S.RELEASED, S.JOINING)
STORY_LENGTH = 16


class Cell:
    """One cell: its state, since when, and how it got there."""

    __slots__ = ("_story", "index", "late", "since", "state")

    def __init__(self, index: int) -> None:
        self.index = index
        self.state = CellState.LOADING
        self.since = 0.0
        self.late: tuple[Trigger, ...] = ()
        """Reports that are still out since the cell was refused; empty when it was not."""
        self._story: deque[str] = deque(maxlen=STORY_LENGTH)

    @property
    def role(self) -> Role:
        """Cell 0 is the core."""
        return Role.CORE if self.index == 0 else Role.SATELLITE

    @property
    def is_in_rollout(self) -> bool:
        """Whether it holds routes; its capacity counts."""
        return self.state in IN_ROLLOUT

    @property
    def is_still_draining(self) -> bool:
        """Whether it was refused with requests in flight that have not been reported gone."""
        return CellDrained in self.late

    def go(self, trigger: Trigger, now: float) -> bool:
        """Take the transition of `trigger`; False if it only is the late report of a refused cell.

        Raises TransitionError, with the cell's story, for what neither the table nor the refusal allows.
        """
        before = self.state
        after = TABLE.get((before, trigger))
        if after is None:
            if trigger in self.late:
                # Reports come in the order of the work: those before this one will not come any more.
                self.late = self.late[self.late.index(trigger) + 1 :]
                self._story.append(f"t={now:.3f} {trigger.__name__}, late")
                return False
            raise TransitionError(
                f"cell {self.index} is {before}, {trigger.__name__} is not allowed there; its story: {self.story()}"
            )
        if trigger is CloseStep:
            self.late = LATE.get(before, ())
        elif after is S.SERVING:
            self.late = ()
        if after is not before:
            self.state, self.since = after, now
            self._story.append(f"t={now:.3f} {trigger.__name__}: {before} -> {after}")
        return True

    def story(self) -> str:
        """Its last transitions, oldest first, on one line."""
        return "; ".join(self._story) or "it has only started"
