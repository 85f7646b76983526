"""The queue of micro-steps: what is ready, who claimed it, and whom to tell that the batch is whole.

One step is open at a time. A claim is answered at once or parked until work is ready, the step closes, or the
park time is over (then the cell asks again, so that no wait is without end). A micro-step is handed out
once; the scheduler is told of each claim before the work leaves.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from gyre.algo.rows import encode_rows
from gyre.types import TreeRow
from gyre.wire.messages import Claim, ClaimLater, Message, MicroStepWork, StepClosed

PARK_S = 5.0


@dataclass(slots=True, kw_only=True)
class StepWork:
    """The work of one step in order of readiness, and how many rollouts and targets its batch holds."""

    ready: list[tuple[TreeRow, ...]] = field(default_factory=list)
    next_index: int = 0
    num_rollouts: int = 0
    num_targets: int = 0


class StepQueue:
    """Answers the claims of training cells."""

    def __init__(self, *, send: Callable[[int, Message], None], on_claimed: Callable[[int, int, int], None]) -> None:
        self._send, self._on_claimed = send, on_claimed
        self._work: dict[int, StepWork] = {}
        self._parked: dict[int, tuple[Claim, float]] = {}
        self._closed: dict[int, StepClosed] = {}
        self._is_checkpoint_asked = False

    def add_group(
        self, step: int, micro_steps: list[tuple[TreeRow, ...]], *, num_rollouts: int, num_targets: int
    ) -> None:
        """A group of the step's batch is packed: its micro-steps may be claimed once the step is open."""
        work = self._work.setdefault(step, StepWork())
        work.ready += micro_steps
        work.num_rollouts += num_rollouts
        work.num_targets += num_targets

    def claim(self, claim: Claim, now: float) -> None:
        """A training cell asks for work."""
        if claim.step in self._closed:
            self._send(claim.cell, self._closed[claim.step])
            return
        work = self._work.setdefault(claim.step, StepWork())
        if work.next_index >= len(work.ready):
            self._parked[claim.cell] = (claim, now + PARK_S)
            return
        index = work.next_index
        work.next_index += 1
        self._on_claimed(claim.cell, claim.step, index)
        self._send(claim.cell, MicroStepWork(step=claim.step, index=index, rows=encode_rows(work.ready[index])))

    def wake(self, now: float) -> None:
        """Hand new work to parked claims, in order of cells; send the expired away to ask again."""
        for cell in sorted(self._parked):
            claim, until = self._parked[cell]
            work = self._work.setdefault(claim.step, StepWork())
            if claim.step in self._closed or work.next_index < len(work.ready):
                del self._parked[cell]
                self.claim(claim, now)
            elif now >= until:
                del self._parked[cell]
                self._send(cell, ClaimLater(step=claim.step))

    def close(self, step: int, *, members: int, now: float) -> int:
        """The batch is whole: tell everybody who asks from now on. Returns the rollouts in the batch."""
        work = self._work.pop(step, StepWork())
        self._closed = {
            step: StepClosed(
                step=step,
                members=members,
                num_rollouts=work.num_rollouts,
                num_targets=work.num_targets,
                checkpoint=self._is_checkpoint_asked,
            )
        }
        self._is_checkpoint_asked = False
        self.wake(now)
        return work.num_rollouts

    def take_checkpoint(self) -> None:
        """The core leaves a checkpoint of the step that is closed next, whether or not one is due."""
        self._is_checkpoint_asked = True

    def counts(self, step: int) -> tuple[int, int]:
        """(ready, claimed) micro-steps of the step."""
        work = self._work.get(step, StepWork())
        return len(work.ready), work.next_index
