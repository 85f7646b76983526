"""The batches in work: which groups are ready, and the ledger of each step's micro-steps.

Step `s` trains groups `[s*B, (s+1)*B)`, strictly in dispatch order: a group that is ready early waits for its
step. A micro-step has an index within its step, in order of readiness; it is claimed once and done once, by
the same cell, and only while its step is the current one.
"""

from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Batch:
    """One step's groups and micro-steps. `claimed` maps an index to its cell, `done` likewise."""

    step: int
    num_groups: int
    groups: dict[int, int] = field(default_factory=dict)
    num_ready: int = 0
    claimed: dict[int, int] = field(default_factory=dict)
    done: dict[int, int] = field(default_factory=dict)
    working: dict[int, int] = field(default_factory=dict)
    """Micro-step in work by cell: a cell has one at a time."""

    @property
    def is_complete(self) -> bool:
        """Whether all its groups are ready: no micro-step will be added."""
        return len(self.groups) == self.num_groups

    @property
    def is_done(self) -> bool:
        """Whether every micro-step it will ever have is done (also when it has none)."""
        return self.is_complete and len(self.done) == self.num_ready

    @property
    def num_unclaimed(self) -> int:
        """Ready micro-steps that nobody took."""
        return self.num_ready - len(self.claimed)

    @property
    def num_in_work(self) -> int:
        """Micro-steps claimed and not done."""
        return len(self.claimed) - len(self.done)

    def is_working(self, cell: int) -> bool:
        """Whether the cell has a micro-step that is not done."""
        return cell in self.working

    def add_group(self, group: int, num_micro_steps: int) -> None:
        """The group's rows are packed; its micro-steps take the next indices."""
        assert group not in self.groups, f"group {group} is ready twice"
        assert num_micro_steps >= 0, f"group {group} has {num_micro_steps} micro-steps"
        self.groups[group] = num_micro_steps
        self.num_ready += num_micro_steps

    def claim(self, index: int, cell: int) -> None:
        """A cell takes a ready micro-step."""
        name = f"micro-step {self.step}/{index}"
        assert 0 <= index < self.num_ready, f"{name} is not ready: {self.num_ready} are"
        assert index not in self.claimed, f"{name} claimed twice: by cell {self.claimed[index]} and cell {cell}"
        self.claimed[index] = cell
        self.working[cell] = index

    def finish(self, index: int, cell: int) -> None:
        """The cell that took it has accumulated its gradient."""
        name = f"micro-step {self.step}/{index}"
        assert self.claimed.get(index) == cell, f"{name} done by cell {cell}, claimed by {self.claimed.get(index)}"
        assert index not in self.done, f"{name} done twice by cell {cell}"
        self.done[index] = cell
        self.working.pop(cell, None)


class BatchBook:
    """The batches from the current step on."""

    def __init__(self, *, groups_per_batch: int) -> None:
        self._groups_per_batch = groups_per_batch
        self._batches: dict[int, Batch] = {}

    def batch(self, step: int) -> Batch:
        """The batch of a step that is not over."""
        if step not in self._batches:
            self._batches[step] = Batch(step=step, num_groups=self._groups_per_batch)
        return self._batches[step]

    def batch_of_group(self, group: int) -> Batch:
        """The batch that trains the group."""
        return self.batch(group // self._groups_per_batch)

    def drop(self, step: int) -> None:
        """The step is published."""
        del self._batches[step]
