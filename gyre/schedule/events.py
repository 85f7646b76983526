"""What has happened, in the past tense. The scheduler sees nothing else of the world.

A group is identified by its place in dispatch order; step `s` trains groups `[s*B, (s+1)*B)`. Events that
the scheduler has already seen may not be sent again; out-of-table events raise `TransitionError`.
"""

from dataclasses import dataclass

from gyre.types import RolloutId


@dataclass(frozen=True, slots=True, kw_only=True)
class CellServing:
    """The cell's engine holds `version`, answered its probe, and takes traffic."""

    cell: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutStarted:
    """The harness of a dispatched rollout runs."""

    rollout: RolloutId


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutTerminated:
    """The harness of a rollout ended, for whatever reason: it needs no model call any more."""

    rollout: RolloutId


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReady:
    """Every rollout of the group is scored or dropped and its rows are packed in `num_micro_steps` (maybe 0)."""

    group: int
    num_micro_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CellDrained:
    """The leaving cell has no request in flight and its routes point elsewhere."""

    cell: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CellReleased:
    """The cell's engine has given its memory back."""

    cell: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CellJoined:
    """The cell's replica holds the step's weights and zeroed gradients: it is a member from now on."""

    cell: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroStepClaimed:
    """A cell took a micro-step from the queue."""

    cell: int
    step: int
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroStepDone:
    """A cell accumulated a micro-step's gradient."""

    cell: int
    step: int
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPublished:
    """The core applied the optimizer step and exposes the new weights as `version`."""

    step: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CellLost:
    """A rank of the cell died or stopped answering."""

    cell: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluate:
    """Rollouts outside every batch were asked for: they are routed and count like others, and train nothing."""

    rollouts: tuple[RolloutId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchHeld:
    """From now on no new group may be dispatched; what runs goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchReleased:
    """Groups may be dispatched again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time passed."""


Event = (
    CellServing
    | RolloutStarted
    | RolloutTerminated
    | GroupReady
    | CellDrained
    | CellReleased
    | CellJoined
    | MicroStepClaimed
    | MicroStepDone
    | StepPublished
    | CellLost
    | Evaluate
    | DispatchHeld
    | DispatchReleased
    | Tick
)
