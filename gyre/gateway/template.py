"""A model's chat template and tokenizer, with a tokenisation that cannot be fooled.

Text reaches the policy in two kinds: control tokens that the template writes, and everything else. Before
rendering, each control look-alike inside the messages is broken by a private-use character; after rendering,
the text is split at the real control tokens, the character is taken out, and the rest is encoded by a
tokenizer that knows no control tokens. So no message can forge a turn, and clean text is encoded as usual.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import orjson
from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from gyre.errors import ConfigError, GyreError
from gyre.gateway.dialect import Message
from gyre.types import Int32

Plain = dict[str, Any]
"""A message or tool as the template sees it: plain JSON data of the template's own shape."""


_TEMPLATE_FAULTS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""What the code inside a template can raise over messages that it does not expect."""


class RenderError(GyreError):
    """The template cannot render these messages."""


class ChatTemplate:
    """The template, the tokenizer and the control tokens of one model folder."""

    def __init__(self, *, tokenizer_json: str, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` are the names that templates may use, such as bos_token."""
        plain = json.loads(tokenizer_json)
        plain["added_tokens"], plain["post_processor"] = [], None
        self._tokenizer = Tokenizer.from_str(tokenizer_json)
        self._plain = Tokenizer.from_str(json.dumps(plain))
        self._controls = {token["content"]: int(token["id"]) for token in json.loads(tokenizer_json)["added_tokens"]}
        if not self._controls:
            raise ConfigError("model.path", wanted="a tokenizer with control tokens", given="no added tokens")
        self._control_ids = frozenset(self._controls.values())
        longest_first = sorted(self._controls, key=lambda text: (-len(text), text))
        self._control_pattern = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")
        self._special_tokens = dict(special_tokens)
        self.source = source
        try:
            self._template = _environment().from_string(source)
        except TemplateError as error:
            raise ConfigError("model.path", wanted="a chat template that can be parsed", given=str(error)) from error
        self.end_of_turn_text = self._find_end_of_turn()
        self.end_of_turn = self._controls[self.end_of_turn_text]
        stops = {self.end_of_turn}
        if self._special_tokens.get("eos_token") in self._controls:
            stops.add(self._controls[self._special_tokens["eos_token"]])
        self.stop_tokens: tuple[int, ...] = tuple(sorted(stops))

    @classmethod
    def load(cls, folder: Path) -> "ChatTemplate":
        """Read tokenizer.json, tokenizer_config.json and, where there is one, chat_template.jinja.

        Raises ConfigError for key model.path when something is missing or has no end-of-turn token.
        """
        config_path, template_path = folder / "tokenizer_config.json", folder / "chat_template.jinja"
        try:
            tokenizer_json = (folder / "tokenizer.json").read_text(encoding="utf-8")
            config = json.loads(config_path.read_text(encoding="utf-8")) if config_path.exists() else {}
            source = template_path.read_text(encoding="utf-8") if template_path.exists() else config["chat_template"]
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(
                "model.path",
                wanted="a folder with tokenizer.json and a chat template",
                given=str(folder),
                fix=f"{type(error).__name__}: {error}",
            ) from error
        if isinstance(source, list):  # several named templates: the one called default is the chat template
            source = next(entry["template"] for entry in source if entry["name"] == "default")
        special = {}
        for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
            value = config.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                special[name] = text
        return cls(tokenizer_json=tokenizer_json, source=source, special_tokens=special)

    def text(self, messages: Sequence[Plain], tools: Sequence[Plain] = (), *, generate: bool = True) -> str:
        """The rendered text. Raises RenderError when the template refuses the messages or stumbles over them."""
        try:
            return self._template.render(
                messages=list(messages),
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=generate,
                **self._special_tokens,
            )
        except _TEMPLATE_FAULTS as error:
            raise RenderError(f"the chat template cannot render these messages: {error}") from error

    def mask_for(self, *values: object) -> str:
        """A private-use character that occurs in none of `values`; "" when none of them holds a look-alike."""
        text = "".join(_strings(values))
        if not self._control_pattern.search(text):
            return ""
        used = set(text)
        for code in (*range(0xE000, 0xF900), *range(0xF0000, 0xFFFFE)):
            if chr(code) not in used:
                return chr(code)
        raise RenderError("the messages use every private character")

    def masked(self, value: Any, mask: str) -> Any:
        """A copy of plain data with each control look-alike in its strings and keys broken by `mask`."""
        if not mask:
            return value
        if isinstance(value, str):
            return self._control_pattern.sub(lambda found: found[0][0] + mask + found[0][1:], value)
        if isinstance(value, Mapping):
            return {self.masked(key, mask): self.masked(item, mask) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.masked(item, mask) for item in value]
        return value

    def encode(self, text: str, mask: str = "") -> Int32:
        """The ids of rendered text in which look-alikes are broken by `mask`."""
        ids: list[int] = []
        for part in self._control_pattern.split(text):
            if part in self._controls:
                ids.append(self._controls[part])
            elif part:
                ids.extend(self._encode_plain(part.replace(mask, "") if mask else part))
        return np.array(ids, dtype=np.int32)

    def decode(self, tokens: Int32) -> str:
        """The text of sampled ids; what is no valid UTF-8 becomes U+FFFD, ids without a token nothing."""
        return self._tokenizer.decode(tokens.tolist(), skip_special_tokens=False)

    def _encode_plain(self, text: str) -> list[int]:
        ids = self._plain.encode(text, add_special_tokens=False).ids
        if self._control_ids.isdisjoint(ids):
            return ids
        # A vocabulary may reach a control token by ordinary merges: then look-alikes go character by character.
        ids = []
        for part in self._control_pattern.split(text):
            for piece in part if part in self._controls else [part]:
                if piece:
                    ids.extend(self._plain.encode(piece, add_special_tokens=False).ids)
        return [token for token in ids if token not in self._control_ids]

    def _find_end_of_turn(self) -> str:
        """The first control token after an assistant's text."""
        probe = "probe0text"
        exchange = [{"role": "user", "content": "d"}, {"role": "assistant", "content": probe}]
        try:
            text = self.text(exchange, generate=False)
        except RenderError as error:
            wanted = "a chat template that renders a user's and an assistant's message"
            raise ConfigError("model.path", wanted=wanted, given=str(error)) from error
        found = self._control_pattern.search(text, text.rfind(probe) + len(probe)) if probe in text else None
        if found is None:
            raise ConfigError(
                "model.path",
                wanted="a chat template that ends an assistant's turn with a control token",
                given=text[-80:],
            )
        return found[0]


def message_for_template(message: Message, *, arguments_as_text: bool = False) -> Plain:
    """A message in the shape that Hugging Face templates expect. Tool arguments are objects where they can be."""
    plain: Plain = {"role": message.speaker.value, "content": message.content}
    if message.reasoning:
        plain["reasoning_content"] = message.reasoning
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": call.arguments if arguments_as_text else _arguments(call.arguments),
                },
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        plain["tool_call_id"] = message.tool_call_id
    if message.name:
        plain["name"] = message.name
    return plain


def _arguments(text: str) -> object:
    """The object that `text` spells; the text itself when it spells none, or one that is no valid Unicode."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return text
    return value if isinstance(value, dict) else text


def _strings(value: object) -> Iterable[str]:
    """Every string inside plain data."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)


class _GenerationTag(Extension):
    """Lets `{% generation %}` blocks through: they only mark the assistant's text for trainers."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The block's content in its place."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """The environment that Hugging Face templates are written for."""

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: object, ensure_ascii: bool = False, indent: int | None = None, sort_keys: bool = False) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    return environment
