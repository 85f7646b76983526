"""What a simulated run was like: hours, idleness, switches, moves, bias, and what is needed to draw it."""

from dataclasses import dataclass

from gyre.schedule.cells import CellState


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A cell was in a state from `begin_s` to `end_s`."""

    cell: int
    state: CellState
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One simulated run. Shares are of all cell-seconds; `bias` is trained against dispatched mean work.

    `idle_rollout` counts cells in rollout with nobody on them, `slack_rollout` their unused places besides,
    `idle_training` members without a micro-step, `switching` everything between serving and training.
    """

    seconds: float
    steps: int
    step_ends_s: tuple[float, ...]
    idle_rollout: float
    slack_rollout: float
    idle_training: float
    training: float
    switching: float
    switches: int
    moves: int
    bias: float
    restarts: int
    events: int
    segments: tuple[Segment, ...]
    levels: tuple[tuple[float, int], ...]

    @property
    def hours(self) -> float:
        """From the first dispatch to the last publication."""
        return self.seconds / 3600.0
