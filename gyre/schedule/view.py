"""The numbers that a policy sees, read from the scheduler's state. Decides nothing and changes nothing."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from gyre.schedule.batches import Batch
from gyre.schedule.cells import CellState
from gyre.schedule.policies import View
from gyre.schedule.policy import dispatch_bound

if TYPE_CHECKING:
    from gyre.schedule.scheduler import Scheduler


def view_of(scheduler: "Scheduler", batch: Batch, now: float) -> View:
    """What the policy sees of the step that trains `batch`."""
    settings, pace = scheduler.settings, scheduler.pace
    bound = dispatch_bound(settings, scheduler.version)
    return View(
        settings=settings,
        now=now,
        members=sum(cell.state is CellState.TRAINING for cell in scheduler.cells),
        in_rollout=sum(cell.is_in_rollout for cell in scheduler.cells),
        serving=len(scheduler.serving),
        waterlevel=scheduler.rollouts.waterlevel,
        to_dispatch=max(bound - scheduler.groups_dispatched, 0) * settings.rollouts_per_group,
        is_complete=batch.is_complete,
        num_ready=batch.num_ready,
        unclaimed=batch.num_unclaimed,
        in_work=batch.num_in_work,
        expected=(batch.num_groups - len(batch.groups)) * pace.per_group.value,
        micro_step_s=pace.micro_step.value,
        stretch=pace.stretch.value,
        stragglers=lambda: _stragglers(scheduler, batch, now),
    )


def _stragglers(scheduler: "Scheduler", batch: Batch, now: float) -> Iterator[tuple[int, float | None]]:
    """(group, seconds since its first route) of the batch's unfinished rollouts."""
    first = batch.step * batch.num_groups
    for group in range(first, min(first + batch.num_groups, scheduler.groups_dispatched)):
        if group not in batch.groups:
            for rollout in scheduler.members_of(group):
                if scheduler.rollouts.is_live(rollout):
                    yield group, scheduler.rollouts.age(rollout, now)
