"""What the world shall do, in the imperative. Commands carry ids, never objects."""

from dataclasses import dataclass

from gyre.types import RolloutId


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """Start every rollout of a new group. `Admit` commands for its members follow."""

    group: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Admit:
    """Route the rollout's model calls to a serving cell."""

    rollout: RolloutId
    cell: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Change the route of a live rollout; its request in flight continues at the destination."""

    rollout: RolloutId
    source: int
    destination: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """Stop admitting to the cell; report `CellDrained` when nothing is in flight (`Move` commands precede)."""

    cell: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinStep:
    """Release the engine, then join `step`: the core opens it, a satellite pulls the weights of `version`."""

    cell: int
    step: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseStep:
    """The batch is complete: cells `[0, members)` reduce their gradients into the core, which applies them.

    A cell outside the members that was still joining has been refused and returns to rollout.
    """

    step: int
    members: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReturnToRollout:
    """Leave training, load the weights of `version`, answer the probe, serve.

    In the middle of a step (only under policies that return cells) the gradient so far is handed to the core first.
    """

    cell: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadWeights:
    """A cell that stayed in rollout takes the newly published weights; its live requests continue after."""

    cell: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """All steps are trained and every cell is back in rollout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """The run cannot go on."""

    reason: str


Command = Dispatch | Admit | Move | Drain | JoinStep | CloseStep | ReturnToRollout | LoadWeights | Finish | Abort
