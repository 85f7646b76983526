"""One turn's request in SGLang's terms, and SGLang's answer in ours.

What SGLang 0.5.23 returns as log-probs: those of the whole vocabulary at the request's temperature,
log softmax(logits / T). That is the sampled distribution for top_p 1 and any T > 0; for T = 0 (the most likely
token) it is the policy's at T = 1. With top_p < 1 it samples from the renormalised nucleus but still returns
the log-probs before the cut, so such a request is refused: its behaviour log-probs would be wrong.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from gyre.errors import EngineError
from gyre.types import FinishReason, Int32, Sample, VersionSpan

SglangEngine: TypeAlias = Any
"""An `sglang.Engine`: its own annotations are too loose (most attributes may be None) to check anything against."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One turn to sample, continuing `prompt` (int32 ids, at least one).

    `call` names the request. Sampling is a function of (weights, prompt, `seed`, absolute position), so a turn
    that was cut can be continued from prompt + partial output with the same seed. Sampling ends with a token
    of `stop_tokens`, which is part of the output, as is the model folder's own end token.
    """

    call: str
    prompt: Int32
    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int
    stop_tokens: tuple[int, ...]
    version: int


def refuse_unsound(request: GenerateRequest) -> None:
    """Raise EngineError for a request that cannot be sampled, or not with true log-probs."""
    if len(request.prompt) == 0:
        raise EngineError(f"call {request.call}: the prompt is empty")
    if request.max_new_tokens < 1:
        raise EngineError(f"call {request.call}: max_new_tokens is {request.max_new_tokens}, wanted at least 1")
    if not (math.isfinite(request.temperature) and request.temperature >= 0):
        raise EngineError(f"call {request.call}: temperature is {request.temperature}, wanted 0 or more")
    if request.temperature > 0 and request.top_p != 1.0:
        raise EngineError(
            f"call {request.call}: top_p is {request.top_p}; below 1 the engine does not return the log-probs "
            "of the distribution it samples from"
        )


def sampling_params(request: GenerateRequest) -> dict[str, object]:
    """SGLang's sampling parameters for a request that passed `refuse_unsound`."""
    return {
        "max_new_tokens": request.max_new_tokens,
        "temperature": request.temperature,
        "top_p": 1.0,
        "sampling_seed": request.seed,
        "stop_token_ids": list(request.stop_tokens),
    }


def to_sample(output: Mapping[str, Any], *, version: int) -> Sample:
    """SGLang's answer as a Sample. Raises EngineError when ids and log-probs do not match."""
    meta = output["meta_info"]
    tokens = np.asarray(output.get("output_ids") or (), dtype=np.int32)
    # Absent when a request was cut before its prompt was read.
    pairs = meta.get("output_token_logprobs") or ()
    logprobs = np.asarray([pair[0] for pair in pairs], dtype=np.float32)
    if [pair[1] for pair in pairs] != tokens.tolist():
        raise EngineError(f"the engine returned {len(tokens)} tokens and {len(pairs)} log-probs that do not match")
    return Sample(
        tokens=tokens,
        logprobs=logprobs,
        spans=(VersionSpan(start=0, end=len(tokens), version=version),) if len(tokens) else (),
        finish=FinishReason(meta["finish_reason"]["type"]),
        cached_tokens=int(meta.get("cached_tokens") or 0),
    )


def empty_sample() -> Sample:
    """The answer to a request that was cut before it began."""
    return Sample(
        tokens=np.empty(0, dtype=np.int32),
        logprobs=np.empty(0, dtype=np.float32),
        spans=(),
        finish=FinishReason.ABORT,
    )
