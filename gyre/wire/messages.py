"""Every message between front, ranks and hands, typed.

The front listens; ranks and hands dial in. A message is one msgpack map tagged with its class name. Token
ids travel as raw little-endian int32 bytes, log-probs as float32 bytes, never as lists. A request carries a
`call` id that its answer repeats. Messages are facts or orders; they hold no policy.
"""

from typing import Union

import msgspec
import numpy as np

from gyre.types import Float32, Int32


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all messages."""


# --- ranks -> front -------------------------------------------------------------------------------


class RankUp(Message, frozen=True):
    """First message of a rank, before its engine or replica is built."""

    rank: int
    cell: int
    is_leader: bool
    host: str
    pid: int


class EngineStarted(Message, frozen=True):
    """The cell's engine is up with the weights of the model folder; it has not answered for a version yet."""

    cell: int
    seconds: float


class EngineServing(Message, frozen=True):
    """The cell's engine answered its probe with `version`; `fingerprint` is that of its weights."""

    cell: int
    version: int
    fingerprint: str
    seconds: float


class EngineReleased(Message, frozen=True):
    """The cell's engine is idle and has given its memory back (`freed_bytes` is 0 on CPU: nothing is freed)."""

    cell: int
    freed_bytes: int
    seconds: float


class Generated(Message, frozen=True):
    """The answer to `Generate`; an aborted one carries what was sampled so far. `error` set: nothing else is valid."""

    call: str
    cell: int
    version: int
    tokens: bytes = b""
    logprobs: bytes = b""
    finish: str = "stop"
    cached_tokens: int = 0
    error: str = ""


class StepJoined(Message, frozen=True):
    """The cell's replica holds the weights of the step and zeroed gradients."""

    cell: int
    step: int
    version: int
    seconds: float


class Claim(Message, frozen=True):
    """A training cell asks for work. Answered by MicroStepWork, ClaimLater or StepClosed."""

    cell: int
    step: int


class MicroStepFinished(Message, frozen=True):
    """The gradient of a micro-step is accumulated; figures of its forward pass."""

    cell: int
    step: int
    index: int
    seconds: float
    num_targets: int
    loss: float
    max_logprob_gap: float
    mean_logprob_gap: float
    clipped_rollouts: int
    entropy: float
    ratios: dict[str, float]


class StepApplied(Message, frozen=True):
    """The core applied step `step`; its weights are exposed as `version` under `weights` (a description)."""

    step: int
    version: int
    weights: bytes
    fingerprint: str
    grad_norm: float
    seconds: float
    checkpoint: str


class WeightsExposed(Message, frozen=True):
    """The core holds `version` (the model folder or a checkpoint) and exposes it; sent once at start."""

    version: int
    weights: bytes
    fingerprint: str


class StopRequested(Message, frozen=True):
    """A rank was told to stop by a signal; the front ends the run in order."""

    rank: int
    reason: str


class RankFailed(Message, frozen=True):
    """The rank cannot go on; it ends after this."""

    rank: int
    reason: str


class Heartbeat(Message, frozen=True):
    """Sent once a second by every rank and hands. `doing` names the phase for the watchdog."""

    source: str
    doing: str
    since_s: float


# --- front -> ranks -------------------------------------------------------------------------------


class Generate(Message, frozen=True):
    """Sample a turn: `prompt` holds int32 ids. `seed` makes the sampling a function of (seed, position)."""

    call: str
    prompt: bytes
    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int
    stop_tokens: list[int]
    version: int


class AbortGenerate(Message, frozen=True):
    """Stop a request; its `Generated` answer follows with finish "abort" (or has crossed this message)."""

    call: str


class AgreeRoles(Message, frozen=True):
    """Enter the collective of the leaders that agrees epoch `epoch`: duties[c] is cell c's duty from then on.

    `step` and `version` are what joining cells join and what returning cells load.
    """

    epoch: int
    duties: list[str]
    step: int
    version: int
    weights: bytes
    fingerprint: str


class TakeWeights(Message, frozen=True):
    """A serving cell with nothing in flight loads `version` and reports EngineServing."""

    cell: int
    version: int
    weights: bytes
    fingerprint: str


class MicroStepWork(Message, frozen=True):
    """One claimed micro-step: rows as packed by `pack_rows`."""

    step: int
    index: int
    rows: bytes


class ClaimLater(Message, frozen=True):
    """No work now: ask again."""

    step: int


class StepClosed(Message, frozen=True):
    """The batch is whole. Members [0, members) reduce into the core, which divides by its rollouts or its targets.

    `checkpoint`: somebody asked for one, whether or not one is due.
    """

    step: int
    members: int
    num_rollouts: int
    num_targets: int
    checkpoint: bool = False


class Stop(Message, frozen=True):
    """End in order: engine, replica, groups, process."""

    reason: str


# --- hands -> front -------------------------------------------------------------------------------


class HandsUp(Message, frozen=True):
    """First message of a node's hands; `abilities` are printed at start."""

    node: int
    host: str
    pid: int
    abilities: dict[str, str]


class HandsFailed(Message, frozen=True):
    """A node's hands cannot run the harness at all; they end after this."""

    node: int
    reason: str


class AgentStarted(Message, frozen=True):
    """The sandbox is prepared and the harness runs."""

    rollout: str
    seconds: float


class AgentEnded(Message, frozen=True):
    """The harness is gone, reaped and its workspace kept. `end` is an EndReason; `detail` its own last words."""

    rollout: str
    end: str
    detail: str
    seconds: float


class Graded(Message, frozen=True):
    """The workspace was graded in a fresh sandbox. `error` set: an evaluation failure after all retries."""

    rollout: str
    reward: float
    checks: dict[str, float]
    error: str
    tries: int
    seconds: float


class ModelCall(Message, frozen=True):
    """A harness called the gateway socket of its sandbox."""

    call: str
    rollout: str
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class ModelCallGone(Message, frozen=True):
    """The client hung up before its answer."""

    call: str
    rollout: str


# --- front -> hands -------------------------------------------------------------------------------


class StartAgent(Message, frozen=True):
    """Prepare a sandbox for the task folder and start the harness in it. `seed` only names the rollout's draw."""

    rollout: str
    task: str
    harness: str
    api_key: str
    model: str


class StopAgent(Message, frozen=True):
    """End a rollout now and drop its workspace (the run stops)."""

    rollout: str


class ModelAnswer(Message, frozen=True):
    """The whole HTTP answer to a ModelCall; a stream's chunks are sent in order."""

    call: str
    status: int
    headers: dict[str, str]
    chunks: list[bytes]


Any = Union[  # noqa: UP007 - msgspec wants the union spelled for its decoder
    RankUp, EngineStarted, EngineServing, EngineReleased, Generated, StepJoined, Claim, MicroStepFinished, StepApplied,
    WeightsExposed, StopRequested, RankFailed, Heartbeat, Generate, AbortGenerate, AgreeRoles, TakeWeights,
    MicroStepWork, ClaimLater, StepClosed, Stop, HandsUp, HandsFailed, AgentStarted, AgentEnded, Graded, ModelCall,
    ModelCallGone, StartAgent, StopAgent, ModelAnswer,
]  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Any)


def encode(message: Message) -> bytes:
    """One message as msgpack bytes."""
    return _encoder.encode(message)


def decode(data: bytes | memoryview) -> Message:
    """The message in `data`. Raises msgspec.ValidationError on anything else."""
    return _decoder.decode(data)


def ids_to_bytes(ids: Int32) -> bytes:
    """Token ids as little-endian int32 bytes."""
    return np.ascontiguousarray(ids, dtype="<i4").tobytes()


def ids_from_bytes(data: bytes) -> Int32:
    """Token ids of `ids_to_bytes`, read-only."""
    return np.frombuffer(data, dtype="<i4")


def floats_to_bytes(values: Float32) -> bytes:
    """Log-probs as little-endian float32 bytes."""
    return np.ascontiguousarray(values, dtype="<f4").tobytes()


def floats_from_bytes(data: bytes) -> Float32:
    """Log-probs of `floats_to_bytes`, read-only."""
    return np.frombuffer(data, dtype="<f4")
