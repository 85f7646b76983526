"""What every wire form is turned into, and what a wire form must be able to do.

A request becomes neutral messages in a normal form: known keys only, text parts joined, absent text as "".
Two requests that mean the same history have equal messages, whatever volatile fields a client adds; the raw
body is kept beside them. A dialect parses bodies and writes answers; it knows nothing of trees or tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import orjson

from gyre.errors import GyreError
from gyre.types import FinishReason

MAX_DEPTH = 64
"""How deep tools and arguments may be nested: what templates and serialisers surely bear."""


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
    """One message in normal form. `volatile` is the beginning of `content` that does not count in a match."""

    speaker: Speaker
    content: str = ""
    volatile: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """A parsed request for one turn. `raw` is the body as the client sent it.

    `tools` have the shape that templates expect; `calls_tools` is False where the client forbids calls.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, object], ...] = ()
    is_stream: bool = False
    wants_usage: bool = False
    calls_tools: bool = True
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
    """One vendor's wire form. Paths have no /v1 in front; `headers` have lower-case names."""

    call_prefix: str
    """What the ids of tool calls begin with."""

    ping: bytes
    """What is written into a waiting stream."""

    def owns(self, path: str, headers: Mapping[str, str]) -> bool:
        """Whether a request on `path` is told in this dialect."""
        ...

    def is_turn(self, method: str, path: str) -> bool:
        """Whether the request asks for a sampled turn."""
        ...

    def is_count(self, method: str, path: str) -> bool:
        """Whether the request asks how many tokens a prompt has."""
        ...

    def parse(self, body: bytes, *, is_count: bool = False) -> ModelRequest:
        """The request in `body`. Raises RequestRefused on anything that cannot be served, naming the field."""
        ...

    def answer(self, request: ModelRequest, reply: Reply) -> HttpAnswer:
        """The reply, as a stream or whole, as the request wants it."""
        ...

    def count(self, tokens: int) -> HttpAnswer:
        """The answer to a count."""
        ...

    def models(self, names: Sequence[str]) -> HttpAnswer:
        """The list of models."""
        ...

    def model(self, name: str) -> HttpAnswer:
        """The facts of one model."""
        ...

    def refusal(self, refused: RequestRefused) -> HttpAnswer:
        """The error in the vendor's words and status."""
        ...

    def stream_error(self, body: bytes) -> bytes:
        """The body of an error as an event of a stream that has begun."""
        ...

    def context_overflow(self, *, prompt_tokens: int, max_context_tokens: int) -> RequestRefused:
        """The vendor's own error for a prompt that leaves no room, which makes harnesses compact."""
        ...

    def wrong_key(self, given: str) -> RequestRefused:
        """The vendor's own error for a wrong key; `given` is "" where there was none."""
        ...

    def unknown_model(self, name: str) -> RequestRefused:
        """The vendor's own error for a model that is not served."""
        ...

    def unknown_path(self, method: str, path: str) -> RequestRefused:
        """The vendor's own error for a request that nobody serves."""
        ...

    def unrenderable(self, reason: str) -> RequestRefused:
        """The vendor's own error for messages that the chat template refuses."""
        ...


JSON_HEADERS = {"content-type": "application/json"}
STREAM_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}


def json_answer(status: int, content: Mapping[str, object]) -> HttpAnswer:
    """A whole JSON answer."""
    return HttpAnswer(status=status, headers=JSON_HEADERS, chunks=(orjson.dumps(content),))


def stream_answer(chunks: Sequence[bytes]) -> HttpAnswer:
    """An event stream."""
    return HttpAnswer(status=200, headers=STREAM_HEADERS, chunks=tuple(chunks))


def event(name: str, content: Mapping[str, object]) -> bytes:
    """One named event of a stream."""
    return b"event: " + name.encode() + b"\ndata: " + orjson.dumps(content) + b"\n\n"


def function_tool(name: str, description: str, parameters: object) -> dict[str, object]:
    """A tool in the shape that chat templates expect."""
    schema = parameters if isinstance(parameters, dict) else {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def is_deep(value: object, limit: int = MAX_DEPTH) -> bool:
    """Whether lists and objects in `value` are nested deeper than `limit`."""
    depth, level = 0, [value]
    while level:
        inner = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, (dict, list))]
        level = [item for items in inner for item in items]
        depth += 1
        if depth > limit:
            return True
    return False
