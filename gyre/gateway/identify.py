"""Who asks: the main agent or a sub-agent, for a turn, a summary of what came before, or something on the side.

Data more than code: the marks that known harnesses leave in headers and texts. What they do not tell is told
by structure: a conversation keeps the class that it began with, and one that begins with the text of an
earlier call's argument is a sub-agent's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import orjson

from gyre.config.choices import PathRole
from gyre.gateway.dialect import Message, ModelRequest, Speaker

SUB_AGENT_HEADERS = ("x-claude-code-agent-id", "x-codex-parent-thread-id", "x-parent-session-id")
"""Sent by Claude Code, Codex and OpenCode for a sub-agent's calls only."""

HARNESS_HEADERS = ("x-claude-code-session-id", "x-codex-turn-metadata", "x-session-id")
"""Sent by the same three with every call: without a mark of a sub-agent, the call is the main agent's."""

CALLER_HEADERS = (*SUB_AGENT_HEADERS, "x-claude-code-session-id", "thread-id", "x-session-id")
"""Equal bodies from different callers are different requests."""

SUMMARY_TEXTS = (
    "CRITICAL: Respond with TEXT ONLY",  # Claude Code
    "You are performing a CONTEXT CHECKPOINT COMPACTION",  # Codex
    "generate the <state_snapshot>",  # Qwen Code
    "Provide a detailed prompt for continuing our conversation above",  # OpenCode
)
"""In the last message of a request that asks for a summary."""

SIDE_TEXTS = ("Generate a title", "<session>", "Please write a 5-10 word title")
"""At the beginning of a first user message, in a request without tools."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """What a request's own marks say. `is_sub_agent` is None where they say nothing."""

    is_sub_agent: bool | None
    is_summary: bool
    is_side: bool


def caller_of(headers: Mapping[str, str], request: ModelRequest) -> Caller:
    """The marks of a request; `headers` have lower-case names."""
    is_sub_agent = None
    if any(name in headers for name in SUB_AGENT_HEADERS):
        is_sub_agent = True
    elif any(name in headers for name in HARNESS_HEADERS):
        is_sub_agent = False
    last = request.messages[-1]
    is_summary = _codex_kind(headers) == "compaction" or (
        last.speaker is not Speaker.ASSISTANT and any(text in last.content for text in SUMMARY_TEXTS)
    )
    first = next((one.content for one in request.messages if one.speaker is Speaker.USER), "").lstrip()
    is_side = not request.tools and (_wants_schema(request.raw) or first.startswith(SIDE_TEXTS))
    return Caller(is_sub_agent=is_sub_agent, is_summary=is_summary, is_side=is_side and not is_summary)


def role_of(caller: Caller, before: PathRole | None, *, was_prompted: bool) -> PathRole:
    """The role of a turn. `before` is that of the conversation it goes on; `was_prompted`: a call asked for it."""
    if caller.is_side:
        return PathRole.SIDE
    is_sub_agent = caller.is_sub_agent
    if is_sub_agent is None and before is not None:
        is_sub_agent = before in (PathRole.SUB_AGENT, PathRole.SUB_AGENT_SUMMARY)
    elif is_sub_agent is None:
        is_sub_agent = was_prompted
    if caller.is_summary:
        return PathRole.SUB_AGENT_SUMMARY if is_sub_agent else PathRole.MAIN_SUMMARY
    return PathRole.SUB_AGENT if is_sub_agent else PathRole.MAIN


def first_words(messages: Sequence[Message]) -> str:
    """The user messages before anything was answered, where a sub-agent's task stands."""
    said = []
    for message in messages:
        if message.speaker is Speaker.ASSISTANT:
            break
        if message.speaker is Speaker.USER:
            said.append(message.content)
    return "\n".join(said)


def prompts_in(arguments: str) -> list[str]:
    """Texts in a call's arguments that may be the task of a sub-agent."""
    try:
        values = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return []
    texts = [values.get(name) for name in ("prompt", "message", "task")] if isinstance(values, dict) else []
    return [text.strip() for text in texts if isinstance(text, str) and text.strip()]


def _codex_kind(headers: Mapping[str, str]) -> str:
    try:
        facts = orjson.loads(headers.get("x-codex-turn-metadata", "{}"))
    except orjson.JSONDecodeError:
        return ""
    return str(facts.get("request_kind", "")) if isinstance(facts, dict) else ""


def _wants_schema(raw: Mapping[str, object]) -> bool:
    """Whether the answer must be JSON of a given schema, in the words of either vendor."""
    config = raw.get("output_config")
    given = config.get("format") if isinstance(config, dict) else raw.get("response_format")
    return isinstance(given, dict) and given.get("type") == "json_schema"
