"""Settings of a toy run for tests that need a whole `Settings`, with the few values a test varies."""

import typing
from pathlib import Path

from gyre.config.choices import DeviceChoice
from gyre.config.schema import (
    EngineSettings,
    ModelSettings,
    PlacementSettings,
    RunSettings,
    ScheduleSettings,
    Settings,
    TasksSettings,
    TrainerSettings,
)


def make_settings(
    model_path: Path, *, num_cells: int = 1, tp: int = 1, engine_port: int = 30100, max_running_requests: int = 8,
    control_timeout_s: float = 30.0,
) -> Settings:  # fmt: skip
    """A CPU run of `num_cells` cells; everything else is a default or a placeholder."""
    given = {
        "run": RunSettings(name="test", steps=0),
        "model": ModelSettings(path=model_path, max_context_tokens=2048),
        "placement": PlacementSettings(
            num_cells=num_cells, tp=tp, device=DeviceChoice.CPU, control_timeout_s=control_timeout_s
        ),
        "engine": EngineSettings(port=engine_port, max_running_requests=max_running_requests, max_total_tokens=16384),
        "trainer": TrainerSettings(learning_rate=0.0),
        "schedule": ScheduleSettings(groups_per_batch=1, rollouts_per_group=2, cell_capacity=8),
        "tasks": TasksSettings(train=Path("tasks")),
    }
    # Every other section, also one that is added later, stands at its defaults.
    sections = typing.get_type_hints(Settings)
    return Settings(**{name: given[name] if name in given else schema() for name, schema in sections.items()})
