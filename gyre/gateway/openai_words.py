"""What OpenAI's two wire forms share: how a body is read, and how errors, models and keys are told.

Reading names the field at fault in the vendor's words. Errors are `{"error": {message, type, param, code}}`.
The facts of a model have no clock: `created` is 0.
"""

from collections.abc import Mapping, Sequence
from typing import TypeVar, cast

import orjson

from gyre.gateway.dialect import HttpAnswer, RequestRefused, json_answer

T = TypeVar("T")

_NAMES = {list: "an array", dict: "an object", str: "a string", int: "an integer", bool: "a boolean"}
OMITTED_PARTS = frozenset({"image_url", "input_image", "input_audio", "file", "input_file"})
"""Parts that a text model cannot see; what is left of them is a word in brackets."""


def body_of(body: bytes) -> dict[str, object]:
    """The JSON object in a body."""
    try:
        raw = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestRefused(400, f"We could not parse the JSON body of your request: {error}") from error
    if not isinstance(raw, dict):
        raise RequestRefused(400, "The JSON body of your request must be an object.")
    return raw


def field(raw: Mapping[str, object], name: str, kind: type[T], at: str = "") -> T | None:
    """`raw[name]` if it is a `kind`; None when it is absent or null."""
    value = raw.get(name)
    if value is None:
        return None
    if type(value) is not kind:  # exactly: a bool is no int
        text = f"Invalid type for '{at}{name}': expected {_NAMES[kind]}, but got {type(value).__name__} instead."
        raise RequestRefused(400, text, param=f"{at}{name}")
    return cast(T, value)


def needed(raw: Mapping[str, object], name: str, kind: type[T], at: str = "") -> T:
    """`raw[name]`, which must be a `kind`."""
    value = field(raw, name, kind, at)
    if value is None:
        raise RequestRefused(400, f"Missing required parameter: '{at}{name}'.", param=f"{at}{name}")
    return value


def bound(raw: Mapping[str, object], *names: str) -> int | None:
    """The smallest of the bounds that `raw` gives under `names`."""
    bounds = []
    for name in names:
        value = field(raw, name, int)
        if value is not None and value < 1:
            raise RequestRefused(400, f"Invalid '{name}': must be at least 1.", param=name)
        if value is not None:
            bounds.append(value)
    return min(bounds) if bounds else None


def text_of(content: object, at: str, glue: str) -> str:
    """The text of a message: a string, or text parts joined by `glue`."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestRefused(400, f"Invalid type for '{at}': expected a string or an array of parts.", param=at)
    texts = []
    for place, part in enumerate(content):
        text = part.get("text", part.get("refusal")) if isinstance(part, dict) else None
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind in OMITTED_PARTS and len(part) > 1:
            text = f"[{kind} omitted]"
        if not isinstance(text, str):
            param = f"{at}[{place}]"
            raise RequestRefused(400, f"Invalid value for '{param}': only text parts are served.", param=param)
        texts.append(text)
    return glue.join(texts)


class OpenAiWords:
    """What a dialect of OpenAI says besides turns. Stateless."""

    call_prefix = "call_"
    ping = b": ping\n\n"

    def models(self, names: Sequence[str]) -> HttpAnswer:
        """The list of models."""
        return json_answer(200, {"object": "list", "data": [_model_facts(name) for name in names]})

    def model(self, name: str) -> HttpAnswer:
        """The facts of one model."""
        return json_answer(200, _model_facts(name))

    def refusal(self, refused: RequestRefused) -> HttpAnswer:
        """`{"error": {message, type, param, code}}`."""
        kind = "server_error" if refused.status >= 500 else "invalid_request_error"
        error = {"message": refused.message, "type": kind, "param": refused.param, "code": refused.code}
        return json_answer(refused.status, {"error": error})

    def wrong_key(self, given: str) -> RequestRefused:
        """invalid_api_key; only the ends of the given key are repeated."""
        if not given:
            return RequestRefused(401, "You didn't provide an API key.")
        shown = f"{given[:3]}***{given[-2:]}" if len(given) > 8 else "***"
        return RequestRefused(401, f"Incorrect API key provided: {shown}.", code="invalid_api_key")

    def unknown_model(self, name: str) -> RequestRefused:
        """model_not_found."""
        text = f"The model `{name[:200]}` does not exist or you do not have access to it."
        return RequestRefused(404, text, param="model", code="model_not_found")

    def unknown_path(self, method: str, path: str) -> RequestRefused:
        """unknown_url."""
        return RequestRefused(404, f"Invalid URL ({method[:16]} {path[:200]})", code="unknown_url")


def _model_facts(model: str) -> dict[str, object]:
    return {"id": model, "object": "model", "created": 0, "owned_by": "gyre"}
