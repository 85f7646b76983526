"""Every setting of a run: its type, default, range and one line of doc. One frozen dataclass a section.

The loader is driven by these dataclasses: a field added here is read, checked and documented without other
change. A field without a default must be given. Units are in the names (`_s` seconds, `_mb` MiB, `_tokens`).
What more than one field decides together is checked in `load.py`. Nothing here reads a file.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from gyre.config.choices import (
    AdvantageScale,
    Dashboard,
    DeviceChoice,
    Dtype,
    GroupFilter,
    HarnessName,
    Importance,
    LogLevel,
    MixedVersions,
    Objective,
    PathRole,
    PolicyName,
    ReasoningHistory,
    ReasoningParserName,
    ToolParserName,
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
SHARE = Range(above=0, below=1)
DECAY = Range(at_least=0, below=1)
UNIT = Range(at_least=0, at_most=1)
PORT = Range(at_least=1024, at_most=65535)


@dataclass(frozen=True, slots=True)
class Doc:
    """A setting's line of doc and its range."""

    text: str
    within: Range = ANY


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """[run]: what the run is called and how long it goes."""

    name: Annotated[str, Doc("name of the run and of its folder: letters, digits, '.', '_', '-'")]
    folder: Annotated[str, Doc("where run folders lie, relative to the working directory")] = "runs"
    seed: Annotated[int, Doc("decides task order and every sampled token", COUNT)] = 0
    steps: Annotated[int, Doc("optimizer steps in all; 0 only evaluates", COUNT)]
    mu: Annotated[int, Doc("training steps in a burst", NATURAL)] = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """[model]: the policy to start from."""

    path: Annotated[Path, Doc("Hugging Face folder with config.json, tokenizer and safetensors")]
    max_context_tokens: Annotated[int, Doc("prompt and output of one turn together", NATURAL)] = 4096
    reasoning_history: Annotated[
        ReasoningHistory, Doc("keep earlier reasoning in the prompt, or leave it to the template")
    ] = ReasoningHistory.KEEP
    tool_parser: Annotated[ToolParserName, Doc("how the policy writes tool calls")] = ToolParserName.AUTO
    reasoning_parser: Annotated[ReasoningParserName, Doc("how the policy writes reasoning")] = ReasoningParserName.AUTO


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementSettings:
    """[placement]: how ranks form cells."""

    num_cells: Annotated[int, Doc("cells, all alike; cell 0 is the core", NATURAL)] = 1
    tp: Annotated[int, Doc("tensor parallel size in a cell", NATURAL)] = 1
    pp: Annotated[int, Doc("pipeline parallel size in a cell", NATURAL)] = 1
    cp: Annotated[int, Doc("context parallel size in a cell", NATURAL)] = 1
    ep: Annotated[int, Doc("expert parallel size in a cell; shares the ranks of the others", NATURAL)] = 1
    device: Annotated[DeviceChoice, Doc("where ranks compute")] = DeviceChoice.AUTO
    control_timeout_s: Annotated[float, Doc("deadline of a control collective", POSITIVE)] = 30.0
    data_timeout_s: Annotated[float, Doc("deadline of a data collective or a pull", POSITIVE)] = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """[engine]: the SGLang engine of each cell."""

    max_running_requests: Annotated[int, Doc("requests batched at once", NATURAL)] = 64
    max_total_tokens: Annotated[int, Doc("tokens of KV cache an engine holds", NATURAL)] = 32768
    dtype: Annotated[Dtype, Doc("number format of the engine's weights")] = Dtype.AUTO
    attention_backend: Annotated[str, Doc("SGLang attention backend, or auto")] = "auto"
    deterministic: Annotated[bool, Doc("make sampling a function of seed and position alone")] = True
    start_timeout_s: Annotated[float, Doc("deadline from start to the first probe", POSITIVE)] = 300.0
    request_timeout_s: Annotated[float, Doc("deadline of one turn", POSITIVE)] = 600.0
    release_timeout_s: Annotated[float, Doc("deadline of giving memory back", POSITIVE)] = 20.0
    load_timeout_s: Annotated[float, Doc("deadline of loading new weights", POSITIVE)] = 30.0
    port: Annotated[int, Doc("first of the local ports the engines use", PORT)] = 31000
    mem_fraction: Annotated[float, Doc("share of device memory for weights and KV (GPU)", SHARE)] = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """[trainer]: loss, optimizer, micro-steps, checkpoints."""

    learning_rate: Annotated[float, Doc("of Adam; 0 trains nothing (a control run)", COUNT)]
    adam_beta1: Annotated[float, Doc("decay of the first moment", DECAY)] = 0.9
    adam_beta2: Annotated[float, Doc("decay of the second moment", DECAY)] = 0.95
    adam_eps: Annotated[float, Doc("added to the root of the second moment", POSITIVE)] = 1e-8
    weight_decay: Annotated[float, Doc("decoupled decay of matrices", COUNT)] = 0.0
    clip_grad: Annotated[float, Doc("largest gradient norm", POSITIVE)] = 1.0
    objective: Annotated[Objective, Doc("the loss")] = Objective.GSPO
    clip_low: Annotated[float, Doc("the ratio is clipped below 1 - clip_low", SHARE)] = 3e-4
    clip_high: Annotated[float, Doc("the ratio is clipped above 1 + clip_high", POSITIVE)] = 4e-4
    advantage_scale: Annotated[AdvantageScale, Doc("what centred rewards of a group are divided by")] = (
        AdvantageScale.STD
    )
    token_constant: Annotated[int, Doc("dr_grpo: what the sum over a rollout's tokens is divided by", NATURAL)] = 1024
    importance: Annotated[Importance, Doc("policy that ratios are taken against")] = Importance.BEHAVIOR
    importance_cap: Annotated[float, Doc("largest factor of an importance correction", POSITIVE)] = 2.0
    kl_coefficient: Annotated[float, Doc("weight of the KL to the policy the run began with", COUNT)] = 0.0
    mixed_versions: Annotated[MixedVersions, Doc("older tokens of a rollout that several versions sampled")] = (
        MixedVersions.KEEP
    )
    group_filter: Annotated[GroupFilter, Doc("groups that count in a batch; those left out are not replaced")] = (
        GroupFilter.NONE
    )
    segment_tokens: Annotated[int, Doc("longer rows are trained in segments of this size; 0: never", COUNT)] = 0
    micro_step_rollouts: Annotated[int, Doc("rollouts in a micro-step at most", NATURAL)] = 8
    micro_step_tokens: Annotated[int, Doc("tokens in a micro-step at most", NATURAL)] = 16384
    checkpoint_every_steps: Annotated[int, Doc("steps between checkpoints", NATURAL)] = 1
    keep_checkpoints: Annotated[int, Doc("newest checkpoints that are kept", NATURAL)] = 2
    threads: Annotated[int, Doc("CPU threads of a rank", NATURAL)] = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSettings:
    """[schedule]: batches, staleness and when cells switch."""

    policy: Annotated[PolicyName, Doc("rule by which cells leave rollout")] = PolicyName.WATERLEVEL
    groups_per_batch: Annotated[int, Doc("groups (tasks) that a step trains: B", NATURAL)]
    rollouts_per_group: Annotated[int, Doc("rollouts of one task: G", Range(at_least=2))]
    staleness: Annotated[float, Doc("batches dispatched ahead, may be a fraction: phi", COUNT)] = 0.0
    cell_capacity: Annotated[int, Doc("rollouts that a cell carries at once: C_e", NATURAL)]
    training_cells: Annotated[int, Doc("cells that only train, for the async policies; 0: half of them", COUNT)] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    """[sampling]: how turns are sampled, and which paths of a tree are trained."""

    temperature: Annotated[float, Doc("1 samples the policy itself", COUNT)] = 1.0
    top_p: Annotated[float, Doc("nucleus; 1 keeps all tokens", Range(above=0, at_most=1))] = 1.0
    max_turn_tokens: Annotated[int, Doc("output tokens of one turn at most", NATURAL)] = 1024
    max_paths: Annotated[int, Doc("paths of a rollout's tree that are trained: J_max", NATURAL)] = 5
    path_priority: Annotated[tuple[PathRole, ...], Doc("order in which classes of leaves are sampled")] = (
        PathRole.MAIN,
        PathRole.SUB_AGENT,
        PathRole.MAIN_SUMMARY,
        PathRole.SUB_AGENT_SUMMARY,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSettings:
    """[rollout]: the harness and what runs around it."""

    harness: Annotated[HarnessName, Doc("agent program that drives a rollout")] = HarnessName.MINI_SWE_AGENT
    harness_config: Annotated[Path | None, Doc("the harness's own configuration file")] = None
    grading_retries: Annotated[int, Doc("tries after a failed grading before the rollout is dropped", COUNT)] = 2
    concurrent_gradings: Annotated[int, Doc("gradings at once on a node", NATURAL)] = 4
    concurrent_starts: Annotated[int, Doc("sandbox starts at once on a node", NATURAL)] = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TasksSettings:
    """[tasks]: folders of tasks in Harbor format."""

    train: Annotated[Path, Doc("folder of training tasks")]
    held_out: Annotated[Path | None, Doc("folder of tasks that are only evaluated")] = None
    eval_rollouts: Annotated[int, Doc("rollouts evaluated before and after training", COUNT)] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSettings:
    """[sandbox]: limits of one rollout's sandbox."""

    memory_mb: Annotated[int, Doc("memory", NATURAL)] = 512
    processes: Annotated[int, Doc("processes and threads", NATURAL)] = 64
    disk_mb: Annotated[int, Doc("largest file and workspace", NATURAL)] = 64
    cpu_s: Annotated[int, Doc("CPU seconds of one process", NATURAL)] = 600
    folder: Annotated[Path | None, Doc("where sandboxes lie; none: the system's temporary folder")] = None
    gateway_port: Annotated[int, Doc("port of the gateway inside a sandbox", PORT)] = 8765


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """[gateway]: the only network of a sandbox."""

    ping_s: Annotated[float, Doc("pause between pings on a waiting stream", POSITIVE)] = 10.0
    body_limit_mb: Annotated[int, Doc("largest request body", NATURAL)] = 64
    models: Annotated[tuple[str, ...], Doc("names served besides the run's own; none: every name is")] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchSettings:
    """[watch]: screen and logs."""

    dashboard: Annotated[Dashboard, Doc("how the terminal shows the run")] = Dashboard.AUTO
    refresh_s: Annotated[float, Doc("pause between two pictures", POSITIVE)] = 0.5
    log_level: Annotated[LogLevel, Doc("least severe line that is written")] = LogLevel.INFO


@dataclass(frozen=True, slots=True, kw_only=True)
class StopSettings:
    """[stop]: how the run ends."""

    grace_s: Annotated[float, Doc("time for an orderly end before a hard one", POSITIVE)] = 10.0
    alone_s: Annotated[float, Doc("front and hands end when left alone this long", POSITIVE)] = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateSettings:
    """[simulate]: the cluster and the workload that `gyre.py simulate` assumes; a real run reads none of it."""

    median_s: Annotated[float, Doc("median rollout alone on a cell", POSITIVE)] = 1200.0
    sigma: Annotated[float, Doc("standard deviation of the logarithm of a rollout's seconds", COUNT)] = 0.9
    between_share: Annotated[float, Doc("share of that variance that lies between tasks", UNIT)] = 0.5
    limit_s: Annotated[float, Doc("time limit of a rollout, alone on a cell", POSITIVE)] = 7200.0
    tool_share: Annotated[float, Doc("share of a lone rollout's time spent in tools", DECAY)] = 0.3
    half_speed_rollouts: Annotated[float, Doc("further decoding rollouts that halve each one's speed", POSITIVE)] = 12.0
    train_ratio: Annotated[float, Doc("training cell-seconds for a second of lone rollout", POSITIVE)] = 0.02
    optimizer_s: Annotated[float, Doc("reduce gradients, apply the step, expose weights", COUNT)] = 20.0
    switch_to_training_s: Annotated[float, Doc("drain, release, join", COUNT)] = 8.52
    switch_to_rollout_s: Annotated[float, Doc("leave training until serving, without the pull", COUNT)] = 3.46
    pull_s: Annotated[float, Doc("an engine takes new weights", COUNT)] = 3.0
    kv_migration: Annotated[bool, Doc("a moved rollout takes its KV along; else its prefix is computed again")] = True
    move_s: Annotated[float, Doc("what a moved rollout loses with KV migration", COUNT)] = 5.0
    recompute_s: Annotated[float, Doc("what it loses without", COUNT)] = 60.0
    grading_s: Annotated[float, Doc("from a rollout's end to its score", COUNT)] = 30.0
    share_imbalance: Annotated[float, Doc("extra training time of fixed shares", COUNT)] = 0.05
    history_error: Annotated[float, Doc("sigma of the logarithmic error of lengths from history", COUNT)] = 0.3
    harness_crash_share: Annotated[float, Doc("share of rollouts whose harness crashes on the way", UNIT)] = 0.0
    cell_loss_hours: Annotated[float, Doc("mean hours until a cell is lost; 0: never", COUNT)] = 0.0
    restart_s: Annotated[float, Doc("from a lost cell until all serve again from the last step", COUNT)] = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSettings:
    """[cluster]: the machines that `gyre.py plan` plans for; a real run reads none of it."""

    nodes: Annotated[int, Doc("machines", NATURAL)] = 1
    gpus_per_node: Annotated[int, Doc("GPUs of a machine", NATURAL)] = 8
    gpu_memory_gb: Annotated[float, Doc("memory of a GPU, GiB", POSITIVE)] = 80.0
    reserve_gb: Annotated[float, Doc("of it for libraries, graphs and fragments, GiB", COUNT)] = 8.0
    network_gb_s: Annotated[float, Doc("network of one GPU, 10^9 bytes a second", POSITIVE)] = 50.0
    host_gb_s: Annotated[float, Doc("link of one GPU to host memory, 10^9 bytes a second", POSITIVE)] = 25.0
    release_s: Annotated[float, Doc("drain an engine, release its memory, join", COUNT)] = 5.0
    resume_s: Annotated[float, Doc("leave training and resume the engine", COUNT)] = 3.0
    rollout_tokens: Annotated[int, Doc("tokens of KV that a rollout holds", NATURAL)] = 65536


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
    simulate: SimulateSettings
    cluster: ClusterSettings

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
