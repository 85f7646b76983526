"""When cells leave rollout, stay in training and come back: strategies that the one scheduler consults.

A policy answers questions about frozen numbers (`View`) and sends nothing; the scheduler keeps the invariants
(one cell on its way, members are a prefix, a served rollout keeps its route) whatever it answers. Batches are
strict under every policy, so none can prefer short rollouts. A policy may remember its last answer: it is made
with its scheduler, and the same events give the same answers. Rules: QwenGyre, arXiv 2609.33848, for the
waterlevel; docs/scheduling.md for just-in-time.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, assert_never

from gyre.config.choices import PolicyName
from gyre.schedule.policy import Forecast, SchedulerSettings, can_core_stay, can_leave

HOLD_S = 120.0
"""Pause between two looks of just-in-time at the stragglers of an incomplete batch."""
WORTH_S = 45.0
"""Ready work for which a switch to training (8.5 s) and back (3.5 s, and moved rollouts) is worth while."""
GUESS_S = 300.0
"""Without history a rollout of age a is given a/2 more and this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What a policy sees. Counts of cells: `members` train, `in_rollout` hold routes, `serving` of them serve.

    `unclaimed` micro-steps are ready of `num_ready`; `in_work` are claimed and not done; a micro-step takes
    `micro_step_s` and the groups still missing are expected to bring `expected` more. `to_dispatch` counts
    rollouts that may be dispatched at once. `stragglers()` gives (group, seconds since its first route) of the
    batch's unfinished rollouts, None while a rollout waits for its first.
    """

    settings: SchedulerSettings
    now: float
    members: int
    in_rollout: int
    serving: int
    waterlevel: int
    to_dispatch: int
    is_complete: bool
    num_ready: int
    unclaimed: int
    in_work: int
    expected: float
    micro_step_s: float
    stretch: float
    stragglers: Callable[[], Iterable[tuple[int, float | None]]]

    @property
    def is_wanted(self) -> bool:
        """Whether the next cell has something to do: the core for any work, a satellite for unclaimed work."""
        if self.members == 0:
            return self.num_ready > 0 or self.is_complete
        return self.unclaimed > 0

    @property
    def is_covered(self) -> bool:
        """The waterlevel's condition: the other cells in rollout cover what is unfinished."""
        return can_leave(self.settings, waterlevel=self.waterlevel, in_rollout=self.in_rollout, serving=self.serving)

    @property
    def needed_cells(self) -> int:
        """Cells that the unfinished rollouts fill."""
        return min(self.settings.num_cells, math.ceil(self.waterlevel / self.settings.cell_capacity))

    @property
    def ready_s(self) -> float:
        """Cell-seconds of training that can begin at once or runs."""
        return (self.unclaimed + 0.5 * self.in_work) * self.micro_step_s


class Policy(Protocol):
    """The questions of the scheduler. Cells are numbered from the core on; the next to leave is `view.members`."""

    def may_serve(self, cell: int) -> bool:
        """Whether rollouts may be routed to the cell."""
        ...

    def may_dispatch(self, view: View) -> bool:
        """Whether new groups start now; at least one cell serves."""
        ...

    def order(self, groups: Sequence[int]) -> Sequence[int]:
        """New groups in the order in which they start."""
        ...

    def should_leave(self, view: View) -> bool:
        """Whether the next cell leaves rollout."""
        ...

    def should_return(self, view: View) -> bool:
        """Whether the last member goes back in the middle of the step; it has no micro-step in work."""
        ...

    def should_stay(self, cell: int, view: View) -> bool:
        """Whether a cell before which all stay goes on to the next step; `view` is of the next batch."""
        ...

    @property
    def is_rebalancing(self) -> bool:
        """Whether rollouts are spread anew when the last loading cell serves."""
        ...


class Waterlevel:
    """The published rule: leave while the others cover the unfinished rollouts and there is work."""

    is_rebalancing = False

    def may_serve(self, cell: int) -> bool:
        """Every cell, unless the split is fixed."""
        return True

    def may_dispatch(self, view: View) -> bool:
        """As soon as the staleness bound allows."""
        return True

    def order(self, groups: Sequence[int]) -> Sequence[int]:
        """In order of number, unless history says more."""
        return groups

    def should_leave(self, view: View) -> bool:
        """See the class."""
        return view.is_wanted and view.is_covered

    def should_return(self, view: View) -> bool:
        """Never in the middle of a step, unless cells may come back early."""
        return False

    def should_stay(self, cell: int, view: View) -> bool:
        """Only the core, if its work is there and all other cells cover what runs and what will be dispatched."""
        is_work_ready = view.num_ready > 0 or view.is_complete
        return cell == 0 and can_core_stay(
            view.settings, waterlevel=view.waterlevel, to_dispatch=view.to_dispatch, is_work_ready=is_work_ready
        )


class Colocate(Waterlevel):
    """The whole pool switches: nobody leaves before the batch is complete and no rollout is unfinished."""

    def should_leave(self, view: View) -> bool:
        """See the class."""
        return view.is_complete and view.is_wanted and view.waterlevel == 0

    def should_stay(self, cell: int, view: View) -> bool:
        """Never."""
        return False


class Async(Waterlevel):
    """A fixed split: the first `training_cells` only train, the others only serve."""

    def __init__(self, training_cells: int) -> None:
        self._training_cells = training_cells

    def may_serve(self, cell: int) -> bool:
        """Every cell, unless the split is fixed."""
        return cell >= self._training_cells

    def should_leave(self, view: View) -> bool:
        """See the class."""
        return view.members < self._training_cells

    def should_stay(self, cell: int, view: View) -> bool:
        """Never."""
        return cell < self._training_cells


class JustInTime(Waterlevel):
    """As few cells as finish the batch's training when its last rollout ends, and all spare ones from then on."""

    is_rebalancing = True

    def __init__(self, forecast: Forecast, *, has_history: bool) -> None:
        self._forecast, self._has_history = forecast, has_history
        self._decided_at, self._target = -math.inf, 0

    def may_dispatch(self, view: View) -> bool:
        """When all cells are back, so that a new batch spreads over them."""
        return view.serving == view.in_rollout

    def order(self, groups: Sequence[int]) -> Sequence[int]:
        """In order of number, unless history says more."""
        return sorted(groups, key=lambda group: -self._forecast.of(group)) if self._has_history else groups

    def should_leave(self, view: View) -> bool:
        """See the class."""
        return view.is_wanted and view.is_covered and self._wanted(view) > view.members

    def should_return(self, view: View) -> bool:
        """Never in the middle of a step, unless cells may come back early."""
        return not view.is_complete and self._wanted(view) < view.members

    def should_stay(self, cell: int, view: View) -> bool:
        """What the next batch has ready is worth it, and the others cover the rollouts."""
        self._decided_at = -math.inf
        spare = self._spare(view, view.waterlevel + view.to_dispatch)
        return cell < min(spare, int(view.ready_s / WORTH_S))

    def _spare(self, view: View, rollouts: int) -> int:
        return view.settings.num_cells - math.ceil(rollouts / view.settings.cell_capacity)

    def _wanted(self, view: View) -> int:
        spare = max(self._spare(view, view.waterlevel), 0)
        if view.is_complete:
            # Any remaining time is time that every cell above the waterlevel can shorten.
            return max(view.members, min(spare, int(view.ready_s / WORTH_S)), 1)
        if view.unclaimed + view.in_work == 0:
            return min(view.members, 1 if spare >= 1 else 0)
        if view.now - self._decided_at >= HOLD_S:
            self._decided_at = view.now
            left = view.ready_s + view.expected * view.micro_step_s
            self._target = math.ceil(left / max(self._residual_s(view), 1.0))
        return min(self._target, spare, int(view.ready_s / WORTH_S) + (view.members > 0))

    def _residual_s(self, view: View) -> float:
        """Seconds until the batch's last rollout ends, as far as can be known."""
        return max((self._left_s(view, group, age) for group, age in view.stragglers()), default=0.0)

    def _left_s(self, view: View, group: int, age: float | None) -> float:
        limit_s = self._forecast.limit_s * view.stretch
        known = age or 0.0
        if self._has_history:
            expected = self._forecast.of(group) * view.stretch
            left = max(expected - known, 0.35 * max(known, expected))
        else:
            left = known / 2 + GUESS_S
        return min(left, max(limit_s - known, 1.0))


def policy_of(settings: SchedulerSettings) -> Policy:
    """The strategy that the settings name, with nothing remembered."""
    match settings.policy:
        case PolicyName.WATERLEVEL:
            return Waterlevel()
        case PolicyName.COLOCATE | PolicyName.COLOCATE_STREAMING:
            return Colocate()
        case PolicyName.ASYNC | PolicyName.ASYNC_STREAMING:
            return Async(settings.training_cells or max(settings.num_cells // 2, 1))
        case PolicyName.JUST_IN_TIME:
            return JustInTime(settings.forecast, has_history=False)
        case PolicyName.JUST_IN_TIME_HISTORY:
            return JustInTime(settings.forecast, has_history=True)
    assert_never(settings.policy)
