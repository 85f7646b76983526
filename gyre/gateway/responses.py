"""The dialect of OpenAI Responses, streamed with full item events and not, as Codex speaks it.

A turn is told as items: reasoning, message, calls; when they come back, the items of one turn become one
message again. Nothing is stored for clients: every request carries its whole history. Tools inside a
namespace are shown to the policy by their plain names, and called back with their namespace.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

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
from gyre.gateway.openai_words import OpenAiWords, body_of, bound, field, needed, text_of
from gyre.types import FinishReason

Item = Mapping[str, object]

_SPEAKERS = {
    "system": Speaker.SYSTEM,
    "developer": Speaker.SYSTEM,
    "user": Speaker.USER,
    "assistant": Speaker.ASSISTANT,
}
_IGNORED = frozenset({"web_search_call", "file_search_call", "image_generation_call", "compaction", "ghost_snapshot"})
_FREE_TEXT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


class ResponsesDialect(OpenAiWords):
    """Stateless: one instance serves every session."""

    def owns(self, path: str, headers: Mapping[str, str]) -> bool:
        """/responses and below."""
        return path == "/responses" or path.startswith("/responses/")

    def is_turn(self, method: str, path: str) -> bool:
        """POST /responses."""
        return method == "POST" and path == "/responses"

    def is_count(self, method: str, path: str) -> bool:
        """POST /responses/input_tokens."""
        return method == "POST" and path == "/responses/input_tokens"

    def parse(self, body: bytes, *, is_count: bool = False) -> ModelRequest:
        """The request in `body`. Raises RequestRefused (400) that names the field at fault."""
        raw = body_of(body)
        before = field(raw, "previous_response_id", str)
        if before:
            text = f"Previous response with id '{before[:100]}' not found."
            raise RequestRefused(400, text, param="previous_response_id", code="previous_response_not_found")
        instructions = field(raw, "instructions", str)
        messages = [Message(speaker=Speaker.SYSTEM, content=instructions)] if instructions else []
        given = raw.get("input")
        if isinstance(given, str):
            messages.append(Message(speaker=Speaker.USER, content=given))
        else:
            messages += _Turns(needed(raw, "input", list)).messages
        if not messages:
            raise RequestRefused(400, "Invalid 'input': empty array.", param="input")
        return ModelRequest(
            messages=tuple(messages),
            tools=tuple(_shown(field(raw, "tools", list) or [])),
            is_stream=bool(field(raw, "stream", bool)),
            calls_tools=raw.get("tool_choice") != "none",
            max_new_tokens=bound(raw, "max_output_tokens"),
            model=field(raw, "model", str) or "",
            raw=raw,
        )

    def answer(self, request: ModelRequest, reply: Reply) -> HttpAnswer:
        """A response, or its events: created, in_progress, each item with its parts, completed or incomplete."""
        items = list(_items(request, reply))
        is_cut = reply.finish is FinishReason.LENGTH
        status = "incomplete" if is_cut else "completed"
        usage = {
            "input_tokens": reply.prompt_tokens,
            "input_tokens_details": {"cached_tokens": reply.cached_tokens},
            "output_tokens": reply.new_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": reply.prompt_tokens + reply.new_tokens,
        }
        response: dict[str, object] = {
            "id": f"resp_{reply.id}",
            "object": "response",
            "created_at": 0,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": request.raw.get("instructions"),
            "max_output_tokens": request.max_new_tokens,
            "metadata": {},
            "model": reply.model,
            "output": items,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": 1.0,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": 1.0,
            "truncation": "disabled",
            "usage": usage,
        }
        if not request.is_stream:
            return json_answer(200, response)
        begun = {**response, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        told: list[tuple[str, dict[str, object]]] = [("created", {"response": begun})]
        told.append(("in_progress", {"response": begun}))
        for index, item in enumerate(items):
            told += [(name, {**facts, "output_index": index}) for name, facts in _item_events(item)]
        told.append((status, {"response": response}))
        return stream_answer(
            [
                event(f"response.{name}", {"type": f"response.{name}", "sequence_number": number, **facts})
                for number, (name, facts) in enumerate(told)
            ]
        )

    def count(self, tokens: int) -> HttpAnswer:
        """`{"object": "response.input_tokens", "input_tokens": N}`."""
        return json_answer(200, {"object": "response.input_tokens", "input_tokens": tokens})

    def stream_error(self, body: bytes) -> bytes:
        """A response.failed event that holds the error."""
        error = orjson.loads(body)["error"]
        code = error.get("code") or "server_error"
        failed = {"object": "response", "status": "failed", "error": {"code": code, "message": error["message"]}}
        facts = {"id": "resp_failed", "created_at": 0, "output": [], **failed}
        return event("response.failed", {"type": "response.failed", "sequence_number": 0, "response": facts})

    def context_overflow(self, *, prompt_tokens: int, max_context_tokens: int) -> RequestRefused:
        """context_length_exceeded."""
        text = "Your input exceeds the context window of this model. Please adjust your input and try again."
        return RequestRefused(400, text, param="input", code="context_length_exceeded")

    def unrenderable(self, reason: str) -> RequestRefused:
        """An invalid 'input'."""
        return RequestRefused(400, f"Invalid 'input': {reason}", param="input")


class _Turns:
    """Items of a history as messages. The items of one sampled turn are gathered into one message."""

    def __init__(self, items: list[object]) -> None:
        self.messages: list[Message] = []
        self._is_open = False
        for place, raw in enumerate(items):
            self._take(raw, f"input[{place}]")

    def _take(self, raw: object, at: str) -> None:
        if not isinstance(raw, dict):
            raise RequestRefused(400, f"Invalid type for '{at}': expected an object.", param=at)
        kind = field(raw, "type", str, f"{at}.") or "message"
        match kind:
            case "message":
                self._message(raw, at)
            case "reasoning":
                self._said(Message(speaker=Speaker.ASSISTANT, reasoning=_reasoning(raw, at)))
            case "function_call":
                arguments = field(raw, "arguments", str, f"{at}.") or ""
                self._called(raw, at, needed(raw, "name", str, f"{at}."), arguments)
            case "custom_tool_call":
                text = field(raw, "input", str, f"{at}.") or ""
                self._called(raw, at, needed(raw, "name", str, f"{at}."), orjson.dumps({"input": text}).decode())
            case "local_shell_call":
                action = field(raw, "action", dict, f"{at}.") or {}
                if is_deep(action):
                    raise RequestRefused(400, f"Invalid '{at}.action': nested too deep.", param=f"{at}.action")
                self._called(raw, at, "local_shell", orjson.dumps(action).decode())
            case "function_call_output" | "custom_tool_call_output" | "local_shell_call_output":
                self._heard(
                    Message(
                        speaker=Speaker.TOOL,
                        content=text_of(raw.get("output"), f"{at}.output", "\n"),
                        tool_call_id=needed(raw, "call_id", str, f"{at}."),
                    )
                )
            case _ if kind in _IGNORED:
                pass  # said or done by the vendor's servers, never by the policy
            case _:
                text = f"Invalid value: '{kind[:40]}'. Supported values are: 'message', 'reasoning', 'function_call'."
                raise RequestRefused(400, text, param=f"{at}.type", code="invalid_value")

    def _message(self, raw: Item, at: str) -> None:
        role = needed(raw, "role", str, f"{at}.")
        if role not in _SPEAKERS:
            raise RequestRefused(400, f"Invalid value for '{at}.role': {role[:40]!r}.", param=f"{at}.role")
        is_assistant = role == "assistant"
        text = text_of(raw.get("content"), f"{at}.content", "" if is_assistant else "\n")
        message = Message(speaker=_SPEAKERS[role], content=text)
        if is_assistant:
            self._said(message)
        else:
            self._heard(message)

    def _called(self, raw: Item, at: str, name: str, arguments: str) -> None:
        call_id = field(raw, "call_id", str, f"{at}.") or needed(raw, "id", str, f"{at}.")
        call = ToolCall(id=call_id, name=name, arguments=arguments)
        self._said(Message(speaker=Speaker.ASSISTANT, tool_calls=(call,)))

    def _heard(self, message: Message) -> None:
        self.messages.append(message)
        self._is_open = False

    def _said(self, part: Message) -> None:
        """Add to the open turn, or begin a new one where `part` cannot follow what the open one has said."""
        before = self.messages[-1] if self._is_open else None
        if before is None or (not part.tool_calls and (before.content or before.tool_calls)):
            self.messages.append(part)
        else:
            self.messages[-1] = replace(
                before,
                content=before.content + part.content,
                reasoning="\n".join(filter(None, (before.reasoning, part.reasoning))),
                tool_calls=(*before.tool_calls, *part.tool_calls),
            )
        self._is_open = True


def _reasoning(raw: Item, at: str) -> str:
    """The text of a reasoning item: its own, or its summary."""
    own = text_of(raw.get("content"), f"{at}.content", "\n")
    return own or text_of(raw.get("summary"), f"{at}.summary", "\n")


def _flat(tools: list[object]) -> Iterator[tuple[str, Item]]:
    """(namespace or "", tool) of all tools that a client runs."""
    for place, tool in enumerate(tools):
        at = f"tools[{place}]"
        if not isinstance(tool, dict):
            raise RequestRefused(400, f"Invalid type for '{at}': expected an object.", param=at)
        kind = field(tool, "type", str, f"{at}.")
        if kind == "namespace":
            name = needed(tool, "name", str, f"{at}.")
            for inner in field(tool, "tools", list, f"{at}.") or []:
                if isinstance(inner, dict) and isinstance(inner.get("name"), str):
                    yield name, inner
        elif kind in ("function", "custom"):
            needed(tool, "name", str, f"{at}.")
            yield "", tool
        # Every other kind is run by the vendor's servers: nobody runs it here, so the policy is not told of it.


def _shown(tools: list[object]) -> Iterator[Mapping[str, object]]:
    """The tools as the policy sees them."""
    if is_deep(tools):
        raise RequestRefused(400, f"Invalid 'tools': nested deeper than {MAX_DEPTH}.", param="tools")
    for _, tool in _flat(tools):
        description = tool.get("description")
        yield function_tool(
            str(tool["name"]),
            description if isinstance(description, str) else "",
            _FREE_TEXT if tool.get("type") == "custom" else tool.get("parameters"),
        )


def _items(request: ModelRequest, reply: Reply) -> Iterator[dict[str, object]]:
    """The items of a reply: reasoning, message, calls."""
    tools = request.raw.get("tools")
    known = {
        str(tool["name"]): (namespace, tool) for namespace, tool in _flat(tools if isinstance(tools, list) else [])
    }
    status = "incomplete" if reply.finish is FinishReason.LENGTH else "completed"
    if reply.message.reasoning:
        summary = [{"type": "summary_text", "text": reply.message.reasoning}]
        yield {"type": "reasoning", "id": f"rs_{reply.id}", "summary": summary, "encrypted_content": ""}
    if reply.message.content:
        content = [{"type": "output_text", "text": reply.message.content, "annotations": [], "logprobs": []}]
        head = {"type": "message", "id": f"msg_{reply.id}", "status": status, "role": "assistant"}
        yield {**head, "content": content}
    for index, call in enumerate(reply.message.tool_calls):
        namespace, tool = known.get(call.name, ("", {}))
        facts: dict[str, object] = {"call_id": call.id, "name": call.name, "status": "completed"}
        if namespace:
            facts["namespace"] = namespace
        if tool.get("type") == "custom":
            yield {"type": "custom_tool_call", "id": f"ctc_{reply.id}-{index}", **facts, "input": _free_text(call)}
        else:
            yield {"type": "function_call", "id": f"fc_{reply.id}-{index}", **facts, "arguments": call.arguments}


def _free_text(call: ToolCall) -> str:
    """The text of a call to a tool that takes text instead of JSON."""
    try:
        value = orjson.loads(call.arguments)
    except orjson.JSONDecodeError:
        return call.arguments
    text = value.get("input") if isinstance(value, dict) else None
    return text if isinstance(text, str) else call.arguments


def _item_events(item: dict[str, object]) -> Iterator[tuple[str, dict[str, object]]]:
    """output_item.added, the item's parts, output_item.done."""
    at = {"item_id": item["id"]}
    match item["type"]:
        case "reasoning":
            yield "output_item.added", {"item": {**item, "summary": []}}
            (part,) = item["summary"]  # type: ignore[misc]
            place = {**at, "summary_index": 0}
            yield "reasoning_summary_part.added", {**place, "part": {**part, "text": ""}}
            yield "reasoning_summary_text.delta", {**place, "delta": part["text"]}
            yield "reasoning_summary_text.done", {**place, "text": part["text"]}
            yield "reasoning_summary_part.done", {**place, "part": part}
        case "message":
            yield "output_item.added", {"item": {**item, "status": "in_progress", "content": []}}
            (part,) = item["content"]  # type: ignore[misc]
            place = {**at, "content_index": 0}
            yield "content_part.added", {**place, "part": {**part, "text": ""}}
            yield "output_text.delta", {**place, "delta": part["text"], "logprobs": []}
            yield "output_text.done", {**place, "text": part["text"], "logprobs": []}
            yield "content_part.done", {**place, "part": part}
        case "custom_tool_call":
            yield "output_item.added", {"item": {**item, "status": "in_progress", "input": ""}}
            yield "custom_tool_call_input.delta", {**at, "delta": item["input"]}
            yield "custom_tool_call_input.done", {**at, "input": item["input"]}
        case _:
            yield "output_item.added", {"item": {**item, "status": "in_progress", "arguments": ""}}
            yield "function_call_arguments.delta", {**at, "delta": item["arguments"]}
            yield "function_call_arguments.done", {**at, "name": item["name"], "arguments": item["arguments"]}
    yield "output_item.done", {"item": item}
