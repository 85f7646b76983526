"""What a second start in a run folder may do: nothing unasked, and nothing that contradicts what is there.

A resumed run repeats groups and steps of the earlier one by their numbers. What decides which task a group works
on, how a rollout is sampled and which groups make a step must therefore be as it was; the rest may change.
"""

from functools import reduce
from pathlib import Path

from gyre.config.load import load_settings
from gyre.config.schema import Settings
from gyre.errors import ConfigError
from gyre.program.run import latest_checkpoint, step_of
from gyre.store.store import CONFIG, existing

FIXED = (
    "run.seed",
    "model.path",
    "schedule.groups_per_batch",
    "schedule.rollouts_per_group",
    "sampling.temperature",
    "tasks.train",
)


def check_folder(settings: Settings, *, resume: bool, is_restart: bool) -> None:
    """Raise ConfigError unless the run folder is new, or its run may go on with these settings.

    `is_restart`: torchrun started the ranks again, and the front of their earlier life may still be on its way out.
    """
    folder = settings.run_folder
    found = existing(folder)
    if found is None:
        return
    if found.owner_pid and not is_restart:
        raise ConfigError(
            "run.name",
            wanted="a run folder that no living run owns",
            given=f"{folder} ({found.describe()})",
            fix=f"stop that run first (pid {found.owner_pid}), or choose another name",
        )
    if not resume:
        raise ConfigError(
            "run.name",
            wanted="a run folder that holds no run yet",
            given=f"{folder} ({found.describe()})",
            fix="add --resume to go on with it, or choose another name",
        )
    _check_same(settings, folder)


def _check_same(settings: Settings, folder: Path) -> None:
    checkpoint = latest_checkpoint(folder / "checkpoints")
    if checkpoint is not None and step_of(checkpoint) > settings.run.steps:
        raise ConfigError(
            "run.steps",
            wanted=f"at least the {step_of(checkpoint)} steps that are trained",
            given=settings.run.steps,
            fix="raise it, or choose another run.name",
        )
    if not (folder / CONFIG).exists():
        return
    before = load_settings(folder / CONFIG)
    for key in FIXED:
        was, now = _value(before, key), _value(settings, key)
        if was != now:
            raise ConfigError(
                key, wanted=f"{was}, as the run began", given=str(now), fix="set it back, or choose another run.name"
            )


def _value(settings: Settings, key: str) -> object:
    value = reduce(getattr, key.split("."), settings)
    return value.resolve() if isinstance(value, Path) else value
