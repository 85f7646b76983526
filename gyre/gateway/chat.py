"""The dialect of OpenAI Chat Completions, streamed and not.

Parsing is lenient where a client's extras do not matter (unknown fields are kept raw and ignored) and names
the field where something cannot be served. A client's temperature, top_p, stop and seed are ignored: the
behaviour policy must be the run's own. Reasoning is told as `reasoning_content`, where clients look for it.
"""

from collections.abc import Iterator, Mapping

import orjson

from gyre.gateway.dialect import (
    MAX_DEPTH,
    HttpAnswer,
    Message,
    ModelRequest,
    Reply,
    RequestRefused,
    Speaker,
    ToolCall,
    is_deep,
    json_answer,
    stream_answer,
)
from gyre.gateway.openai_words import OpenAiWords, body_of, bound, field, needed, text_of
from gyre.types import FinishReason

_SPEAKERS = {
    "system": Speaker.SYSTEM,
    "developer": Speaker.SYSTEM,
    "user": Speaker.USER,
    "assistant": Speaker.ASSISTANT,
    "tool": Speaker.TOOL,
    "function": Speaker.TOOL,
}


class ChatDialect(OpenAiWords):
    """Stateless: one instance serves every session. It also tells what no other dialect owns."""

    def owns(self, path: str, headers: Mapping[str, str]) -> bool:
        """Everything."""
        return True

    def is_turn(self, method: str, path: str) -> bool:
        """POST /chat/completions."""
        return method == "POST" and path == "/chat/completions"

    def is_count(self, method: str, path: str) -> bool:
        """Never: the vendor counts nothing here."""
        return False

    def parse(self, body: bytes, *, is_count: bool = False) -> ModelRequest:
        """The request in `body`. Raises RequestRefused (400) that names the field at fault."""
        raw = body_of(body)
        messages = needed(raw, "messages", list)
        if not messages:
            raise RequestRefused(400, "Invalid 'messages': empty array.", param="messages")
        if field(raw, "n", int) not in (None, 1):
            raise RequestRefused(400, "Invalid 'n': only one choice is served.", param="n")
        stream_options = field(raw, "stream_options", dict) or {}
        return ModelRequest(
            messages=tuple(_message(place, message) for place, message in enumerate(messages)),
            tools=_tools(field(raw, "tools", list) or []),
            is_stream=bool(field(raw, "stream", bool)),
            wants_usage=bool(field(stream_options, "include_usage", bool, "stream_options.")),
            calls_tools=raw.get("tool_choice") != "none",
            max_new_tokens=bound(raw, "max_completion_tokens", "max_tokens"),
            model=field(raw, "model", str) or "",
            raw=raw,
        )

    def answer(self, request: ModelRequest, reply: Reply) -> HttpAnswer:
        """A chat.completion, or its chunks: role, reasoning, content, calls, finish, usage if wanted, [DONE]."""
        usage = {
            "prompt_tokens": reply.prompt_tokens,
            "completion_tokens": reply.new_tokens,
            "total_tokens": reply.prompt_tokens + reply.new_tokens,
            "prompt_tokens_details": {"cached_tokens": reply.cached_tokens},
        }
        finish = "tool_calls" if reply.message.tool_calls else "stop"
        if reply.finish is FinishReason.LENGTH:
            finish = "length"
        if not request.is_stream:
            choice = {"index": 0, "message": _told(reply.message), "logprobs": None, "finish_reason": finish}
            return json_answer(200, {**_head(reply, "chat.completion"), "choices": [choice], "usage": usage})
        head = _head(reply, "chat.completion.chunk")
        chunks = [
            {**head, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}]}
            for delta in _deltas(reply.message)
        ]
        chunks.append({**head, "choices": [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": finish}]})
        if request.wants_usage:
            chunks = [{**chunk, "usage": None} for chunk in chunks]
            chunks.append({**head, "choices": [], "usage": usage})
        return stream_answer([*(b"data: " + orjson.dumps(chunk) + b"\n\n" for chunk in chunks), b"data: [DONE]\n\n"])

    def count(self, tokens: int) -> HttpAnswer:
        """Never asked for."""
        return json_answer(200, {"input_tokens": tokens})

    def stream_error(self, body: bytes) -> bytes:
        """A chunk that holds the error."""
        return b"data: " + body.replace(b"\n", b" ") + b"\n\n"

    def context_overflow(self, *, prompt_tokens: int, max_context_tokens: int) -> RequestRefused:
        """context_length_exceeded."""
        text = (
            f"This model's maximum context length is {max_context_tokens} tokens. However, your messages resulted in "
            f"{prompt_tokens} tokens. Please reduce the length of the messages."
        )
        return RequestRefused(400, text, param="messages", code="context_length_exceeded")

    def unrenderable(self, reason: str) -> RequestRefused:
        """An invalid 'messages'."""
        return RequestRefused(400, f"Invalid 'messages': {reason}", param="messages")


def _head(reply: Reply, kind: str) -> dict[str, object]:
    return {"id": f"chatcmpl-{reply.id}", "object": kind, "created": 0, "model": reply.model}


def _told(message: Message) -> dict[str, object]:
    """The message of a whole answer. Beside calls, no text is null, as the vendor tells it."""
    told: dict[str, object] = {"role": "assistant", "content": message.content, "refusal": None}
    if message.reasoning:
        told["reasoning_content"] = message.reasoning
    if message.tool_calls:
        told["content"] = message.content or None
        told["tool_calls"] = [_call(call) for call in message.tool_calls]
    return told


def _deltas(message: Message) -> Iterator[dict[str, object]]:
    """What the chunks of a stream add."""
    yield {"role": "assistant", "content": ""}
    if message.reasoning:
        yield {"reasoning_content": message.reasoning}
    if message.content:
        yield {"content": message.content}
    for index, call in enumerate(message.tool_calls):
        whole = _call(call)
        yield {"tool_calls": [{"index": index, **whole, "function": {"name": call.name, "arguments": ""}}]}
        yield {"tool_calls": [{"index": index, "function": {"arguments": call.arguments}}]}


def _call(call: ToolCall) -> dict[str, object]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _tools(tools: list[object]) -> tuple[Mapping[str, object], ...]:
    shown = []
    for place, tool in enumerate(tools):
        at = f"tools[{place}]"
        if not isinstance(tool, dict):
            raise RequestRefused(400, f"Invalid type for '{at}': expected an object.", param=at)
        shown.append({name: value for name, value in tool.items() if name != "cache_control"})
    if is_deep(tools):
        raise RequestRefused(400, f"Invalid 'tools': nested deeper than {MAX_DEPTH}.", param="tools")
    return tuple(shown)


def _message(place: int, raw: object) -> Message:
    at = f"messages[{place}]"
    if not isinstance(raw, dict):
        raise RequestRefused(400, f"Invalid type for '{at}': expected an object.", param=at)
    role = needed(raw, "role", str, f"{at}.")
    if role not in _SPEAKERS:
        raise RequestRefused(400, f"Invalid value for '{at}.role': {role[:40]!r}.", param=f"{at}.role")
    calls = field(raw, "tool_calls", list, f"{at}.") or []
    reasoning = raw.get("reasoning_content") or raw.get("reasoning")
    return Message(
        speaker=_SPEAKERS[role],
        content=text_of(raw.get("content"), f"{at}.content", ""),
        reasoning=reasoning if isinstance(reasoning, str) else "",
        tool_calls=tuple(_tool_call(call, f"{at}.tool_calls[{index}]") for index, call in enumerate(calls)),
        tool_call_id=field(raw, "tool_call_id", str, f"{at}.") or "",
        name=field(raw, "name", str, f"{at}.") or "",
    )


def _tool_call(raw: object, at: str) -> ToolCall:
    function = raw.get("function") if isinstance(raw, dict) else None
    if not isinstance(raw, dict) or not isinstance(function, dict):
        raise RequestRefused(400, f"Invalid value for '{at}': expected a function call.", param=at)
    return ToolCall(
        id=field(raw, "id", str, f"{at}.") or "",
        name=field(function, "name", str, f"{at}.function.") or "",
        arguments=field(function, "arguments", str, f"{at}.function.") or "",
    )
