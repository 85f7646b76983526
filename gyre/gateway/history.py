"""Match a request's messages against the turns that were sampled, by chained hashes.

The key of a history is xxh3_128(key before || message), beginning with the tools, so two histories have
equal keys when everything that shapes their prompt is equal. A sampled turn is kept under the key of its
history with the reply *as it was returned to the harness*: sampled text is never tokenised to be found.
Blanks around an assistant's text do not count, because harnesses trim them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import orjson
import xxhash

from gyre.gateway.dialect import Message, Speaker

_SORTED = orjson.OPT_SORT_KEYS


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """`node` ends the matched path (None: nothing matched), `num_messages` of the request belong to it."""

    node: int | None
    num_messages: int


class History:
    """Sampled turns by the key of the history that ends in them."""

    def __init__(self) -> None:
        self._turns: dict[bytes, int] = {}

    def keys(self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]]) -> list[bytes]:
        """`keys[k]` is the key of the first k messages; the length is len(messages) + 1."""
        keys = [xxhash.xxh3_128_digest(orjson.dumps(list(tools), option=_SORTED))]
        for message in messages:
            keys.append(extended(keys[-1], message))
        return keys

    def match(self, keys: Sequence[bytes]) -> Match:
        """The longest beginning of the history that ends in a sampled turn."""
        for num_messages in range(len(keys) - 1, 0, -1):
            node = self._turns.get(keys[num_messages])
            if node is not None:
                return Match(node=node, num_messages=num_messages)
        return Match(node=None, num_messages=0)

    def remember(self, key: bytes, node: int) -> None:
        """The history `key` ends in the sampled turn `node`. Of two turns told in equal words the later is kept."""
        self._turns[key] = node


def extended(key: bytes, message: Message) -> bytes:
    """The key of the history `key` with one more message."""
    facts = message.key()
    if message.speaker is Speaker.ASSISTANT:
        facts["content"] = message.content.strip()
    return xxhash.xxh3_128_digest(key + orjson.dumps(facts, option=_SORTED))
