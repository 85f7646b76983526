"""Everything the front writes down, typed. A record is a fact: it is never changed, only followed by others.

Records are tagged msgpack maps. Times are seconds of the run's clock (0 when the front started). Token ids are
little-endian int32 bytes, log-probs float32 bytes. The scheduler's events and commands are kept as their class
name and fields, so that a journal can be replayed without this package knowing the scheduler.
"""

from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import TypeVar, Union

import msgspec

from gyre.errors import StoreError

T = TypeVar("T")


class Record(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all records."""


class RunBegan(Record, frozen=True):
    """A front took the run over; `resumed_version` > 0 if it went on from a checkpoint.

    Step s trains groups [s * groups_per_batch, (s + 1) * groups_per_batch); 0 means not told. `started_at` is Unix
    time, when this life's clock showed 0; turns that lie before `tokens_bytes` of tokens.log are of earlier lives.
    """

    name: str
    seed: int
    policy: str
    steps: int
    num_cells: int
    started_at: float
    resumed_version: int
    config_sha256: str
    groups_per_batch: int = 0
    model_path: str = ""
    tokens_bytes: int = 0


class RunEnded(Record, frozen=True):
    """The run is over, `reason` says why; `wall_s` since its front started."""

    reason: str
    wall_s: float


class ScheduleEvent(Record, frozen=True):
    """One event as the scheduler got it."""

    now: float
    kind: str
    values: dict[str, object]


class ScheduleCommand(Record, frozen=True):
    """One command of the scheduler, in answer to the event before it."""

    now: float
    kind: str
    values: dict[str, object]


class RolloutChanged(Record, frozen=True):
    """A rollout entered a state."""

    rollout: str
    state: str
    task: str
    purpose: str
    group: int | None
    time: float
    detail: str


class RolloutScored(Record, frozen=True):
    """A rollout was graded; `error` set: it could not be, after `tries`."""

    rollout: str
    reward: float
    checks: dict[str, float]
    error: str
    tries: int


class TurnDone(Record, frozen=True):
    """One turn: the context ids that were new, the sampled ids, and where they lie in the rollout's tree.

    `retokenised` is the session's count so far; `moved` how often this turn went on in another cell. It ended at
    `time` and took `seconds`, of which it waited `waited_s` for a cell to open.
    """

    rollout: str
    turn: int
    call: str
    parent_node: int | None
    node: int
    context_tokens: bytes
    output_tokens: bytes
    logprobs: bytes
    spans: list[tuple[int, int, int]]
    finish: str
    cached_tokens: int
    retokenised: int
    moved: int
    seconds: float
    time: float = 0.0
    waited_s: float = 0.0


class GroupReady(Record, frozen=True):
    """A group's rollouts are settled and packed."""

    group: int
    advantages: dict[str, float]
    num_micro_steps: int
    tokens_trained: int
    tokens_shared: int


class MicroStepTrained(Record, frozen=True):
    """A cell accumulated a micro-step."""

    step: int
    index: int
    cell: int
    seconds: float
    num_targets: int
    loss: float
    max_logprob_gap: float
    mean_logprob_gap: float
    clipped_rollouts: int
    entropy: float
    time: float = 0.0


class StepTrained(Record, frozen=True):
    """The core applied a step; its weights are `version` from now on."""

    step: int
    version: int
    reward_mean: float
    grad_norm: float
    num_rollouts: int
    seconds: float
    checkpoint: str
    clipped: int
    staleness_mean: float
    time: float


class Switched(Record, frozen=True):
    """A cell changed its duty to `to` (training or rollout) in `seconds`, at `time`."""

    cell: int
    to: str
    seconds: float
    step: int
    time: float = 0.0


class LiveRequestMoved(Record, frozen=True):
    """A request in flight went on in another cell with `tokens_kept` tokens of its turn."""

    rollout: str
    call: str
    source: int
    destination: int
    tokens_kept: int
    time: float = 0.0


class HarnessError(Record, frozen=True):
    """Something went wrong that a harness could see."""

    rollout: str
    detail: str
    time: float = 0.0


class Evaluated(Record, frozen=True):
    """An evaluation ("before" or "after") is complete."""

    name: str
    rewards: list[float]
    mean: float


class CellState(Record, frozen=True):
    """A cell reported what it does."""

    cell: int
    state: str
    version: int
    time: float


class Trouble(Record, frozen=True):
    """Something a person should read."""

    level: str
    text: str
    time: float = 0.0


class OrderTaken(Record, frozen=True):
    """A person told the run something."""

    order: str
    time: float


AnyRecord = Union[  # noqa: UP007 - msgspec wants the union spelled for its decoder
    RunBegan, RunEnded, ScheduleEvent, ScheduleCommand, RolloutChanged, RolloutScored, TurnDone, GroupReady,
    MicroStepTrained, StepTrained, Switched, LiveRequestMoved, HarnessError, Evaluated, CellState, Trouble,
    OrderTaken,
]  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyRecord)


def encode(record: Record) -> bytes:
    """One record as bytes."""
    return _encoder.encode(record)


def decode(data: bytes) -> Record:
    """The record in `data`. Raises msgspec.DecodeError on anything else."""
    return _decoder.decode(data)


def schedule_event(now: float, event: object) -> ScheduleEvent:
    """The journal's record of a scheduler event (a dataclass)."""
    return ScheduleEvent(now=now, kind=type(event).__name__, values=to_fields(event))


def schedule_command(now: float, command: object) -> ScheduleCommand:
    """The journal's record of a scheduler command (a dataclass)."""
    return ScheduleCommand(now=now, kind=type(command).__name__, values=to_fields(command))


def to_fields(one: object) -> dict[str, object]:
    """The fields of a dataclass by name, not copied."""
    assert is_dataclass(one), one
    return {field.name: getattr(one, field.name) for field in fields(one)}


def from_fields(kind: str, values: dict[str, object], choices: Iterable[type[T]]) -> T:
    """The dataclass of `choices` that is called `kind`, with these fields. Raises StoreError if there is none."""
    for choice in choices:
        if choice.__name__ == kind:
            return msgspec.convert(values, choice)
    raise StoreError(f"the journal holds a {kind}, which this version of gyre does not know")
