"""Groups of rollouts from dispatch to readiness, and evaluations, which are groups that nobody trains on."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from gyre.config.schema import Settings
from gyre.program.curriculum import task_of_group
from gyre.program.harvest import Harvest, harvest
from gyre.program.rollouts import Rollout, RolloutBook
from gyre.program.steps import StepQueue
from gyre.store import records
from gyre.types import Purpose, RolloutId


@dataclass(slots=True, kw_only=True)
class Pending:
    """A group or an evaluation that waits for its members."""

    members: list[RolloutId]
    settled: set[RolloutId] = field(default_factory=set)

    @property
    def is_complete(self) -> bool:
        """Whether every member is scored or dropped."""
        return len(self.settled) == len(self.members)


class GroupLedger:
    """Registers members with the book and settles whole groups.

    `on_ready(group, num_micro_steps)` follows once per group, `on_evaluated(name, mean)` once per evaluation.
    """

    def __init__(
        self,
        *,
        settings: Settings,
        book: RolloutBook,
        queue: StepQueue,
        train_tasks: list[Path],
        held_out_tasks: list[Path],
        record: Callable[[records.Record], None],
        on_ready: Callable[[int, int], None],
        on_evaluated: Callable[[str, float], None],
    ) -> None:
        self._settings, self._book, self._queue = settings, book, queue
        self._train_tasks, self._held_out_tasks = train_tasks, held_out_tasks
        self._record, self._on_ready, self._on_evaluated = record, on_ready, on_evaluated
        self._groups: dict[int, Pending] = {}
        self._evaluations: dict[str, Pending] = {}
        self._rewards: dict[int, list[float]] = {}
        self._staleness: dict[int, tuple[float, int]] = {}

    def dispatch(self, group: int) -> None:
        """Register the members of a new group."""
        index = task_of_group(len(self._train_tasks), seed=self._settings.run.seed, group=group)
        members = [f"{group}.{member}" for member in range(self._settings.schedule.rollouts_per_group)]
        self._groups[group] = Pending(members=members)
        for rollout in members:
            self._book.register(rollout, purpose=Purpose.TRAIN, group=group, task=self._train_tasks[index])

    def evaluate(self, name: str) -> tuple[RolloutId, ...]:
        """Register an evaluation's rollouts, one draw after another of the held-out tasks."""
        count = self._settings.tasks.eval_rollouts
        members = [f"{name}.{draw}" for draw in range(count)]
        self._evaluations[name] = Pending(members=members)
        for draw, rollout in enumerate(members):
            task = self._held_out_tasks[draw % len(self._held_out_tasks)]
            self._book.register(rollout, purpose=Purpose.EVAL, group=None, task=task)
        return tuple(members)

    def settled(self, one: Rollout) -> None:
        """A member is scored, dropped or a placeholder."""
        if one.group is None:
            self._settle_evaluation(one)
            return
        pending = self._groups[one.group]
        pending.settled.add(one.rollout)
        if pending.is_complete:
            del self._groups[one.group]
            self._settle_group(one.group, pending)

    def step_rewards(self, step: int) -> list[float]:
        """Rewards of the step's batch, and forget them."""
        size = self._settings.schedule.groups_per_batch
        return [r for group in range(step * size, (step + 1) * size) for r in self._rewards.pop(group, [])]

    def step_staleness(self, step: int) -> float:
        """Mean staleness of the step's trained tokens in versions, and forget it."""
        total, tokens = self._staleness.pop(step, (0.0, 0))
        return total / tokens if tokens else 0.0

    def _settle_group(self, group: int, pending: Pending) -> None:
        finished = self._book.forget_group(pending.members)
        self._rewards[group] = [one.reward for one in finished]
        step = group // self._settings.schedule.groups_per_batch
        work: Harvest = harvest(finished, self._settings, step=step)
        stale, tokens = self._staleness.get(step, (0.0, 0))
        self._staleness[step] = (stale + work.staleness_sum, tokens + work.tokens_trained)
        self._record(
            records.GroupReady(
                group=group,
                advantages=work.advantages,
                num_micro_steps=len(work.micro_steps),
                tokens_trained=work.tokens_trained,
                tokens_shared=work.tokens_shared,
            )
        )
        self._queue.add_group(step, work.micro_steps, num_rollouts=work.num_rollouts, num_targets=work.num_targets)
        self._on_ready(group, len(work.micro_steps))

    def _settle_evaluation(self, one: Rollout) -> None:
        name = one.rollout.partition(".")[0]
        pending = self._evaluations[name]
        pending.settled.add(one.rollout)
        if not pending.is_complete:
            return
        del self._evaluations[name]
        rewards = [float(done.reward) for done in self._book.forget_group(pending.members)]
        mean = float(np.mean(rewards)) if rewards else 0.0
        self._record(records.Evaluated(name=name, rewards=rewards, mean=mean))
        self._on_evaluated(name, mean)
