"""The strict loader: a TOML file to `Settings`, or one `ConfigError` that says how to mend it.

Nothing is guessed and nothing is ignored: an unknown section or key is an error that suggests the nearest
name; a bool is not an int; an int is taken for a float; NaN and infinity are no numbers. Relative paths are
resolved against the file's own folder, except `[run].folder`, a plain text relative to the working directory.
Loading looks at no path but the file itself; `check_paths` looks whether the folders exist.
"""

import math
import re
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import Any

import tomli

from gyre.config.choices import AdvantageScale, Objective
from gyre.config.schema import Doc, Range, Settings, TrainerSettings
from gyre.errors import ConfigError

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
LEAST_TOKEN_CLIP = 0.01
TYPE_WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "text", Path: "a path"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One field of a section, as the schema declares it. `default` is MISSING when it must be given."""

    key: str
    name: str
    kind: Any
    doc: Doc
    default: Any


def settings_of(section: str, schema: type) -> Iterator[Setting]:
    """The settings of a section, in order."""
    hints = typing.get_type_hints(schema, include_extras=True)
    for field in fields(schema):
        kind, doc = typing.get_args(hints[field.name])
        yield Setting(key=f"{section}.{field.name}", name=field.name, kind=kind, doc=doc, default=field.default)


def load_settings(path: Path, overrides: Sequence[str] = ()) -> Settings:
    """The settings in `path`, changed by `overrides` ("section.key=value", the value in TOML or as plain text).

    Raises ConfigError for anything that is not exactly right.
    """
    tables = _read(path)
    for override in overrides:
        _apply_override(tables, override)
    sections = typing.get_type_hints(Settings)
    _refuse_unknown(tables, known=list(sections), prefix="")
    loaded = {}
    for name, schema in sections.items():
        table = tables.get(name, {})
        if not isinstance(table, dict):
            raise ConfigError(name, wanted="a section", given=table, fix=f"write [{name}] on a line of its own")
        loaded[name] = _load_section(name, schema, table, folder=path.absolute().parent)
    settings = Settings(**loaded)
    check_combinations(settings)
    return settings


def _read(path: Path) -> dict[str, Any]:
    """The raw tables of a TOML file."""
    try:
        return tomli.loads(path.read_bytes().decode("utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(str(path), wanted="a TOML file", given="no such file", fix="check the path") from error
    except OSError as error:
        raise ConfigError(str(path), wanted="a TOML file", given=error.strerror, fix="check the path") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            str(path), wanted="text in UTF-8", given=f"byte {error.start}: {error.reason}", fix="save it as UTF-8"
        ) from error
    except tomli.TOMLDecodeError as error:
        line = re.search(r"line (\d+)", str(error))
        fix = f"mend line {line[1]}" if line else "mend the end of the file"
        raise ConfigError(str(path), wanted="valid TOML", given=str(error), fix=fix) from error


def _apply_override(tables: dict[str, Any], override: str) -> None:
    """Set one key. A value that is no TOML (an unquoted text or path) is taken as text."""
    key, sign, text = override.partition("=")
    section, dot, name = key.strip().partition(".")
    if not (sign and dot and section and name):
        raise ConfigError(
            "--set", wanted="section.key=value", given=override, fix="name section and key, e.g. --set run.seed=1"
        )
    try:
        value = tomli.loads(f"value = {text}")["value"]
    except tomli.TOMLDecodeError:
        value = text.strip()
    table = tables.setdefault(section, {})
    if isinstance(table, dict):
        table[name] = value


def _refuse_unknown(table: dict[str, Any], *, known: list[str], prefix: str) -> None:
    """Raise for the first key that is not known, suggesting the same name elsewhere or the nearest one here."""
    for key in table:
        if key in known:
            continue
        dotted = f"{prefix}{key}"
        elsewhere = [name for name in setting_names() if name.split(".")[1] == key]
        nearest = get_close_matches(key, known, n=1, cutoff=0.5)
        suggestions = elsewhere or [f"{prefix}{name}" for name in nearest]
        fix = f"did you mean {' or '.join(suggestions)}?" if suggestions else f"known here: {', '.join(known)}"
        wanted = "a known setting" if prefix else "a known section"
        raise ConfigError(dotted, wanted=wanted, given=key, fix=fix)


def setting_names() -> list[str]:
    """The dotted name of every setting, in the order of the schema."""
    sections = typing.get_type_hints(Settings).items()
    return [setting.key for section, schema in sections for setting in settings_of(section, schema)]


def _load_section(section: str, schema: type, table: dict[str, Any], *, folder: Path) -> Any:
    """One section's dataclass from its table."""
    settings = list(settings_of(section, schema))
    _refuse_unknown(table, known=[setting.name for setting in settings], prefix=f"{section}.")
    values = {}
    for setting in settings:
        if setting.name in table:
            given = table[setting.name]
            values[setting.name] = _convert(setting.key, setting.kind, given, setting.doc.within, folder)
        elif setting.default is MISSING:
            wanted = f"{_type_words(setting.kind)} ({setting.doc.text})"
            fix = f"add `{setting.name} = ...` under [{section}]"
            raise ConfigError(setting.key, wanted=wanted, given=None, fix=fix)
    return schema(**values)


def _convert(key: str, hint: Any, value: Any, within: Range, folder: Path) -> Any:
    """`value` as the type `hint` says; raises ConfigError when it is another type or out of range."""
    if isinstance(hint, types.UnionType):  # `X | None`: TOML has no null, so a given value is an X
        hint = next(option for option in typing.get_args(hint) if option is not type(None))
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, list):
            raise ConfigError(key, wanted=_type_words(hint), given=value, fix=f"write {key.split('.')[1]} = [...]")
        inner = typing.get_args(hint)[0]
        return tuple(_convert(f"{key}[{i}]", inner, item, within, folder) for i, item in enumerate(value))
    if issubclass(hint, StrEnum):
        return _convert_choice(key, hint, value)
    if hint is float and type(value) is int:
        value = float(value)
    plain = str if hint is Path else hint
    if type(value) is not plain:
        raise ConfigError(key, wanted=_type_words(hint), given=value, fix=_type_fix(hint, value))
    if hint in (int, float) and not (math.isfinite(value) and within.holds(value)):
        wanted = f"{_type_words(hint)} {within}".strip() if math.isfinite(value) else "a finite number"
        raise ConfigError(key, wanted=wanted, given=value)
    if hint in (str, Path) and not value:
        raise ConfigError(key, wanted=f"{_type_words(hint)} that is not empty", given=value)
    return folder / Path(value).expanduser() if hint is Path else value


def _convert_choice(key: str, choices: type[StrEnum], value: Any) -> StrEnum:
    names = [choice.value for choice in choices]
    if value in names:
        return choices(value)
    nearest = get_close_matches(value, names, n=1, cutoff=0.5) if isinstance(value, str) else []
    fix = f"did you mean {nearest[0]!r}?" if nearest else ""
    raise ConfigError(key, wanted=f"one of {', '.join(names)}", given=value, fix=fix)


def _type_words(hint: Any) -> str:
    """A type in the user's words."""
    if isinstance(hint, types.UnionType):
        return _type_words(next(option for option in typing.get_args(hint) if option is not type(None)))
    if typing.get_origin(hint) is tuple:
        return f"a list, each {_type_words(typing.get_args(hint)[0])}"
    if issubclass(hint, StrEnum):
        return f"one of {', '.join(choice.value for choice in hint)}"
    return TYPE_WORDS[hint]


def _type_fix(hint: type, value: Any) -> str:
    """How to write what was probably meant."""
    match value:
        case str() if hint in (int, float, bool):
            return "write it without quotes"
        case bool() if hint in (int, float):
            return "write a number instead"
        case float() if hint is int and math.isfinite(value) and value == int(value):
            return f"write {int(value)}"
        case int() | float() if hint is bool:
            return "write true or false"
        case int() | float() if hint in (str, Path):
            return f'write "{value}"'
    return ""


def check_combinations(settings: Settings) -> None:
    """Raise ConfigError for settings that are each fine but do not go together."""
    run, model, where, tasks = settings.run, settings.model, settings.placement, settings.tasks
    if not NAME.fullmatch(run.name):
        raise ConfigError(
            "run.name",
            wanted="letters, digits, '.', '_' or '-', not beginning with '.' or '-'",
            given=run.name,
            fix="it names a folder; use [run].folder for where that lies",
        )
    if run.mu != 1:
        raise ConfigError("run.mu", wanted="1", given=run.mu, fix="bursts of several steps are not built yet")
    if where.ep > settings.ranks_per_cell or settings.ranks_per_cell % where.ep:
        raise ConfigError(
            "placement.ep",
            wanted=f"a divisor of the ranks of a cell, tp * pp * cp = {settings.ranks_per_cell}",
            given=where.ep,
            fix="change ep, or the others",
        )
    if settings.schedule.policy.is_async and where.num_cells < 2:
        fix = "add a cell, or choose another policy"
        raise ConfigError("placement.num_cells", wanted="2 or more for an async policy", given=1, fix=fix)
    if settings.schedule.policy.is_async and settings.schedule.training_cells >= max(where.num_cells, 1):
        raise ConfigError(
            "schedule.training_cells",
            wanted=f"less than placement.num_cells = {where.num_cells}",
            given=settings.schedule.training_cells,
            fix="an async policy needs a cell for rollouts",
        )
    _check_tokens(settings, model.max_context_tokens)
    _check_objective(settings.trainer)
    if settings.sampling.top_p < 1 and settings.sampling.temperature > 0:
        raise ConfigError(
            "sampling.top_p",
            wanted="1",
            given=settings.sampling.top_p,
            fix="the engine reports log-probs of the uncut distribution, so a nucleus would bias training",
        )
    if tasks.eval_rollouts and tasks.held_out is None:
        raise ConfigError(
            "tasks.held_out",
            wanted=f"a folder of tasks, as tasks.eval_rollouts is {tasks.eval_rollouts}",
            given=None,
            fix="name the folder, or set eval_rollouts = 0",
        )
    roles = settings.sampling.path_priority
    if len(set(roles)) != len(roles) or not roles:
        raise ConfigError(
            "sampling.path_priority",
            wanted="each role once",
            given=[role.value for role in roles],
            fix="list each once",
        )


def _check_objective(trainer: TrainerSettings) -> None:
    """Parameters of the objective that contradict it."""
    is_of_tokens = trainer.objective not in (Objective.GSPO, Objective.GSPO_PATH, Objective.REINFORCE)
    if is_of_tokens and trainer.clip_high < LEAST_TOKEN_CLIP:
        raise ConfigError(
            "trainer.clip_high",
            wanted=f"at least {LEAST_TOKEN_CLIP:g}, since {trainer.objective.value} clips the ratio of single tokens",
            given=trainer.clip_high,
            fix="papers take clip_low = 0.2 and clip_high = 0.2 (dapo: 0.28, cispo: 4)",
        )
    if trainer.objective is Objective.DR_GRPO and trainer.advantage_scale is not AdvantageScale.NONE:
        raise ConfigError(
            "trainer.advantage_scale",
            wanted='"none", since dr_grpo does not divide by the deviation',
            given=trainer.advantage_scale.value,
            fix="set it to none, or take grpo",
        )


def _check_tokens(settings: Settings, context: int) -> None:
    """Token limits that must contain each other."""
    if settings.sampling.max_turn_tokens >= context:
        raise ConfigError(
            "sampling.max_turn_tokens",
            wanted=f"less than model.max_context_tokens = {context}",
            given=settings.sampling.max_turn_tokens,
            fix="a prompt needs room too: lower it, or raise max_context_tokens",
        )
    limits = (
        ("engine.max_total_tokens", settings.engine.max_total_tokens),
        ("trainer.micro_step_tokens", settings.trainer.micro_step_tokens),
    )
    for key, tokens in limits:
        if tokens < context:
            raise ConfigError(
                key,
                wanted=f"at least model.max_context_tokens = {context}",
                given=tokens,
                fix="one whole context must fit: raise it, or lower max_context_tokens",
            )


def check_runnable(settings: Settings) -> None:
    """Raise ConfigError for what can be simulated and not run."""
    policy = settings.schedule.policy
    if policy.is_simulated_only:
        able = ", ".join(one.value for one in type(policy) if not one.is_simulated_only)
        fix = "`gyre.py simulate` takes it; the ranks cannot carry it out"
        raise ConfigError("schedule.policy", wanted=f"one of {able} for a run", given=policy.value, fix=fix)


def check_paths(settings: Settings) -> None:
    """Raise ConfigError for the first path in the settings that is not there. Looks at the disk; opens nothing."""
    model, tasks, harness_config = settings.model.path, settings.tasks, settings.rollout.harness_config
    for key, folder in (("model.path", model), ("tasks.train", tasks.train), ("tasks.held_out", tasks.held_out)):
        if folder is not None and not folder.is_dir():
            fix = "make it first (the README says how), or change the setting"
            raise ConfigError(key, wanted="a folder", given=str(folder), fix=fix)
    if not (model / "config.json").is_file():
        fix = "name a folder in Hugging Face format"
        raise ConfigError("model.path", wanted="a folder with config.json", given=str(model), fix=fix)
    if harness_config is not None and not harness_config.is_file():
        fix = "check the path; it is relative to the configuration file"
        raise ConfigError("rollout.harness_config", wanted="a file", given=str(harness_config), fix=fix)


def describe_settings() -> str:
    """Every setting with its type, default, range and doc, as text for --help and the docs."""
    lines = []
    for section, schema in typing.get_type_hints(Settings).items():
        _, _, purpose = (schema.__doc__ or "").partition(": ")
        lines += ["", f"[{section}]  # {purpose}"] if lines else [f"[{section}]  # {purpose}"]
        for setting in settings_of(section, schema):
            kind = f"{_type_words(setting.kind)} {setting.doc.within}".strip()
            lines.append(f"  {setting.name} = {_default_text(setting.default)}")
            lines.append(f"      {setting.doc.text} ({kind})")
    return "\n".join(lines)


def _default_text(default: Any) -> str:
    """The default as TOML would spell it."""
    match default:
        case bool() as value:
            return str(value).lower()
        case StrEnum() | str() as value:
            return f'"{value}"'
        case tuple() as values:
            return "[" + ", ".join(f'"{value}"' for value in values) + "]"
        case None:
            return "(none)"
        case value if value is MISSING:
            return "(required)"
        case value:
            return f"{value}"
