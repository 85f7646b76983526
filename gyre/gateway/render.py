"""Render and tokenise only what is new since a sampled turn.

The suffix that follows a sampled end-of-turn token is cut out of a short rendering that ends the same way:
`anchor` puts one dummy exchange before the new messages, `skeleton` the whole matched history with its
contents shrunk. At start both are compared with full renderings over a set of small conversations; the
first that is exact is used. When neither is, every request is rendered in full, with a warning: sampled
text is then tokenised again, which the session counts.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path

import numpy as np

from gyre.config.choices import ReasoningParserName, ToolParserName
from gyre.gateway.dialect import Message, Speaker, ToolCall
from gyre.gateway.parse import TurnParser, parser_for
from gyre.gateway.template import ChatTemplate, Plain, RenderError, message_for_template
from gyre.types import Int32

log = logging.getLogger(__name__)

Tools = Sequence[Mapping[str, object]]


class RenderMode(StrEnum):
    """How a suffix is found."""

    ANCHOR = "anchor"
    SKELETON = "skeleton"
    FULL = "full"


def load_renderer(
    folder: Path,
    tool_parser: ToolParserName = ToolParserName.AUTO,
    reasoning_parser: ReasoningParserName = ReasoningParserName.AUTO,
) -> "Renderer":
    """The renderer of a Hugging Face model folder. Raises ConfigError for key model.path."""
    return Renderer(ChatTemplate.load(folder), tool_parser, reasoning_parser)


class Renderer:
    """Prompts and suffixes of one chat template. Immutable after its self-test; shared by all sessions."""

    def __init__(
        self,
        template: ChatTemplate,
        tool_parser: ToolParserName = ToolParserName.AUTO,
        reasoning_parser: ReasoningParserName = ReasoningParserName.AUTO,
    ) -> None:
        self.template = template
        prompt = _tried(template, [{"role": "user", "content": "d"}])
        self.parser: TurnParser = parser_for(template.source, prompt, tool_parser, reasoning_parser)
        self.drops_reasoning = _drops_reasoning(template)
        self._hoists_system = not _keeps_system_in_place(template)
        self.mode = self._self_test()
        if self.mode is RenderMode.FULL:
            log.warning("suffix_rendering=inexact mode=full effect=sampled_text_is_tokenised_again")

    def prompt(self, messages: Sequence[Message], tools: Tools = ()) -> Int32:
        """The ids of a whole conversation with the generation prompt. Raises RenderError."""
        return self._render(lambda plain: plain, messages, tools)

    def suffix(
        self,
        matched: Sequence[Message],
        new: Sequence[Message],
        tools: Tools,
        last_token: int,
        *,
        is_thinking: bool = False,
    ) -> Int32 | None:
        """The ids to put after a sampled turn whose last id is `last_token`; None in mode FULL.

        `matched` ends with the sampled turn's message, `new` follows it. A turn that was cut before its
        end-of-turn token gets one here, as context, and before it the end of its reasoning if that is open
        (`is_thinking`). Raises RenderError.
        """
        if self.mode is RenderMode.FULL:
            return None
        nonce = _nonce([matched[-1], *new], tools)
        before = _anchor(matched, nonce) if self.mode is RenderMode.ANCHOR else _skeleton(matched, nonce)
        after = self._render(lambda text: _after_turn(text, nonce, self.template), [*before, *new], tools)
        if last_token == self.template.end_of_turn:
            return after
        closed = self.template.encode("\n</think>\n\n") if is_thinking else np.empty(0, dtype=np.int32)
        return np.concatenate([closed, np.array([self.template.end_of_turn], dtype=np.int32), after])

    def _render(self, cut: Callable[[str], str], messages: Sequence[Message], tools: Tools) -> Int32:
        """Render with masked look-alikes, cut the text, encode it. Odd tool arguments are tried as text too."""
        messages = self._in_place(messages)
        for as_text in (False, True):
            plain: list[Plain] = [message_for_template(message, arguments_as_text=as_text) for message in messages]
            try:
                mask = self.template.mask_for(plain, tools)
                safe_plain, safe_tools = self.template.masked(plain, mask), self.template.masked(list(tools), mask)
                return self.template.encode(cut(self.template.text(safe_plain, safe_tools)), mask)
            except (RenderError, RecursionError) as error:
                if as_text:
                    raise RenderError(str(error)) from error
        raise AssertionError("unreachable")

    def _in_place(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Later system messages as user messages, where the template would raise, move or drop them."""
        if not self._hoists_system:
            return messages
        return [
            replace(message, speaker=Speaker.USER) if place and message.speaker is Speaker.SYSTEM else message
            for place, message in enumerate(messages)
        ]

    def _self_test(self) -> RenderMode:
        """The first mode whose suffixes equal those of full renderings, over conversations the template accepts."""
        for mode in (RenderMode.ANCHOR, RenderMode.SKELETON):
            self.mode = mode
            if all(self._is_exact(matched, new, tools) for matched, new, tools in _conversations()):
                return mode
        return RenderMode.FULL

    def _is_exact(self, matched: Sequence[Message], new: Sequence[Message], tools: Tools) -> bool:
        last = "w7last"
        full = [*matched[:-1], replace(matched[-1], content=last), *new]
        end = self.template.end_of_turn
        try:
            wanted = self._render(lambda text: _after_turn(text, last, self.template), full, tools)
        except RenderError:
            return True  # a conversation that the template does not take at all says nothing about suffixes
        try:
            got = self.suffix(full[: len(matched)], new, tools, end)
        except RenderError:
            return False
        return got is not None and np.array_equal(wanted, got)


def _anchor(matched: Sequence[Message], nonce: str) -> list[Message]:
    """One dummy exchange in place of the matched history."""
    last = matched[-1]
    system = [Message(speaker=Speaker.SYSTEM, content="d")] if matched[0].speaker is Speaker.SYSTEM else []
    return [*system, Message(speaker=Speaker.USER, content="d"), _dummy_turn(last, nonce)]


def _skeleton(matched: Sequence[Message], nonce: str) -> list[Message]:
    """The matched history with its contents shrunk, keeping what is empty empty."""
    shrunk = [
        replace(
            message,
            content="x" if message.content else "",
            reasoning="x" if message.reasoning else "",
            tool_calls=tuple(replace(call, arguments="{}") for call in message.tool_calls),
        )
        for message in matched[:-1]
    ]
    return [*shrunk, _dummy_turn(matched[-1], nonce)]


def _dummy_turn(last: Message, nonce: str) -> Message:
    calls = tuple(replace(call, arguments=json.dumps({"z": nonce})) for call in last.tool_calls)
    return Message(speaker=Speaker.ASSISTANT, content=nonce, tool_calls=calls)


def _after_turn(text: str, nonce: str, template: ChatTemplate) -> str:
    """What follows the first end-of-turn token after the last `nonce`."""
    at = text.rfind(nonce)
    end = text.find(template.end_of_turn_text, at) if at >= 0 else -1
    if end < 0:
        raise RenderError("the chat template does not show where the assistant's turn ends")
    return text[end + len(template.end_of_turn_text) :]


def _nonce(messages: Sequence[Message], tools: Tools) -> str:
    """A word that the messages and tools do not contain, so that nothing in them can pose as the dummy turn."""
    text = json.dumps([[message_for_template(message) for message in messages], list(tools)], ensure_ascii=False)
    number = 0
    while f"q{number}z" in text:
        number += 1
    return f"q{number}z"


def _tried(template: ChatTemplate, messages: list[Plain]) -> str:
    """The rendered text, or "" where the template refuses the messages."""
    try:
        return template.text(messages)
    except RenderError:
        return ""


def _drops_reasoning(template: ChatTemplate) -> bool:
    """Whether the reasoning of a turn is gone once a user has spoken again."""
    turn = {"role": "assistant", "content": "d", "reasoning_content": "w5thought"}
    text = _tried(template, [{"role": "user", "content": "d"}, turn, {"role": "user", "content": "d"}])
    return "w5thought" not in text


def _keeps_system_in_place(template: ChatTemplate) -> bool:
    """Whether a system message in the middle is rendered where it stands."""
    words = ("w1first", "w2turn", "w3system", "w4last")
    speakers = ("user", "assistant", "system", "user")
    messages = [{"role": role, "content": word} for role, word in zip(speakers, words, strict=True)]
    try:
        text = template.text(messages)
    except RenderError:
        return False
    places = [text.find(word) for word in words]
    return min(places) >= 0 and places == sorted(places)


def _conversations() -> list[tuple[list[Message], list[Message], Tools]]:
    """(matched, new, tools) of every kind that matters: with and without system, tools, reasoning, later turns."""
    system = [Message(speaker=Speaker.SYSTEM, content="You are s.")]
    ask = [Message(speaker=Speaker.USER, content="first\n"), Message(speaker=Speaker.ASSISTANT, content="turn")]
    earlier = [*ask, Message(speaker=Speaker.USER, content=" more ")]
    turn = [Message(speaker=Speaker.ASSISTANT, content="a")]
    calls = tuple(ToolCall(id=f"call_{place}", name="bash", arguments='{"command": "ls"}') for place in range(2))
    tool: Tools = [{"type": "function", "function": {"name": "bash", "description": "d", "parameters": {}}}]
    results = [
        Message(speaker=Speaker.TOOL, content=f"out {call.id}\n\n", tool_call_id=call.id, name="bash") for call in calls
    ]
    user = [Message(speaker=Speaker.USER, content="\n next")]
    unsampled = Message(speaker=Speaker.ASSISTANT, content="not sampled")
    cases: list[tuple[list[Message], list[Message], Tools]] = []
    for head in ([], system):
        history = [*head, *earlier, *turn]
        cases.append((history, user, ()))
        cases.append((history, [*user, *user], ()))
        cases.append((history, [*user, unsampled, *user], ()))
        cases.append((history, [], ()))
        cases.append(([*head, *ask], user, tool))
        calling = [*head, *ask[:1], replace(turn[0], tool_calls=calls)]
        cases.append((calling, results, tool))
        cases.append((calling, [*results, *user], tool))
        cases.append(([*head, *ask], [Message(speaker=Speaker.SYSTEM, content="mid"), *user], ()))
    return cases
