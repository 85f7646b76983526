"""The dialect of OpenAI Chat Completions, streamed and not.

Parsing is lenient where a client's extras do not matter (unknown fields are kept raw and ignored) and names
the field where something cannot be served. A client's temperature, top_p, stop and seed are ignored: the
behaviour policy must be the run's own. Tool calls in histories are understood; the policy's own text is
returned as text. The answers have no clock: `created` is 0.
"""

from collections.abc import Mapping
from typing import TypeVar, cast

import orjson

from gyre.gateway.dialect import (
    HttpAnswer,
    Message,
    ModelRequest,
    Reply,
    RequestRefused,
    Speaker,
    ToolCall,
)
from gyre.types import FinishReason

JSON_HEADERS = {"content-type": "application/json"}
STREAM_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}

T = TypeVar("T")

_MAX_DEPTH = 64

_SPEAKERS = {
    "system": Speaker.SYSTEM,
    "developer": Speaker.SYSTEM,
    "user": Speaker.USER,
    "assistant": Speaker.ASSISTANT,
    "tool": Speaker.TOOL,
    "function": Speaker.TOOL,
}


class ChatDialect:
    """Stateless: one instance serves every session."""

    def is_turn(self, method: str, path: str) -> bool:
        """POST /chat/completions."""
        return method == "POST" and path == "/chat/completions"

    def side_answer(self, method: str, path: str, model: str) -> HttpAnswer | None:
        """GET /models and GET /models/NAME (any name is served by the one policy)."""
        if method not in ("GET", "HEAD"):
            return None
        if path == "/models":
            return json_answer(200, {"object": "list", "data": [_model_facts(model)]})
        if path.startswith("/models/"):
            return json_answer(200, _model_facts(path.removeprefix("/models/")))
        return None

    def parse(self, body: bytes) -> ModelRequest:
        """The request in `body`. Raises RequestRefused (400) that names the field at fault."""
        try:
            raw = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise RequestRefused(400, f"We could not parse the JSON body of your request: {error}") from error
        if not isinstance(raw, dict):
            raise RequestRefused(400, "The JSON body of your request must be an object.")
        messages = _field(raw, "messages", list, required=True)
        if not messages:
            raise RequestRefused(400, "Invalid 'messages': empty array.", param="messages")
        if _field(raw, "n", int) not in (None, 1):
            raise RequestRefused(400, "Invalid 'n': only one choice is served.", param="n")
        stream_options = _field(raw, "stream_options", dict) or {}
        return ModelRequest(
            messages=tuple(_message(place, message) for place, message in enumerate(messages)),
            tools=_tools(_field(raw, "tools", list) or []),
            is_stream=bool(_field(raw, "stream", bool)),
            wants_usage=bool(_field(stream_options, "include_usage", bool, "stream_options.")),
            max_new_tokens=_max_new_tokens(raw),
            model=_field(raw, "model", str) or "",
            raw=raw,
        )

    def answer(self, request: ModelRequest, reply: Reply) -> HttpAnswer:
        """A chat.completion, or its chunks: role, content, finish, usage if wanted, [DONE]."""
        usage = {
            "prompt_tokens": reply.prompt_tokens,
            "completion_tokens": reply.new_tokens,
            "total_tokens": reply.prompt_tokens + reply.new_tokens,
            "prompt_tokens_details": {"cached_tokens": reply.cached_tokens},
        }
        finish = "length" if reply.finish is FinishReason.LENGTH else "stop"
        if not request.is_stream:
            message = {"role": "assistant", "content": reply.message.content, "refusal": None}
            choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}
            return json_answer(200, {**_head(reply, "chat.completion"), "choices": [choice], "usage": usage})
        deltas: list[tuple[dict[str, str], str | None]] = [({"role": "assistant", "content": ""}, None)]
        if reply.message.content:
            deltas.append(({"content": reply.message.content}, None))
        deltas.append(({}, finish))
        head = _head(reply, "chat.completion.chunk")
        chunks = [
            {**head, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": end}]}
            for delta, end in deltas
        ]
        if request.wants_usage:
            chunks = [{**chunk, "usage": None} for chunk in chunks]
            chunks.append({**head, "choices": [], "usage": usage})
        events = tuple(b"data: " + orjson.dumps(chunk) + b"\n\n" for chunk in chunks)
        return HttpAnswer(status=200, headers=STREAM_HEADERS, chunks=(*events, b"data: [DONE]\n\n"))

    def refusal(self, refused: RequestRefused) -> HttpAnswer:
        """`{"error": {message, type, param, code}}`."""
        kind = "server_error" if refused.status >= 500 else "invalid_request_error"
        error = {"message": refused.message, "type": kind, "param": refused.param, "code": refused.code}
        return json_answer(refused.status, {"error": error})

    def context_overflow(self, *, prompt_tokens: int, max_context_tokens: int) -> RequestRefused:
        """OpenAI's context_length_exceeded."""
        text = (
            f"This model's maximum context length is {max_context_tokens} tokens. However, your messages resulted in "
            f"{prompt_tokens} tokens. Please reduce the length of the messages."
        )
        return RequestRefused(400, text, param="messages", code="context_length_exceeded")

    def wrong_key(self, given: str) -> RequestRefused:
        """OpenAI's invalid_api_key; only the ends of the given key are repeated."""
        shown = f"{given[:3]}***{given[-2:]}" if len(given) > 8 else "***"
        return RequestRefused(401, f"Incorrect API key provided: {shown}.", code="invalid_api_key")


def json_answer(status: int, content: Mapping[str, object]) -> HttpAnswer:
    """A whole JSON answer."""
    return HttpAnswer(status=status, headers=JSON_HEADERS, chunks=(orjson.dumps(content),))


def _head(reply: Reply, kind: str) -> dict[str, object]:
    return {"id": f"chatcmpl-{reply.id}", "object": kind, "created": 0, "model": reply.model}


def _model_facts(model: str) -> dict[str, object]:
    return {"id": model, "object": "model", "created": 0, "owned_by": "gyre"}


def _field(raw: Mapping[str, object], name: str, kind: type[T], at: str = "", required: bool = False) -> T | None:
    """`raw[name]` if it is a `kind`; None when it is absent or null and not required."""
    value = raw.get(name)
    if value is None:
        if required:
            raise RequestRefused(400, f"Missing required parameter: '{at}{name}'.", param=f"{at}{name}")
        return None
    if type(value) is not kind:  # exactly: a bool is no int
        names = {list: "an array", dict: "an object", str: "a string", int: "an integer", bool: "a boolean"}
        text = f"Invalid type for '{at}{name}': expected {names[kind]}, but got {type(value).__name__} instead."
        raise RequestRefused(400, text, param=f"{at}{name}")
    return cast(T, value)


def _max_new_tokens(raw: Mapping[str, object]) -> int | None:
    """The smaller of the two names that clients use for the bound."""
    bounds = []
    for name in ("max_completion_tokens", "max_tokens"):
        value = _field(raw, name, int)
        if value is not None and value < 1:
            raise RequestRefused(400, f"Invalid '{name}': must be at least 1.", param=name)
        if value is not None:
            bounds.append(value)
    return min(bounds) if bounds else None


def _tools(tools: list[object]) -> tuple[Mapping[str, object], ...]:
    for place, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise RequestRefused(
                400, f"Invalid type for 'tools[{place}]': expected an object.", param=f"tools[{place}]"
            )
    if _depth(tools) > _MAX_DEPTH:
        raise RequestRefused(400, f"Invalid 'tools': nested deeper than {_MAX_DEPTH}.", param="tools")
    return tuple(tool for tool in tools if isinstance(tool, dict))


def _depth(value: object) -> int:
    """How deep lists and objects are nested, at most one more than what is allowed."""
    depth, level = 0, [value]
    while level and depth <= _MAX_DEPTH:
        depth += 1
        inner = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, (dict, list))]
        level = [item for items in inner for item in items]
    return depth


def _message(place: int, raw: object) -> Message:
    at = f"messages[{place}]"
    if not isinstance(raw, dict):
        raise RequestRefused(400, f"Invalid type for '{at}': expected an object.", param=at)
    role = _field(raw, "role", str, f"{at}.", required=True)
    if role not in _SPEAKERS:
        raise RequestRefused(400, f"Invalid value for '{at}.role': {str(role)[:40]!r}.", param=f"{at}.role")
    calls = _field(raw, "tool_calls", list, f"{at}.") or []
    reasoning = raw.get("reasoning_content")
    return Message(
        speaker=_SPEAKERS[role],
        content=_text(raw.get("content"), f"{at}.content"),
        reasoning=reasoning if isinstance(reasoning, str) else "",
        tool_calls=tuple(_tool_call(call, f"{at}.tool_calls[{index}]") for index, call in enumerate(calls)),
        tool_call_id=_field(raw, "tool_call_id", str, f"{at}.") or "",
        name=_field(raw, "name", str, f"{at}.") or "",
    )


def _text(content: object, at: str) -> str:
    """The text of a message: a string, or text parts joined."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestRefused(400, f"Invalid type for '{at}': expected a string or an array of parts.", param=at)
    texts = []
    for place, part in enumerate(content):
        text = part.get("text", part.get("refusal")) if isinstance(part, dict) else None
        if not isinstance(text, str):
            param = f"{at}[{place}]"
            raise RequestRefused(400, f"Invalid value for '{param}': only text parts are served.", param=param)
        texts.append(text)
    return "".join(texts)


def _tool_call(raw: object, at: str) -> ToolCall:
    function = raw.get("function") if isinstance(raw, dict) else None
    if not isinstance(raw, dict) or not isinstance(function, dict):
        raise RequestRefused(400, f"Invalid value for '{at}': expected a function call.", param=at)
    return ToolCall(
        id=_field(raw, "id", str, f"{at}.") or "",
        name=_field(function, "name", str, f"{at}.function.") or "",
        arguments=_field(function, "arguments", str, f"{at}.function.") or "",
    )
