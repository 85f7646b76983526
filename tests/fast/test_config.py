"""What the loader takes, and the exact words with which it refuses."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from gyre.config.choices import HarnessName, PathRole
from gyre.config.dump import dump_settings
from gyre.config.load import check_paths, describe_settings, load_settings, setting_names
from gyre.errors import ConfigError

GOOD = {
    "run": {"name": '"toy"', "steps": "3"},
    "model": {"path": '"policy"'},
    "trainer": {"learning_rate": "1e-3"},
    "schedule": {"groups_per_batch": "2", "rollouts_per_group": "4", "cell_capacity": "8"},
    "tasks": {"train": '"tasks"'},
}


def write(folder: Path, changes: Mapping[str, str | None] | None = None) -> Path:
    """A good file with dotted `changes`; None removes a key."""
    tables = {name: dict(table) for name, table in GOOD.items()}
    for dotted, value in (changes or {}).items():
        section, key = dotted.split(".")
        table = tables.setdefault(section, {})
        if value is None:
            del table[key]
        else:
            table[key] = value
    lines = []
    for name, table in tables.items():
        lines += [f"[{name}]", *(f"{key} = {value}" for key, value in table.items())]
    path = folder / "toy.toml"
    path.write_text("\n".join(lines))
    return path


def refusal(path: Path) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_settings(path)
    assert caught.value.exit_code == 2
    return caught.value


def test_a_small_file_is_filled_with_defaults(tmp_path: Path) -> None:
    settings = load_settings(write(tmp_path))
    assert settings.run.seed == 0 and settings.placement.num_cells == 1
    assert settings.rollout.harness is HarnessName.MINI_SWE_AGENT
    assert settings.sampling.path_priority[0] is PathRole.MAIN
    assert settings.trainer.clip_low == 3e-4 and settings.tasks.held_out is None


def test_paths_are_relative_to_the_file_and_the_run_folder_is_not(tmp_path: Path) -> None:
    settings = load_settings(write(tmp_path, {"tasks.held_out": '"../held"', "run.folder": '"out"'}))
    assert settings.model.path == tmp_path / "policy"
    assert settings.tasks.held_out == tmp_path / "../held"
    assert settings.run_folder == Path("out/toy")


def test_ranks_and_layout_follow_from_the_placement(tmp_path: Path) -> None:
    changes = {"placement.num_cells": "3", "placement.tp": "2", "placement.pp": "2", "placement.ep": "4"}
    settings = load_settings(write(tmp_path, changes))
    assert (settings.ranks_per_cell, settings.num_ranks) == (4, 12)
    assert (settings.layout.tp, settings.layout.pp, settings.layout.cp, settings.layout.ep) == (2, 2, 1, 4)


def test_an_integer_is_taken_for_a_number(tmp_path: Path) -> None:
    settings = load_settings(write(tmp_path, {"trainer.learning_rate": "0"}))
    assert settings.trainer.learning_rate == 0.0 and isinstance(settings.trainer.learning_rate, float)


@pytest.mark.parametrize(
    ("dotted", "value", "text"),
    [
        (
            "trainer.learning_rat",
            "1",
            "trainer.learning_rat: wanted a known setting, given 'learning_rat'; did you mean trainer.learning_rate?",
        ),
        (
            "trainer.num_cells",
            "1",
            "trainer.num_cells: wanted a known setting, given 'num_cells'; did you mean placement.num_cells?",
        ),
        ("trainr.threads", "1", "trainr: wanted a known section, given 'trainr'; did you mean trainer?"),
        ("run.steps", '"3"', "run.steps: wanted an integer, given '3'; write it without quotes"),
        ("run.steps", "true", "run.steps: wanted an integer, given True; write a number instead"),
        ("run.steps", "3.0", "run.steps: wanted an integer, given 3.0; write 3"),
        ("run.steps", "-1", "run.steps: wanted an integer >= 0, given -1"),
        ("run.name", "3", 'run.name: wanted text, given 3; write "3"'),
        ("run.name", '""', "run.name: wanted text that is not empty, given ''"),
        ("engine.deterministic", "1", "engine.deterministic: wanted true or false, given 1; write true or false"),
        ("trainer.clip_low", "1.0", "trainer.clip_low: wanted a number > 0 and < 1, given 1.0"),
        ("trainer.learning_rate", "nan", "trainer.learning_rate: wanted a finite number, given nan"),
        ("trainer.learning_rate", "inf", "trainer.learning_rate: wanted a finite number, given inf"),
        ("schedule.rollouts_per_group", "1", "schedule.rollouts_per_group: wanted an integer >= 2, given 1"),
        (
            "placement.device",
            '"cud"',
            "placement.device: wanted one of auto, cpu, cuda, given 'cud'; did you mean 'cuda'?",
        ),
        (
            "sampling.path_priority",
            '"main"',
            (
                "sampling.path_priority: wanted a list, each one of main, sub_agent, main_summary, sub_agent_summary, "
                "given 'main'; write path_priority = [...]"
            ),
        ),
        ("run.mu", "2", "run.mu: wanted 1, given 2; bursts of several steps are not built yet"),
        (
            "sampling.max_turn_tokens",
            "4096",
            (
                "sampling.max_turn_tokens: wanted less than model.max_context_tokens = 4096, given 4096; "
                "a prompt needs room too: lower it, or raise max_context_tokens"
            ),
        ),
        (
            "model.max_context_tokens",
            "20000",
            (
                "trainer.micro_step_tokens: wanted at least model.max_context_tokens = 20000, given 16384; "
                "one whole context must fit: raise it, or lower max_context_tokens"
            ),
        ),
        (
            "tasks.eval_rollouts",
            "8",
            (
                "tasks.held_out: wanted a folder of tasks, as tasks.eval_rollouts is 8, given None; "
                "name the folder, or set eval_rollouts = 0"
            ),
        ),
        (
            "placement.ep",
            "2",
            (
                "placement.ep: wanted a divisor of the ranks of a cell, tp * pp * cp = 1, given 2; "
                "change ep, or the others"
            ),
        ),
        (
            "run.name",
            '"a/b"',
            (
                "run.name: wanted letters, digits, '.', '_' or '-', not beginning with '.' or '-', given 'a/b'; "
                "it names a folder; use [run].folder for where that lies"
            ),
        ),
        (
            "run.steps",
            None,
            (
                "run.steps: wanted an integer (optimizer steps in all; 0 only evaluates), given None; "
                "add `steps = ...` under [run]"
            ),
        ),
    ],
)
def test_a_mistake_is_named_with_its_fix(tmp_path: Path, dotted: str, value: str | None, text: str) -> None:
    assert str(refusal(write(tmp_path, {dotted: value}))) == text


def test_a_key_outside_any_section_is_shown_its_section(tmp_path: Path) -> None:
    path = write(tmp_path)
    path.write_text("steps = 4\n" + path.read_text())
    assert str(refusal(path)) == "steps: wanted a known section, given 'steps'; did you mean run.steps?"


def test_a_section_that_is_no_table_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path)
    path.write_text("stop = 4\n" + path.read_text())
    assert refusal(path).key == "stop"


def test_broken_toml_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "toy.toml"
    path.write_text("[run]\nname = \n")
    error = refusal(path)
    assert error.fix == "mend line 2" and str(path) in str(error)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    assert "no such file" in str(refusal(tmp_path / "none.toml"))
    assert refusal(tmp_path).wanted == "a TOML file"


def test_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "toy.toml"
    path.write_bytes(b"[run]\nname = '\xff'")
    assert refusal(path).fix == "save it as UTF-8"


def test_absent_folders_are_named_one_by_one(tmp_path: Path) -> None:
    settings = load_settings(write(tmp_path, {"rollout.harness_config": '"mini.yaml"'}))
    for key, path in (
        ("model.path", "policy/"),
        ("tasks.train", "tasks/"),
        ("model.path", "policy/config.json"),
        ("rollout.harness_config", "mini.yaml"),
    ):
        with pytest.raises(ConfigError) as caught:
            check_paths(settings)
        assert caught.value.key == key and caught.value.fix
        if path.endswith("/"):
            (tmp_path / path).mkdir()
        else:
            (tmp_path / path).write_text("{}")
    check_paths(settings)


def test_every_setting_is_described() -> None:
    text = describe_settings()
    for name in setting_names():
        assert f"\n  {name.split('.')[1]} = " in text
    assert '  harness = "mini-swe-agent"' in text and "  deterministic = true" in text


def test_override_replaces_a_setting_and_is_checked_like_the_file(tmp_path: Path) -> None:
    path = Path(__file__).parents[2] / "configs" / "quickstart.toml"
    assert load_settings(path, ["run.seed=7", "run.name=other"]).run.seed == 7
    with pytest.raises(ConfigError, match=r"run\.sede"):
        load_settings(path, ["run.sede=7"])
    with pytest.raises(ConfigError, match="--set"):
        load_settings(path, ["seed=7"])


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[2] / "configs").rglob("*.toml")), ids=lambda p: p.name)
def test_dumped_settings_load_as_the_same_from_anywhere(path: Path, tmp_path: Path) -> None:
    settings = load_settings(path, ['run.folder=a "quoted" \\ folder', "trainer.learning_rate=3"])
    copy = tmp_path / "config.toml"
    copy.write_text(dump_settings(settings))
    assert dump_settings(load_settings(copy)) == copy.read_text()
    assert load_settings(copy).run == settings.run and load_settings(copy).trainer == settings.trainer
    assert load_settings(copy).model.path.resolve() == settings.model.path.resolve()
