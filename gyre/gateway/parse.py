"""Reasoning and tool calls in the text that the policy sampled.

The families are the tagged ones: `<think>…</think>` and `<tool_call>{"name", "arguments"}</tool_call>` (Qwen,
Hermes), with the rules of SGLang's detectors for them, which cannot be imported without torch; a test holds
both against each other. Two rules are our own: a call that cannot be read goes back as text and is counted,
and a call of a tool that does not exist is passed on, because harnesses answer it. Nothing here raises.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

import orjson

from gyre.config.choices import ReasoningParserName, ToolParserName
from gyre.gateway.dialect import MAX_DEPTH, is_deep

Tools = Sequence[Mapping[str, object]]

_THINK, _THOUGHT = "<think>", "</think>"
_CALL, _CALLED = "<tool_call>", "</tool_call>"
_BLOCK = re.compile(f"{_CALL}(.*?)(?:{_CALLED}|$)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedTurn:
    """What a turn says. `calls` are (name, arguments as JSON text); `is_thinking`: its reasoning was not closed."""

    content: str
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    num_malformed: int = 0
    is_thinking: bool = False


class TurnParser(Protocol):
    """One model family's way of writing reasoning and calls."""

    def parse(self, text: str, tools: Tools) -> ParsedTurn:
        """The turn in `text`, which has no end-of-turn token. Never raises. No tools: no calls."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedParser:
    """Reads think tags and tool-call tags, each only where the family has them.

    `opens_thinking`: the generation prompt ends inside an open think tag.
    """

    has_thinking: bool = False
    opens_thinking: bool = False
    has_calls: bool = False

    def parse(self, text: str, tools: Tools) -> ParsedTurn:
        """The turn in `text`."""
        reasoning, is_thinking = "", False
        if self.has_thinking:
            reasoning, text, is_thinking = _split_reasoning(text, self.opens_thinking)
        if not (self.has_calls and tools and _CALL in text):
            return ParsedTurn(content=text, reasoning=reasoning, is_thinking=is_thinking)
        calls, malformed = [], []
        for block in _BLOCK.finditer(text):
            call = _call(block[1]) if block[0].endswith(_CALLED) else None
            if call is None:
                malformed.append(block[0])
            else:
                calls.append(call)
        before = text[: text.find(_CALL)].strip()
        if not calls:
            return ParsedTurn(content=text, reasoning=reasoning, num_malformed=len(malformed))
        content = "\n".join(filter(None, (before, *malformed)))
        return ParsedTurn(content=content, reasoning=reasoning, calls=tuple(calls), num_malformed=len(malformed))


def parser_for(
    source: str, generation_prompt: str, tool_parser: ToolParserName, reasoning_parser: ReasoningParserName
) -> TaggedParser:
    """The parser that the settings name; `auto` is what the chat template `source` itself writes."""
    has_calls = tool_parser is ToolParserName.HERMES
    if tool_parser is ToolParserName.AUTO:
        has_calls = _CALL in source and "<function=" not in source
    has_thinking = reasoning_parser is ReasoningParserName.THINK
    if reasoning_parser is ReasoningParserName.AUTO:
        has_thinking = _THOUGHT in source
    return TaggedParser(
        has_calls=has_calls,
        has_thinking=has_thinking,
        opens_thinking=has_thinking and generation_prompt.rstrip().endswith(_THINK),
    )


def _split_reasoning(text: str, opens_thinking: bool) -> tuple[str, str, bool]:
    """(reasoning, the rest, whether the reasoning is still open)."""
    if not opens_thinking and _THINK not in text:
        return "", text, False
    while text.startswith(_THINK):
        text = text.removeprefix(_THINK)
    reasoning, closed, rest = text.partition(_THOUGHT)
    if closed:
        return reasoning, rest, False
    reasoning, call, rest = text.partition(_CALL)  # a call ends the reasoning even where the tag is missing
    return reasoning, call + rest, not call


def _call(text: str) -> tuple[str, str] | None:
    """The call in a block; None if it cannot be read as an object with a name and an object of arguments."""
    try:
        call = json.loads(text.strip(), parse_constant=_refuse)
        name, arguments = call["name"], call.get("parameters") or call.get("arguments", {})
        if not (isinstance(name, str) and name and isinstance(arguments, dict)) or is_deep(arguments, MAX_DEPTH):
            return None
        written = json.dumps(arguments, ensure_ascii=False)
        orjson.loads(written.encode())  # what a strict reader of JSON refuses is refused here, not at the harness
        name.encode()
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    return name, written


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")
