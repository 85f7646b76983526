"""Settings back to TOML: complete, with every path absolute, so that the text alone says what a run was.

`load_settings` of the text gives equal settings, whatever folder the file lies in. What is None is left out: TOML
has no null, and an absent key means its default.
"""

import json
from dataclasses import fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from gyre.config.schema import Settings


def dump_settings(settings: Settings) -> str:
    """All settings as TOML, sections and keys in the schema's order."""
    lines: list[str] = []
    for section in fields(settings):
        lines.append(f"[{section.name}]")
        values = getattr(settings, section.name)
        for setting in fields(values):
            value = getattr(values, setting.name)
            if value is not None:
                lines.append(f"{setting.name} = {_toml(value)}")
        lines.append("")
    return "\n".join(lines)


def _toml(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case StrEnum():
            return json.dumps(value.value)
        case Path():
            return json.dumps(str(value.absolute()), ensure_ascii=False)
        case str():
            # JSON's escapes are among those of TOML's basic strings; DEL is the one JSON leaves as it is.
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case tuple():
            return f"[{', '.join(_toml(one) for one in value)}]"
        case int() | float():
            return repr(value)
    raise AssertionError(f"no TOML for {value!r}")
