"""A front whose model calls go through real sessions, with a scripted policy in place of the engines.

The policy is a function of the request that the client sent; what it says is encoded with the model's own
tokenizer and returned as a sample with log-probs, as an engine would.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from gyre.gateway.render import Renderer, load_renderer
from gyre.gateway.session import Answered, Sampling, Session, SessionSettings
from gyre.harness.install import RegistryError
from gyre.harness.programs import PROGRAMS
from gyre.types import FinishReason, Int32, Sample, VersionSpan
from gyre.wire.messages import AgentEnded, Graded, ModelAnswer, ModelCall, StartAgent
from tests.clients.fake_front import HELLO, FakeFront
from tests.fakes.chat_model import write_chat_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request for a turn. `number` counts the rollout's sampled turns from 0."""

    number: int
    body: dict[str, Any]
    headers: Mapping[str, str]

    @property
    def text(self) -> str:
        """The whole body as text, to look for words in."""
        return orjson.dumps(self.body).decode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Say:
    """A turn: text, then calls (name, arguments: an object, or any text)."""

    text: str = ""
    calls: tuple[tuple[str, Mapping[str, object] | str], ...] = ()

    def written(self) -> str:
        """As the model family writes it."""
        parts = [self.text] if self.text else []
        for name, arguments in self.calls:
            shown = arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()
            parts.append(f'<tool_call>\n{{"name": "{name}", "arguments": {shown}}}\n</tool_call>')
        return "\n".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    """The engines could not serve the turn."""

    status: int = 503
    message: str = "no cell can serve it"


Policy = Callable[[Asked], Say | Fail]


@dataclass(slots=True, kw_only=True)
class Served:
    """What one rollout asked for and got."""

    session: Session
    asked: list[Asked] = field(default_factory=list)
    said: list[Int32] = field(default_factory=list)
    refused: list[ModelAnswer] = field(default_factory=list)


class ScriptedFront(FakeFront):
    """The fake front, with sessions and trees."""

    def __init__(
        self, folder: Path, policy: Policy, *, harness: str, context_tokens: int = 200_000, turn_tokens: int = 4096
    ) -> None:
        super().__init__(folder, lambda *_: "", harness=harness, context_tokens=context_tokens, turn_tokens=turn_tokens)
        self._policy = policy
        self._renderer: Renderer = load_renderer(write_chat_model(folder / "model"))
        self._limits = context_tokens, turn_tokens
        self.served: dict[str, Served] = {}

    def start(self, rollout: str, task: Path = HELLO) -> None:
        context_tokens, turn_tokens = self._limits
        settings = SessionSettings(
            temperature=1.0,
            top_p=1.0,
            max_turn_tokens=turn_tokens,
            max_context_tokens=context_tokens,
            model_name="tiny",
            api_key=f"key-{rollout}",
        )
        self.served[rollout] = Served(session=Session(rollout, self._renderer, settings))
        self.link.post(
            "hands/0", StartAgent(rollout=rollout, task=str(task), harness="", api_key=f"key-{rollout}", model="tiny")
        )

    def _answer(self, identity: str, call: ModelCall) -> None:
        self.calls.append(call)
        served = self.served[call.rollout]
        opened = served.session.open(call)
        answers: list[ModelAnswer] = []
        match opened:
            case Answered():
                answers = [opened.answer]
                if opened.answer.status >= 400:
                    served.refused.append(opened.answer)
            case Sampling():
                answers = self._sample(served, call, opened)
        for answer in answers:
            self.link.post(identity, answer)

    def _sample(self, served: Served, call: ModelCall, opened: Sampling) -> list[ModelAnswer]:
        asked = Asked(number=len(served.asked), body=orjson.loads(call.body), headers=call.headers)
        served.asked.append(asked)
        reply = self._policy(asked)
        if isinstance(reply, Fail):
            return served.session.fail(opened.call, reply.status, reply.message)
        template = self._renderer.template
        tokens = np.append(template.encode(reply.written()), np.int32(template.end_of_turn)).astype(np.int32)
        is_cut = len(tokens) > opened.max_new_tokens
        tokens = tokens[: opened.max_new_tokens]
        served.said.append(tokens)
        sample = Sample(
            tokens=tokens,
            logprobs=np.full(len(tokens), -0.25, dtype=np.float32),
            spans=(VersionSpan(start=0, end=len(tokens), version=1),),
            finish=FinishReason.LENGTH if is_cut else FinishReason.STOP,
        )
        return served.session.close(opened.call, sample)


def require(harness: str) -> None:
    """Install the program unless it is there; skips the test where its registry is out of reach."""
    try:
        PROGRAMS[harness].npm.install()
    except RegistryError as error:
        pytest.skip(f"the npm registry is out of reach: {error}")


def assert_sampled_once(served: Served) -> None:
    """Every turn that was said is in the tree exactly once, as it was said, and nothing was tokenised again."""
    tree, stats = served.session.tree, served.session.stats
    found = Counter(tuple(node.tokens.tolist()) for node in tree.nodes() if node.sampled)
    assert found == Counter(tuple(tokens.tolist()) for tokens in served.said)
    assert stats.retokenised_tokens == 0, stats


async def finished(front: ScriptedFront, rollout: str, seconds: float = 90.0) -> tuple[AgentEnded, Graded]:
    """The rollout's end and its score."""
    (graded,) = await front.wait_for(Graded, rollout=rollout, seconds=seconds)
    (ended,) = front.of(AgentEnded, rollout)
    assert isinstance(ended, AgentEnded)
    assert isinstance(graded, Graded)
    return ended, graded
