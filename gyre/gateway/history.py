"""What was sampled before, in the words in which harnesses repeat it.

The key of a history is xxh3_128(key before || message), beginning with the tools, so two histories have
equal keys when everything that shapes their prompt is equal. An assistant's message counts by the ids of its
calls, or by its text without the blanks around it: harnesses rewrite the rest. Sampled text is never
tokenised to be found. A turn that comes back changed is given back as it was told, before anything is matched.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import orjson
import xxhash

from gyre.config.choices import PathRole
from gyre.gateway.dialect import Message, Speaker

_SORTED = orjson.OPT_SORT_KEYS


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """A sampled turn as it was told: `node` ends it; its reasoning may still be open."""

    turn: int
    message: Message
    node: int
    role: PathRole
    is_thinking: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """`told` is the last sampled turn of the history (None: nothing matched), at its first `num_messages`."""

    told: Told | None
    num_messages: int


class History:
    """Sampled turns by the history that ends in them, by their calls, and by their text."""

    def __init__(self) -> None:
        self._by_history: dict[bytes, Told] = {}
        self._by_call: dict[str, Told] = {}
        self._by_text: dict[bytes, Told] = {}
        self._restored: set[int] = set()

    @property
    def num_restored(self) -> int:
        """Turns that came back otherwise than they were told."""
        return len(self._restored)

    def restore(self, messages: Sequence[Message]) -> tuple[list[Message], PathRole | None]:
        """The messages with every turn that was told as it was told, and the role of the last of these turns."""
        restored, role = [], None
        for message in messages:
            told = self._find(message) if message.speaker is Speaker.ASSISTANT else None
            if told is not None:
                role = told.role
                if told.message != message:
                    self._restored.add(told.turn)
                    message = told.message
            restored.append(message)
        return _results_in_order(restored), role

    def keys(self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]]) -> list[bytes]:
        """`keys[k]` is the key of the first k messages; the length is len(messages) + 1."""
        keys = [xxhash.xxh3_128_digest(b"\n".join(sorted(orjson.dumps(tool, option=_SORTED) for tool in tools)))]
        for message in messages:
            keys.append(extended(keys[-1], message))
        return keys

    def match(self, keys: Sequence[bytes]) -> Match:
        """The longest beginning of the history that ends in a sampled turn."""
        for num_messages in range(len(keys) - 1, 0, -1):
            told = self._by_history.get(keys[num_messages])
            if told is not None:
                return Match(told=told, num_messages=num_messages)
        return Match(told=None, num_messages=0)

    def remember(self, before: bytes, told: Told) -> None:
        """The history `before` goes on with a sampled turn. Of two turns told in equal words the later is kept."""
        self._by_history[extended(before, told.message)] = told
        for call in told.message.tool_calls:
            self._by_call[call.id] = told
        if not told.message.tool_calls and told.message.content.strip():
            self._by_text[extended(b"", told.message)] = told

    def _find(self, message: Message) -> Told | None:
        """The turn that an assistant's message repeats: all of its calls, or its text."""
        if not message.tool_calls:
            return self._by_text.get(extended(b"", message))
        told = self._by_call.get(message.tool_calls[0].id)
        if told is not None and _ids(told.message) == _ids(message):
            return told
        return None


def extended(key: bytes, message: Message) -> bytes:
    """The key of the history `key` with one more message."""
    facts: list[object] = [message.speaker.value]
    match message.speaker:
        case Speaker.ASSISTANT if message.tool_calls and all(call.id for call in message.tool_calls):
            facts.append(sorted(_ids(message)))
        case Speaker.ASSISTANT:
            facts += [_plain(message.content), [[call.name, call.arguments] for call in message.tool_calls]]
        case Speaker.TOOL:
            facts += [message.tool_call_id, _plain(message.content)]
        case _:
            facts += [_plain(message.content.removeprefix(message.volatile)), message.name]
    return xxhash.xxh3_128_digest(key + orjson.dumps(facts))


def _plain(text: str) -> str:
    """Text in the form in which it is compared: harnesses trim it and change its line ends."""
    return text.strip().replace("\r\n", "\n")


def _ids(message: Message) -> frozenset[str]:
    return frozenset(call.id for call in message.tool_calls)


def _results_in_order(messages: list[Message]) -> list[Message]:
    """Tool results in the order of their calls, with their tools' names: they arrive as the tools finish."""
    ordered: list[Message] = []
    calls: dict[str, int] = {}
    names: dict[str, str] = {}
    run: list[Message] = []
    for message in messages:
        if message.speaker is Speaker.TOOL:
            name = message.name or names.get(message.tool_call_id, "")
            run.append(message if name == message.name else replace(message, name=name))
            continue
        ordered += sorted(run, key=lambda one: calls.get(one.tool_call_id, len(calls)))
        run = []
        if message.speaker is Speaker.ASSISTANT:
            calls = {call.id: place for place, call in enumerate(message.tool_calls)}
            names |= {call.id: call.name for call in message.tool_calls}
        ordered.append(message)
    return ordered + sorted(run, key=lambda one: calls.get(one.tool_call_id, len(calls)))
