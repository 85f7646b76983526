"""What every wire form is turned into, and what a wire form must be able to do.

A request becomes neutral messages in a normal form: known keys only, text parts joined, absent text as "".
Two requests that mean the same history have equal messages, whatever volatile fields a client adds; the raw
body is kept beside them. A dialect parses bodies and writes answers; it knows nothing of trees or tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from gyre.errors import GyreError
from gyre.types import FinishReason


class Speaker(StrEnum):
    """Who a message is from. Closed, because it is rendered between control tokens."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call in an assistant message. `arguments` is the exact text, usually JSON."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message in normal form."""

    speaker: Speaker
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""

    def key(self) -> dict[str, object]:
        """What identifies the message in a history: all of it, as plain data."""
        return {
            "speaker": self.speaker.value,
            "content": self.content,
            "reasoning": self.reasoning,
            "tool_calls": [[call.id, call.name, call.arguments] for call in self.tool_calls],
            "tool_call_id": self.tool_call_id,
            "name": self.name,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """A parsed request for one turn. `raw` is the body as the client sent it."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, object], ...] = ()
    is_stream: bool = False
    wants_usage: bool = False
    max_new_tokens: int | None = None
    model: str = ""
    raw: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A sampled turn as it is told to the harness. `id` is unique within the run."""

    id: str
    model: str
    message: Message
    finish: FinishReason
    prompt_tokens: int
    new_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpAnswer:
    """An HTTP answer: an event stream has several chunks, everything else one or none."""

    status: int
    headers: Mapping[str, str]
    chunks: tuple[bytes, ...]


class RequestRefused(GyreError):
    """A request that is answered with an error: what went wrong in neutral terms, told in the dialect's words."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code


class Dialect(Protocol):
    """One vendor's wire form."""

    def is_turn(self, method: str, path: str) -> bool:
        """Whether the request asks for a sampled turn. `path` has no /v1 in front."""
        ...

    def side_answer(self, method: str, path: str, model: str) -> HttpAnswer | None:
        """The answer to a request that needs no sampling (a list of models), or None when it is not this dialect's."""
        ...

    def parse(self, body: bytes) -> ModelRequest:
        """The request in `body`. Raises RequestRefused on anything that cannot be served, naming the field."""
        ...

    def answer(self, request: ModelRequest, reply: Reply) -> HttpAnswer:
        """The reply, as a stream or whole, as the request wants it."""
        ...

    def refusal(self, refused: RequestRefused) -> HttpAnswer:
        """The error in the vendor's words and status."""
        ...

    def context_overflow(self, *, prompt_tokens: int, max_context_tokens: int) -> RequestRefused:
        """The vendor's own error for a prompt that leaves no room, which makes harnesses compact."""
        ...

    def wrong_key(self, given: str) -> RequestRefused:
        """The vendor's own error for a wrong key."""
        ...
