"""Every setting of a run: its type, default, range and one line of doc. One frozen dataclass a section.

The loader is driven by these dataclasses: a field added here is read, checked and documented without other
change. A field without a default must be given. Units are in the names (`_s` seconds, `_mb` MiB, `_tokens`).
What more than one field decides together is checked in `load.py`. Nothing here reads a file.
"""

from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any

from gyre.config.choices import (
    AdvantageScale,
    Dashboard,
    DeviceChoice,
    Dtype,
    HarnessName,
    LogLevel,
    Objective,
    PathRole,
    PolicyName,
    ReasoningHistory,
)
from gyre.types import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Bounds of a number; a bound that is None does not bind."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    def holds(self, value: float) -> bool:
        """Whether `value` lies within all bounds (NaN never does)."""
        return (
            (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        bounds = ((">=", self.at_least), (">", self.above), ("<=", self.at_most), ("<", self.below))
        return " and ".join(f"{sign} {bound:g}" for sign, bound in bounds if bound is not None)


ANY = Range()
COUNT = Range(at_least=0)
NATURAL = Range(at_least=1)
POSITIVE = Range(above=0)
PORT = Range(at_least=1024, at_most=65535)


def setting(doc: str, *, default: Any = MISSING, within: Range = ANY) -> Any:
    """A dataclass field with its doc line and range."""
    metadata = {"doc": doc, "within": within}
    return field(metadata=metadata) if default is MISSING else field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """[run]: what the run is called and how long it goes."""

    name: str = setting("name of the run and of its folder: letters, digits, '.', '_', '-'")
    folder: str = setting("where run folders lie, relative to the working directory", default="runs")
    seed: int = setting("decides task order and every sampled token", default=0, within=COUNT)
    steps: int = setting("optimizer steps in all; 0 only evaluates", within=COUNT)
    mu: int = setting("training steps in a burst", default=1, within=NATURAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """[model]: the policy to start from."""

    path: Path = setting("Hugging Face folder with config.json, tokenizer and safetensors")
    max_context_tokens: int = setting("prompt and output of one turn together", default=4096, within=NATURAL)
    reasoning_history: ReasoningHistory = setting(
        "keep earlier reasoning in the prompt, or leave it to the template", default=ReasoningHistory.KEEP
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementSettings:
    """[placement]: how ranks form cells."""

    num_cells: int = setting("cells, all alike; cell 0 is the core", default=1, within=NATURAL)
    tp: int = setting("tensor parallel size in a cell", default=1, within=NATURAL)
    pp: int = setting("pipeline parallel size in a cell", default=1, within=NATURAL)
    cp: int = setting("context parallel size in a cell", default=1, within=NATURAL)
    ep: int = setting("expert parallel size in a cell; shares the ranks of the others", default=1, within=NATURAL)
    device: DeviceChoice = setting("where ranks compute", default=DeviceChoice.AUTO)
    control_timeout_s: float = setting("deadline of a control collective", default=30.0, within=POSITIVE)
    data_timeout_s: float = setting("deadline of a data collective or a pull", default=120.0, within=POSITIVE)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """[engine]: the SGLang engine of each cell."""

    max_running_requests: int = setting("requests batched at once", default=64, within=NATURAL)
    max_total_tokens: int = setting("tokens of KV cache an engine holds", default=32768, within=NATURAL)
    dtype: Dtype = setting("number format of the engine's weights", default=Dtype.AUTO)
    attention_backend: str = setting("SGLang attention backend, or auto", default="auto")
    deterministic: bool = setting("make sampling a function of seed and position alone", default=True)
    start_timeout_s: float = setting("deadline from start to the first probe", default=300.0, within=POSITIVE)
    request_timeout_s: float = setting("deadline of one turn", default=600.0, within=POSITIVE)
    release_timeout_s: float = setting("deadline of giving memory back", default=20.0, within=POSITIVE)
    load_timeout_s: float = setting("deadline of loading new weights", default=30.0, within=POSITIVE)
    port: int = setting("first of the local ports the engines use", default=31000, within=PORT)
    mem_fraction: float = setting(
        "share of device memory for weights and KV (GPU)", default=0.5, within=Range(above=0, below=1)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """[trainer]: loss, optimizer, micro-steps, checkpoints."""

    learning_rate: float = setting("of Adam; 0 trains nothing (a control run)", within=COUNT)
    adam_beta1: float = setting("decay of the first moment", default=0.9, within=Range(at_least=0, below=1))
    adam_beta2: float = setting("decay of the second moment", default=0.95, within=Range(at_least=0, below=1))
    adam_eps: float = setting("added to the root of the second moment", default=1e-8, within=POSITIVE)
    weight_decay: float = setting("decoupled decay of matrices", default=0.0, within=COUNT)
    clip_grad: float = setting("largest gradient norm", default=1.0, within=POSITIVE)
    objective: Objective = setting("the loss", default=Objective.GSPO)
    clip_low: float = setting("the ratio is clipped below 1 - clip_low", default=3e-4, within=Range(above=0, below=1))
    clip_high: float = setting("the ratio is clipped above 1 + clip_high", default=4e-4, within=POSITIVE)
    advantage_scale: AdvantageScale = setting(
        "what centred rewards of a group are divided by", default=AdvantageScale.STD
    )
    micro_step_rollouts: int = setting("rollouts in a micro-step at most", default=8, within=NATURAL)
    micro_step_tokens: int = setting("tokens in a micro-step at most", default=16384, within=NATURAL)
    checkpoint_every_steps: int = setting("steps between checkpoints", default=1, within=NATURAL)
    keep_checkpoints: int = setting("newest checkpoints that are kept", default=2, within=NATURAL)
    threads: int = setting("CPU threads of a rank", default=1, within=NATURAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSettings:
    """[schedule]: batches, staleness and when cells switch."""

    policy: PolicyName = setting("rule by which cells leave rollout", default=PolicyName.WATERLEVEL)
    groups_per_batch: int = setting("groups (tasks) that a step trains: B", within=NATURAL)
    rollouts_per_group: int = setting("rollouts of one task: G", within=Range(at_least=2))
    staleness: float = setting("batches dispatched ahead, may be a fraction: phi", default=0.0, within=COUNT)
    cell_capacity: int = setting("rollouts that a cell carries at once: C_e", within=NATURAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    """[sampling]: how turns are sampled, and which paths of a tree are trained."""

    temperature: float = setting("1 samples the policy itself", default=1.0, within=COUNT)
    top_p: float = setting("nucleus; 1 keeps all tokens", default=1.0, within=Range(above=0, at_most=1))
    max_turn_tokens: int = setting("output tokens of one turn at most", default=1024, within=NATURAL)
    max_paths: int = setting("paths of a rollout's tree that are trained: J_max", default=5, within=NATURAL)
    path_priority: tuple[PathRole, ...] = setting(
        "order in which classes of leaves are sampled",
        default=(PathRole.MAIN, PathRole.SUB_AGENT, PathRole.MAIN_SUMMARY, PathRole.SUB_AGENT_SUMMARY),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSettings:
    """[rollout]: the harness and what runs around it."""

    harness: HarnessName = setting("agent program that drives a rollout", default=HarnessName.MINI_SWE_AGENT)
    harness_config: Path | None = setting("the harness's own configuration file", default=None)
    grading_retries: int = setting("tries after a failed grading before the rollout is dropped", default=2, within=COUNT)
    concurrent_gradings: int = setting("gradings at once on a node", default=4, within=NATURAL)
    concurrent_starts: int = setting("sandbox starts at once on a node", default=8, within=NATURAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class TasksSettings:
    """[tasks]: folders of tasks in Harbor format."""

    train: Path = setting("folder of training tasks")
    held_out: Path | None = setting("folder of tasks that are only evaluated", default=None)
    eval_rollouts: int = setting("rollouts evaluated before and after training", default=0, within=COUNT)


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSettings:
    """[sandbox]: limits of one rollout's sandbox."""

    memory_mb: int = setting("memory", default=512, within=NATURAL)
    processes: int = setting("processes and threads", default=64, within=NATURAL)
    disk_mb: int = setting("largest file and workspace", default=64, within=NATURAL)
    cpu_s: int = setting("CPU seconds of one process", default=600, within=NATURAL)
    folder: Path | None = setting("where sandboxes lie; none: the system's temporary folder", default=None)
    gateway_port: int = setting("port of the gateway inside a sandbox", default=8765, within=PORT)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """[gateway]: the only network of a sandbox."""

    ping_s: float = setting("pause between pings on a waiting stream", default=10.0, within=POSITIVE)
    body_limit_mb: int = setting("largest request body", default=64, within=NATURAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchSettings:
    """[watch]: screen and logs."""

    dashboard: Dashboard = setting("how the terminal shows the run", default=Dashboard.AUTO)
    refresh_s: float = setting("pause between two pictures", default=0.5, within=POSITIVE)
    log_level: LogLevel = setting("least severe line that is written", default=LogLevel.INFO)


@dataclass(frozen=True, slots=True, kw_only=True)
class StopSettings:
    """[stop]: how the run ends."""

    grace_s: float = setting("time for an orderly end before a hard one", default=10.0, within=POSITIVE)
    alone_s: float = setting("front and hands end when left alone this long", default=10.0, within=POSITIVE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings of a run. A component gets its own section."""

    run: RunSettings
    model: ModelSettings
    placement: PlacementSettings
    engine: EngineSettings
    trainer: TrainerSettings
    schedule: ScheduleSettings
    sampling: SamplingSettings
    rollout: RolloutSettings
    tasks: TasksSettings
    sandbox: SandboxSettings
    gateway: GatewaySettings
    watch: WatchSettings
    stop: StopSettings

    @property
    def layout(self) -> Layout:
        """The parallel layout of every cell."""
        where = self.placement
        return Layout(tp=where.tp, pp=where.pp, cp=where.cp, ep=where.ep)

    @property
    def ranks_per_cell(self) -> int:
        """Ranks of one cell."""
        return self.layout.num_ranks

    @property
    def num_ranks(self) -> int:
        """Ranks of the whole world, as torchrun must start them."""
        return self.placement.num_cells * self.ranks_per_cell

    @property
    def run_folder(self) -> Path:
        """Folder of this run, relative to the working directory unless [run].folder is absolute."""
        return Path(self.run.folder) / self.run.name
