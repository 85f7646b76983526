"""The dialect of Anthropic Messages, streamed and not, as Claude Code speaks it.

Typed by hand: the vendor's models are too slow for bodies of a whole context and reject some real traffic;
tests hold the answers against them. A tool result becomes a message of its own; tools that are loaded later
are shown where the conversation refers to them, so that the prompt before stays as it is. Thinking is told
only to clients that asked for it. Nothing is invented: a signature names the turn, and comes back unread.
"""

import base64
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar, cast

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
    event,
    function_tool,
    is_deep,
    json_answer,
    stream_answer,
)
from gyre.types import FinishReason

T = TypeVar("T")

BILLING = "x-anthropic-billing-header:"
"""A system block that differs from conversation to conversation and says nothing to the model."""

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}
_SPEAKERS = {"user": Speaker.USER, "assistant": Speaker.ASSISTANT, "system": Speaker.SYSTEM}
_OMITTED = frozenset({"image", "document", "container_upload", "search_result"})
_NAMES = {list: "a valid list", dict: "a valid dictionary", str: "a valid string", int: "a valid integer"}


class MessagesDialect:
    """Stateless: one instance serves every session."""

    call_prefix = "toolu_"
    ping = b'event: ping\ndata: {"type":"ping"}\n\n'

    def owns(self, path: str, headers: Mapping[str, str]) -> bool:
        """/messages and below; everything else of a client that names a version of Anthropic's API."""
        return path == "/messages" or path.startswith("/messages/") or "anthropic-version" in headers

    def is_turn(self, method: str, path: str) -> bool:
        """POST /messages."""
        return method == "POST" and path == "/messages"

    def is_count(self, method: str, path: str) -> bool:
        """POST /messages/count_tokens."""
        return method == "POST" and path == "/messages/count_tokens"

    def parse(self, body: bytes, *, is_count: bool = False) -> ModelRequest:
        """The request in `body`. Raises RequestRefused (400) that names the field at fault."""
        try:
            raw = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise RequestRefused(400, f"The request body is not valid JSON: {error}") from error
        if not isinstance(raw, dict):
            raise RequestRefused(400, "Input should be a valid dictionary")
        model = _needed(raw, "model", str)
        messages = _needed(raw, "messages", list)
        if not messages:
            raise RequestRefused(400, "messages: at least one message is required")
        max_tokens = _maybe(raw, "max_tokens", int) if is_count else _needed(raw, "max_tokens", int)
        if max_tokens is not None and max_tokens < 1:
            raise RequestRefused(400, "max_tokens: Input should be greater than or equal to 1")
        tools = _Tools(_maybe(raw, "tools", list) or [], messages)
        parsed = [*_system(raw.get("system")), *(one for parts in _all(messages, tools) for one in parts)]
        choice = _maybe(raw, "tool_choice", dict) or {}
        return ModelRequest(
            messages=tuple(parsed),
            tools=tools.shown,
            is_stream=bool(_maybe(raw, "stream", bool)),
            calls_tools=choice.get("type") != "none",
            max_new_tokens=max_tokens,
            model=model,
            raw=raw,
        )

    def answer(self, request: ModelRequest, reply: Reply) -> HttpAnswer:
        """A message, or message_start, ping, its blocks, message_delta, message_stop."""
        blocks = list(_blocks(request, reply))
        usage = {
            "input_tokens": max(reply.prompt_tokens - reply.cached_tokens, 0),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": reply.cached_tokens,
            "output_tokens": reply.new_tokens,
        }
        stop = "tool_use" if reply.message.tool_calls else "end_turn"
        if reply.finish is FinishReason.LENGTH:
            stop = "max_tokens"
        message: dict[str, object] = {
            "id": f"msg_{reply.id}",
            "type": "message",
            "role": "assistant",
            "model": reply.model,
            "content": blocks,
            "stop_reason": stop,
            "stop_sequence": None,
            "usage": usage,
        }
        if not request.is_stream:
            return json_answer(200, message)
        raw = {call.id: call.arguments for call in reply.message.tool_calls}
        opened = {**message, "content": [], "stop_reason": None, "usage": {**usage, "output_tokens": 0}}
        end = {"stop_reason": stop, "stop_sequence": None}
        return stream_answer(
            [
                event("message_start", {"type": "message_start", "message": opened}),
                self.ping,
                *(
                    told
                    for index, block in enumerate(blocks)
                    for told in _block_events(index, block, raw.get(str(block.get("id")), ""))
                ),
                event("message_delta", {"type": "message_delta", "delta": end, "usage": usage}),
                event("message_stop", {"type": "message_stop"}),
            ]
        )

    def count(self, tokens: int) -> HttpAnswer:
        """`{"input_tokens": N}`."""
        return json_answer(200, {"input_tokens": tokens})

    def models(self, names: Sequence[str]) -> HttpAnswer:
        """One page with all models."""
        data = [_model_facts(name) for name in names]
        ends = {"first_id": names[0] if names else None, "last_id": names[-1] if names else None}
        return json_answer(200, {"data": data, "has_more": False, **ends})

    def model(self, name: str) -> HttpAnswer:
        """The facts of one model."""
        return json_answer(200, _model_facts(name))

    def refusal(self, refused: RequestRefused) -> HttpAnswer:
        """`{"type": "error", "error": {type, message}}`; no engine is told as overload (529)."""
        status = 529 if refused.status == 503 else refused.status
        kind = _KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
        return json_answer(status, {"type": "error", "error": {"type": kind, "message": refused.message}})

    def stream_error(self, body: bytes) -> bytes:
        """An `error` event."""
        return b"event: error\ndata: " + body.replace(b"\n", b" ") + b"\n\n"

    def context_overflow(self, *, prompt_tokens: int, max_context_tokens: int) -> RequestRefused:
        """The words on which Claude Code compacts."""
        return RequestRefused(400, f"prompt is too long: {prompt_tokens} tokens > {max_context_tokens} maximum")

    def wrong_key(self, given: str) -> RequestRefused:
        """authentication_error."""
        return RequestRefused(401, "invalid x-api-key" if given else "x-api-key header is required")

    def unknown_model(self, name: str) -> RequestRefused:
        """not_found_error."""
        return RequestRefused(404, f"model: {name[:200]}")

    def unknown_path(self, method: str, path: str) -> RequestRefused:
        """not_found_error."""
        return RequestRefused(404, "Not Found")

    def unrenderable(self, reason: str) -> RequestRefused:
        """invalid_request_error."""
        return RequestRefused(400, f"messages: {reason}")


class _Tools:
    """The tools of a request: those shown at the top, and those shown where the conversation refers to them."""

    def __init__(self, raw: list[object], messages: list[object]) -> None:
        self.by_name: dict[str, Mapping[str, object]] = {}
        later = _referred(messages)
        shown = []
        for place, tool in enumerate(raw):
            if not isinstance(tool, dict):
                raise RequestRefused(400, f"tools.{place}: Input should be a valid dictionary")
            name = _needed(tool, "name", str, f"tools.{place}.")
            if is_deep(tool):
                raise RequestRefused(400, f"tools.{place}: nested deeper than {MAX_DEPTH}")
            if tool.get("type", "custom") not in ("custom", None):
                continue  # a tool that the vendor's servers run: nobody runs it here, so the policy is not told of it
            description = tool.get("description")
            neutral = function_tool(name, description if isinstance(description, str) else "", tool.get("input_schema"))
            self.by_name[name] = neutral
            if name not in later and tool.get("defer_loading") is not True:
                shown.append(neutral)
        self.shown = tuple(shown)

    def loaded(self, name: str) -> str:
        """What the policy sees in place of a reference to a tool."""
        tool = self.by_name.get(name)
        return orjson.dumps(tool).decode() if tool is not None else name


def _referred(messages: list[object]) -> set[str]:
    """Names of the tools that tool results refer to."""
    names = set()
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        for block in content if isinstance(content, list) else []:
            inner = block.get("content") if isinstance(block, dict) else None
            for item in inner if isinstance(inner, list) else []:
                if isinstance(item, dict) and item.get("type") == "tool_reference":
                    names.add(str(item.get("tool_name")))
    return names


def _blocks(request: ModelRequest, reply: Reply) -> Iterator[dict[str, object]]:
    """The content blocks of a reply: thinking, text, calls."""
    thinking = request.raw.get("thinking")
    wants_thinking = isinstance(thinking, dict) and thinking.get("type") in ("enabled", "adaptive")
    if reply.message.reasoning and wants_thinking:
        signature = base64.b64encode(f"turn {reply.id}".encode()).decode()
        yield {"type": "thinking", "thinking": reply.message.reasoning, "signature": signature}
    if reply.message.content:
        yield {"type": "text", "text": reply.message.content}
    for call in reply.message.tool_calls:
        yield {"type": "tool_use", "id": call.id, "name": call.name, "input": _object(call.arguments)}


def _object(text: str) -> dict[str, object]:
    """The object that `text` spells; an empty one when it spells none."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def _block_events(index: int, block: dict[str, object], raw_arguments: str) -> Iterator[bytes]:
    """content_block_start, its deltas, content_block_stop. Arguments are streamed exactly as they were sampled."""
    deltas: list[dict[str, object]] = []
    match block["type"]:
        case "thinking":
            start: dict[str, object] = {"type": "thinking", "thinking": "", "signature": ""}
            deltas.append({"type": "thinking_delta", "thinking": block["thinking"]})
            deltas.append({"type": "signature_delta", "signature": block["signature"]})
        case "text":
            start = {"type": "text", "text": ""}
            deltas.append({"type": "text_delta", "text": block["text"]})
        case _:
            start = {**block, "input": {}}
            deltas.append({"type": "input_json_delta", "partial_json": raw_arguments})
    yield event("content_block_start", {"type": "content_block_start", "index": index, "content_block": start})
    for delta in deltas:
        yield event("content_block_delta", {"type": "content_block_delta", "index": index, "delta": delta})
    yield event("content_block_stop", {"type": "content_block_stop", "index": index})


def _model_facts(name: str) -> dict[str, object]:
    return {"type": "model", "id": name, "display_name": name, "created_at": "1970-01-01T00:00:00Z"}


def _system(raw: object) -> list[Message]:
    """The top-level system prompt as a message; a billing block at its beginning does not count in a match."""
    if raw is None:
        return []
    if isinstance(raw, str):
        return [Message(speaker=Speaker.SYSTEM, content=raw)] if raw else []
    if not isinstance(raw, list):
        raise RequestRefused(400, "system: Input should be a valid string or list")
    texts = []
    for place, block in enumerate(raw):
        if not isinstance(block, dict) or block.get("type") != "text":
            raise RequestRefused(400, f"system.{place}: Input should be a text block")
        texts.append(_needed(block, "text", str, f"system.{place}."))
    volatile = ""
    if texts and texts[0].startswith(BILLING):
        volatile = texts[0] + ("\n" if len(texts) > 1 else "")
    return [Message(speaker=Speaker.SYSTEM, content="\n".join(texts), volatile=volatile)] if texts else []


def _all(messages: list[object], tools: _Tools) -> Iterator[list[Message]]:
    for place, raw in enumerate(messages):
        at = f"messages.{place}"
        if not isinstance(raw, dict):
            raise RequestRefused(400, f"{at}: Input should be a valid dictionary")
        role = _needed(raw, "role", str, f"{at}.")
        if role not in _SPEAKERS:
            raise RequestRefused(400, f"{at}.role: Input should be 'user' or 'assistant'")
        content = raw.get("content")
        if content is None:
            raise RequestRefused(400, f"{at}.content: Field required")
        if isinstance(content, str):
            yield [Message(speaker=_SPEAKERS[role], content=content)]
        elif not isinstance(content, list):
            raise RequestRefused(400, f"{at}.content: Input should be a valid list")
        elif role == "assistant":
            yield [_assistant(content, f"{at}.content")]
        else:
            yield _heard(content, f"{at}.content", _SPEAKERS[role], tools)


def _assistant(blocks: list[object], at: str) -> Message:
    """An assistant's blocks as one message."""
    texts, thoughts, calls = [], [], []
    for place, raw in enumerate(blocks):
        kind, block = _block(raw, f"{at}.{place}")
        match kind:
            case "text":
                texts.append(_needed(block, "text", str, f"{at}.{place}."))
            case "thinking":
                thoughts.append(_needed(block, "thinking", str, f"{at}.{place}."))
            case "tool_use":
                calls.append(_call(block, f"{at}.{place}"))
            case "redacted_thinking" | "server_tool_use" | "fallback" | "compaction":
                pass  # nothing in it that the policy said
            case _ if kind.endswith("_tool_result"):
                pass  # of a tool that the vendor's servers run
            case _:
                raise _unknown_block(kind, f"{at}.{place}")
    return Message(
        speaker=Speaker.ASSISTANT, content="".join(texts), reasoning="\n".join(thoughts), tool_calls=tuple(calls)
    )


def _call(block: Mapping[str, object], at: str) -> ToolCall:
    given = block.get("input")
    if not isinstance(given, dict):
        raise RequestRefused(400, f"{at}.input: Input should be a valid dictionary")
    if is_deep(given):
        raise RequestRefused(400, f"{at}.input: nested deeper than {MAX_DEPTH}")
    return ToolCall(
        id=_needed(block, "id", str, f"{at}."),
        name=_needed(block, "name", str, f"{at}."),
        arguments=orjson.dumps(given).decode(),
    )


def _heard(blocks: list[object], at: str, speaker: Speaker, tools: _Tools) -> list[Message]:
    """What a user or the system said, in order: texts that stand together, and every tool result by itself."""
    said: list[Message] = []
    texts: list[str] = []

    def flush() -> None:
        if texts:
            said.append(Message(speaker=speaker, content="\n".join(texts)))
            texts.clear()

    for place, raw in enumerate(blocks):
        kind, block = _block(raw, f"{at}.{place}")
        if kind == "tool_result":
            flush()
            call_id = _needed(block, "tool_use_id", str, f"{at}.{place}.")
            content = _result(block.get("content"), f"{at}.{place}.content", tools)
            said.append(Message(speaker=Speaker.TOOL, content=content, tool_call_id=call_id))
        elif kind == "text":
            texts.append(_needed(block, "text", str, f"{at}.{place}."))
        elif kind in _OMITTED:
            texts.append(f"[{kind} omitted]")
        else:
            raise _unknown_block(kind, f"{at}.{place}")
    flush()
    return said or [Message(speaker=speaker)]


def _result(content: object, at: str, tools: _Tools) -> str:
    """The text of a tool result."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestRefused(400, f"{at}: Input should be a valid string or list")
    texts = []
    for place, raw in enumerate(content):
        kind, block = _block(raw, f"{at}.{place}")
        if kind == "text":
            texts.append(_needed(block, "text", str, f"{at}.{place}."))
        elif kind == "tool_reference":
            texts.append(tools.loaded(_needed(block, "tool_name", str, f"{at}.{place}.")))
        elif kind in _OMITTED:
            texts.append(f"[{kind} omitted]")
        else:
            raise _unknown_block(kind, f"{at}.{place}")
    return "\n".join(texts)


def _block(raw: object, at: str) -> tuple[str, Mapping[str, object]]:
    if not isinstance(raw, dict):
        raise RequestRefused(400, f"{at}: Input should be a valid dictionary")
    return _needed(raw, "type", str, f"{at}."), raw


def _unknown_block(kind: str, at: str) -> RequestRefused:
    tag = kind[:40]
    return RequestRefused(400, f"{at}: Input tag '{tag}' found using 'type' does not match any of the expected tags")


def _maybe(raw: Mapping[str, object], name: str, kind: type[T], at: str = "") -> T | None:
    """`raw[name]` if it is a `kind`, None if it is absent or null."""
    value = raw.get(name)
    if value is None:
        return None
    if type(value) is not kind:  # exactly: a bool is no int
        raise RequestRefused(400, f"{at}{name}: Input should be {_NAMES.get(kind, 'a valid boolean')}")
    return cast(T, value)


def _needed(raw: Mapping[str, object], name: str, kind: type[T], at: str = "") -> T:
    """`raw[name]`, which must be a `kind`."""
    value = _maybe(raw, name, kind, at)
    if value is None:
        raise RequestRefused(400, f"{at}{name}: Field required")
    return value
