"""The nouns that several packages share. Plain frozen data: no behaviour beyond a derived property, no I/O.

A rollout is one agent run on one task; a group is the rollouts of one task; a turn is one model call; a
step is one optimizer step; a micro-step is the forward and backward of one micro-batch. Token arrays are
numpy int32, log-probs float32. Times are seconds of the caller's clock.
"""

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]

RolloutId = str
"""`"12.3"` is member 3 of group 12; `"eval0.17"` is draw 17 of the first evaluation."""


class Role(StrEnum):
    """What a cell is in training. Cell 0 is the core: the authoritative weights and the only optimizer."""

    CORE = "core"
    SATELLITE = "satellite"


class Duty(StrEnum):
    """What a cell does now, as agreed by a role epoch."""

    ROLLOUT = "rollout"
    TRAINING = "training"


class Purpose(StrEnum):
    """Why a rollout runs. An evaluation is never trained on."""

    TRAIN = "train"
    EVAL = "eval"


class EndReason(StrEnum):
    """Why a harness stopped. A time limit is data; a start failure leaves no artefact."""

    DONE = "done"
    TIME_LIMIT = "time_limit"
    HARNESS_ERROR = "harness_error"
    START_FAILED = "start_failed"


class FinishReason(StrEnum):
    """Why one turn's sampling stopped."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The parallel layout of every cell. TP, PP, CP and EP never cross a cell."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1

    @property
    def num_ranks(self) -> int:
        """Ranks in one cell (EP shares the ranks of the others)."""
        return self.tp * self.pp * self.cp


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Output tokens [start, end) of a turn were sampled under `version`."""

    start: int
    end: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What the engine sampled for one turn, whole or partial.

    `tokens` and `logprobs` have the same length; `spans` cover it without gap or overlap.
    """

    tokens: Int32
    logprobs: Float32
    spans: tuple[VersionSpan, ...]
    finish: FinishReason
    cached_tokens: int = 0

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.logprobs), (len(self.tokens), len(self.logprobs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A graded workspace: `reward` in [0, 1] and the named checks behind it."""

    reward: float
    checks: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeRow:
    """The selected part of one rollout's tree, laid out for one forward pass (T tokens, E targets).

    Tokens are in DFS order. Key `k` is visible to query `q` iff `k <= q < visible_until[k]`. Positions are
    depths along the path. A target is an edge: the log-prob of `edge_token[e]` read at row index
    `edge_source[e]`. Each sampled token is a target at most once. `num_targets` is the rollout's n_i over
    all of its rows, so that a row can be trained alone.
    """

    rollout: RolloutId
    advantage: float
    num_targets: int
    tokens: Int32
    positions: Int32
    visible_until: Int32
    edge_source: Int32
    edge_token: Int32
    behavior_logprobs: Float32
    versions: Int32


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroStep:
    """The unit of claimed training work: whole rollouts, never a part of one."""

    step: int
    index: int
    rows: tuple[TreeRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """What one rank knows of itself before anything is placed.

    `device` is "cpu" or "cuda", with or without an index ("cuda:3"); `memory_bytes` is the device's, on a CPU the
    host's; `versions` are those of the packages that all ranks must share.
    """

    rank: int
    local_rank: int
    host: str
    device: str
    memory_bytes: int
    versions: dict[str, str]

    @property
    def device_kind(self) -> str:
        """The device without its index."""
        return self.device.partition(":")[0]
