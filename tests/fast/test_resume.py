"""A second start in a run folder: refused unasked, and refused where its settings contradict the run."""

from pathlib import Path

import pytest

from gyre.config.dump import dump_settings
from gyre.config.load import load_settings
from gyre.config.schema import Settings
from gyre.errors import ConfigError
from gyre.program.resume import check_folder
from gyre.store.store import RunStore

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.toml"


def settings_in(tmp_path: Path, *overrides: str) -> Settings:
    return load_settings(CONFIG, [f"run.folder={tmp_path}", "run.name=one", *overrides])


def begin(settings: Settings, *, steps: int) -> None:
    """Leave what a run leaves that trained `steps` steps."""
    RunStore.open(settings.run_folder, config_text=dump_settings(settings)).close()
    (settings.run_folder / "checkpoints" / f"step-{steps:06d}").mkdir()


def test_a_new_folder_is_free(tmp_path: Path) -> None:
    check_folder(settings_in(tmp_path), resume=False, is_restart=False)


def test_an_earlier_run_is_told_and_goes_on_only_when_asked(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    begin(settings, steps=3)
    with pytest.raises(ConfigError, match=r"step-000003.*--resume"):
        check_folder(settings, resume=False, is_restart=False)
    check_folder(settings, resume=True, is_restart=False)
    check_folder(settings_in(tmp_path, "run.steps=40", "engine.port=32000"), resume=True, is_restart=False)


@pytest.mark.parametrize(
    "override", ["run.seed=9", "schedule.groups_per_batch=2", "schedule.rollouts_per_group=4", "tasks.train=elsewhere"]
)
def test_what_the_run_was_built_on_may_not_change(tmp_path: Path, override: str) -> None:
    begin(settings_in(tmp_path), steps=3)
    with pytest.raises(ConfigError, match=override.partition("=")[0].replace(".", r"\.")):
        check_folder(settings_in(tmp_path, override), resume=True, is_restart=False)


def test_fewer_steps_than_are_trained_are_refused(tmp_path: Path) -> None:
    begin(settings_in(tmp_path), steps=3)
    with pytest.raises(ConfigError, match=r"run\.steps: wanted at least the 3 steps"):
        check_folder(settings_in(tmp_path, "run.steps=2"), resume=True, is_restart=False)


def test_a_living_run_is_never_joined(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    store = RunStore.open(settings.run_folder, config_text=dump_settings(settings))
    with pytest.raises(ConfigError, match="living run owns"):
        check_folder(settings, resume=True, is_restart=False)
    check_folder(settings, resume=True, is_restart=True)
    store.close()
