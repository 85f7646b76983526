"""What is to be rolled out and trained: the lengths of every rollout and the training work of every group.

A parametric workload draws log-normal lengths, part of the variance between tasks and the rest within, cut at
the time limit; it is a function of (shape, seed). A recorded one is handed in as plain numbers. The training
work of a group is proportional to its rollouts' lengths, as tokens are.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from gyre.config.schema import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupWork:
    """One group: seconds of each rollout alone on a cell, and cell-seconds of each micro-step."""

    rollouts_s: tuple[float, ...]
    micro_steps_s: tuple[float, ...]
    forecast_s: float = 0.0
    """Mean length as history would predict it."""
    grading_s: float | None = None
    """From the last rollout's end to readiness; None: as the cluster says."""

    @property
    def mean_s(self) -> float:
        """Mean rollout."""
        return sum(self.rollouts_s) / len(self.rollouts_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Groups in order of dispatch, and the time limit of a rollout."""

    groups: tuple[GroupWork, ...]
    limit_s: float

    @property
    def mean_s(self) -> float:
        """Mean rollout."""
        return sum(group.mean_s for group in self.groups) / len(self.groups)


def parametric(settings: Settings, *, seed: int) -> Workload:
    """The workload of the [simulate] section for all groups of the run."""
    one, plan = settings.simulate, settings.schedule
    random = Random(f"workload/{seed}")
    between, within = one.sigma * math.sqrt(one.between_share), one.sigma * math.sqrt(1.0 - one.between_share)
    groups = []
    for _ in range(settings.run.steps * plan.groups_per_batch):
        task = random.gauss(0.0, between)
        lengths = [
            min(one.limit_s, one.median_s * math.exp(task + random.gauss(0.0, within)))
            for _ in range(plan.rollouts_per_group)
        ]
        error = math.exp(random.gauss(0.0, one.history_error))
        # A crash ends a rollout somewhere on its way: what it did until then is data.
        lengths = [
            length * random.random() if random.random() < one.harness_crash_share else length for length in lengths
        ]
        groups.append(
            group_work(
                lengths,
                train_ratio=one.train_ratio,
                micro_step_rollouts=settings.trainer.micro_step_rollouts,
                error=error,
            )
        )
    return Workload(groups=tuple(groups), limit_s=one.limit_s)


def group_work(
    lengths: Sequence[float], *, train_ratio: float, micro_step_rollouts: int, error: float = 1.0
) -> GroupWork:
    """A group of rollouts of these lengths; micro-steps take rollouts in order."""
    size = micro_step_rollouts
    return GroupWork(
        rollouts_s=tuple(lengths),
        micro_steps_s=tuple(sum(lengths[at : at + size]) * train_ratio for at in range(0, len(lengths), size)),
        forecast_s=sum(lengths) / len(lengths) * error,
    )
