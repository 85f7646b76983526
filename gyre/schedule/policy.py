"""The published waterlevel rule, as pure predicates over numbers.

Let w be the unfinished rollouts, C_e the rollouts a cell carries and C_R the capacity of the cells in rollout.
The next cell may leave only while the others still cover what is unfinished: w <= C_R - C_e. Groups are
dispatched up to Q_b = ceil((version + phi + mu) * B), which bounds staleness before dispatch instead of
dropping afterwards. Formulas: QwenGyre, arXiv 2609.33848.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

from gyre.config.choices import PolicyName
from gyre.config.schema import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What is known of rollouts beforehand, in seconds alone on a cell: the time limit, and means by group.

    A group without history has the mean of the others, or half the limit.
    """

    limit_s: float = math.inf
    group_s: tuple[float, ...] = ()

    def of(self, group: int) -> float:
        """The expected length of the group's rollouts."""
        if group < len(self.group_s):
            return self.group_s[group]
        return sum(self.group_s) / len(self.group_s) if self.group_s else self.limit_s / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """What the scheduler needs to know of the configuration. `is_held`: dispatch waits for `DispatchReleased`."""

    num_cells: int
    cell_capacity: int
    steps: int
    groups_per_batch: int
    rollouts_per_group: int
    staleness: float = 0.0
    mu: int = 1
    is_held: bool = False
    policy: PolicyName = PolicyName.WATERLEVEL
    training_cells: int = 0
    forecast: Forecast = Forecast()

    @classmethod
    def of(cls, settings: Settings, *, is_held: bool = False) -> "SchedulerSettings":
        """The scheduler's part of all settings."""
        plan = settings.schedule
        return cls(
            num_cells=settings.placement.num_cells,
            cell_capacity=plan.cell_capacity,
            steps=settings.run.steps,
            groups_per_batch=plan.groups_per_batch,
            rollouts_per_group=plan.rollouts_per_group,
            staleness=plan.staleness,
            mu=settings.run.mu,
            is_held=is_held,
            policy=plan.policy,
            training_cells=plan.training_cells,
        )


def dispatch_bound(settings: SchedulerSettings, version: int) -> int:
    """Groups that may be dispatched in all while `version` is the published one."""
    # A decimal such as 0.1 is meant exactly; its binary neighbour would round up to one group more.
    ahead = Fraction(repr(float(settings.staleness))) + settings.mu + version
    return min(math.ceil(ahead * settings.groups_per_batch), settings.steps * settings.groups_per_batch)


def can_leave(settings: SchedulerSettings, *, waterlevel: int, in_rollout: int, serving: int) -> bool:
    """Whether one of the `serving` cells may leave; `in_rollout` cells hold routes (serving or loading).

    The last serving cell never leaves while something is unfinished, even if others will serve soon.
    """
    remaining = (in_rollout - 1) * settings.cell_capacity
    return waterlevel <= remaining and (serving > 1 or waterlevel == 0)


def can_core_stay(settings: SchedulerSettings, *, waterlevel: int, to_dispatch: int, is_work_ready: bool) -> bool:
    """Whether the core goes on to the next step: its work is there, and all other cells cover the rollouts.

    `to_dispatch` counts the rollouts that the new version lets be dispatched.
    """
    remaining = (settings.num_cells - 1) * settings.cell_capacity
    return is_work_ready and waterlevel + to_dispatch <= remaining
