"""What the scheduler measures of the work, from its own events: how long a micro-step takes, how many a group has.

Means over all that was seen, with a guess that counts as one observation before anything was. No clock: times
are those of the events.
"""

from dataclasses import dataclass, field

FIRST_MICRO_STEP_S = 60.0


@dataclass(slots=True)
class Mean:
    """A running mean that starts from a guess."""

    total: float
    count: float = 1.0

    def add(self, value: float) -> None:
        """One more observation; what is older than about a hundred fades."""
        if self.count >= 100:
            self.total, self.count = self.total * 0.5, self.count * 0.5
        self.total += value
        self.count += 1

    @property
    def value(self) -> float:
        """The mean."""
        return self.total / self.count


@dataclass(slots=True)
class Pace:
    """Means of a run so far. `stretch` is the ratio of a rollout's seconds to the forecast of its group."""

    micro_step: Mean = field(default_factory=lambda: Mean(FIRST_MICRO_STEP_S))
    per_group: Mean = field(default_factory=lambda: Mean(1.0))
    stretch: Mean = field(default_factory=lambda: Mean(1.0))
    _claimed_at: dict[int, float] = field(default_factory=dict)

    def claimed(self, cell: int, now: float) -> None:
        """The cell began a micro-step."""
        self._claimed_at[cell] = now

    def done(self, cell: int, now: float) -> None:
        """It ended it."""
        began = self._claimed_at.pop(cell, None)
        if began is not None:
            self.micro_step.add(now - began)
