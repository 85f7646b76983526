"""What the scheduler shows of itself: frozen numbers for the dashboard, the journal and tests. Decides nothing."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gyre.schedule.batches import Batch
from gyre.schedule.cells import CellState
from gyre.types import Role

if TYPE_CHECKING:
    from gyre.schedule.scheduler import Scheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class CellSnapshot:
    """One cell. `routed` rollouts of its `capacity`; `since` is the time of its last change of state."""

    index: int
    role: Role
    state: CellState
    since: float
    routed: int
    capacity: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSnapshot:
    """The current step's batch: groups ready of `num_groups`, micro-steps ready, claimed and done."""

    step: int
    num_groups: int
    groups_ready: int
    micro_steps_ready: int
    micro_steps_claimed: int
    micro_steps_done: int
    is_closed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSnapshot:
    """The whole schedule at one time.

    `capacity` is C_R, the rollouts that the cells in rollout carry; `waterlevel` is w = `dispatched` (d) -
    `terminated` (f); `started` is p. `waiting` rollouts have no route yet. `batch` is None after the last step.
    """

    cells: tuple[CellSnapshot, ...]
    version: int
    steps: int
    capacity: int
    waterlevel: int
    dispatched: int
    started: int
    terminated: int
    waiting: int
    groups_dispatched: int
    batch: BatchSnapshot | None
    is_held: bool
    is_finished: bool
    is_aborted: bool


def batch_snapshot(batch: Batch | None, *, is_closed: bool) -> BatchSnapshot | None:
    """The numbers of the current batch, if there is one."""
    if batch is None:
        return None
    return BatchSnapshot(
        step=batch.step,
        num_groups=batch.num_groups,
        groups_ready=len(batch.groups),
        micro_steps_ready=batch.num_ready,
        micro_steps_claimed=len(batch.claimed),
        micro_steps_done=len(batch.done),
        is_closed=is_closed,
    )


def snapshot_of(scheduler: "Scheduler") -> ScheduleSnapshot:
    """The schedule now, as frozen numbers."""
    books, capacity = scheduler.rollouts, scheduler.settings.cell_capacity
    return ScheduleSnapshot(
        cells=tuple(
            CellSnapshot(
                index=cell.index,
                role=cell.role,
                state=cell.state,
                since=cell.since,
                routed=len(books.routed[cell.index]),
                capacity=capacity,
            )
            for cell in scheduler.cells
        ),
        version=scheduler.version,
        steps=scheduler.settings.steps,
        capacity=capacity * sum(cell.is_in_rollout for cell in scheduler.cells),
        waterlevel=books.waterlevel,
        dispatched=books.dispatched,
        started=books.started,
        terminated=books.terminated,
        waiting=len(books.waiting),
        groups_dispatched=scheduler.groups_dispatched,
        batch=batch_snapshot(scheduler.batch, is_closed=scheduler.is_closed),
        is_held=scheduler.is_held,
        is_finished=scheduler.is_finished,
        is_aborted=scheduler.is_aborted,
    )
