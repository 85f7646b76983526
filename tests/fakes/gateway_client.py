"""Builds model calls and samples as a harness and an engine would."""

import itertools
from typing import Any

import numpy as np
import orjson

from gyre.gateway.session import Sampling, Session
from gyre.types import FinishReason, Sample, VersionSpan
from gyre.wire.messages import ModelAnswer, ModelCall

API_KEY = "key-of-the-rollout"
_numbers = itertools.count()


def chat_call(messages: list[dict[str, Any]], *, path: str = "/v1/chat/completions", **fields: Any) -> ModelCall:
    """A POST of a chat request."""
    return raw_call(orjson.dumps({"model": "any", "messages": messages, **fields}), path=path)


def raw_call(body: bytes, *, method: str = "POST", path: str = "/chat/completions", key: str = API_KEY) -> ModelCall:
    """Any request."""
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    return ModelCall(call=f"c{next(_numbers)}", rollout="0.0", method=method, path=path, headers=headers, body=body)


def sampled(tokens: list[int], finish: FinishReason = FinishReason.STOP, version: int = 1) -> Sample:
    """What an engine returns for a turn."""
    return Sample(
        tokens=np.array(tokens, dtype=np.int32),
        logprobs=np.full(len(tokens), -0.5, dtype=np.float32),
        spans=(VersionSpan(start=0, end=len(tokens), version=version),),
        finish=finish,
    )


def content_of(answer: ModelAnswer) -> str:
    """The assistant's text in a whole chat answer."""
    assert answer.status == 200, answer
    return orjson.loads(answer.chunks[0])["choices"][0]["message"]["content"]


def take_turn(session: Session, messages: list[dict[str, Any]], sample: Sample, **fields: Any) -> tuple[Sampling, str]:
    """One whole turn: the sampling asked for and the text told."""
    opened = session.open(chat_call(messages, **fields))
    assert isinstance(opened, Sampling), opened
    (answer,) = session.close(opened.call, sample)
    return opened, content_of(answer)
