"""Settings of a toy run for tests that need a whole `Settings`, with the few values a test varies."""

from pathlib import Path

from gyre.config.choices import DeviceChoice
from gyre.config.schema import (
    EngineSettings,
    GatewaySettings,
    ModelSettings,
    PlacementSettings,
    RolloutSettings,
    RunSettings,
    SamplingSettings,
    SandboxSettings,
    ScheduleSettings,
    Settings,
    SimulateSettings,
    StopSettings,
    TasksSettings,
    TrainerSettings,
    WatchSettings,
)


def make_settings(
    model_path: Path, *, num_cells: int = 1, tp: int = 1, engine_port: int = 30100, max_running_requests: int = 8,
    control_timeout_s: float = 30.0,
) -> Settings:  # fmt: skip
    """A CPU run of `num_cells` cells; everything else is a default or a placeholder."""
    return Settings(
        run=RunSettings(name="test", steps=0),
        model=ModelSettings(path=model_path, max_context_tokens=2048),
        placement=PlacementSettings(
            num_cells=num_cells, tp=tp, device=DeviceChoice.CPU, control_timeout_s=control_timeout_s
        ),
        engine=EngineSettings(port=engine_port, max_running_requests=max_running_requests, max_total_tokens=16384),
        trainer=TrainerSettings(learning_rate=0.0),
        schedule=ScheduleSettings(groups_per_batch=1, rollouts_per_group=2, cell_capacity=8),
        sampling=SamplingSettings(),
        rollout=RolloutSettings(),
        tasks=TasksSettings(train=Path("tasks")),
        sandbox=SandboxSettings(),
        gateway=GatewaySettings(),
        watch=WatchSettings(),
        stop=StopSettings(),
        simulate=SimulateSettings(),
    )
