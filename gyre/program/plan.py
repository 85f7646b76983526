"""`gyre.py plan CONFIG`: does the model fit the cluster, in which layouts, with how many cells and which staleness.

From the model's config.json and the [cluster] section: bytes a GPU by kind in both roles, the feasible layouts,
C_e as KV capacity, switch and pull times, and a recommendation found by simulation. What cannot fit is refused
with the number that breaks it. Estimates; docs/scheduling.md says what they assume.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

from gyre.config.choices import Dtype, PolicyName
from gyre.config.schema import Settings
from gyre.errors import ConfigError
from gyre.program.simulate import setting_of
from gyre.simulate.memory import GIB, Memory, capacity, memory_of
from gyre.simulate.model import ModelShape
from gyre.types import Layout

MOST_CELLS = 16
HALVINGS = 4
STALENESS = (0.0, 1.0, 2.0)
WORTH = 1.03
"""A smaller staleness is recommended if it costs no more than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A layout of a cell that fits, and what a run with it would take (seconds by staleness)."""

    layout: Layout
    num_cells: int
    memory: Memory
    cell_capacity: int
    seconds: dict[float, float]


def plan(settings: Settings, *, is_json: bool) -> int:
    """Print the plan."""
    shape = read_shape(settings)
    layouts = feasible(settings, shape)
    best = [_simulated(settings, one) for one in _best_by_cells(layouts)]
    chosen, staleness = recommend(best)
    if is_json:
        sys.stdout.write(json.dumps(_fields(settings, shape, layouts, best, chosen, staleness)) + "\n")
    else:
        sys.stdout.write(_text(settings, shape, layouts, best, chosen, staleness))
    return 0


def read_shape(settings: Settings) -> ModelShape:
    """The model's shape. Raises ConfigError if there is no config.json that can be read."""
    path = settings.model.path / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        fix = "name a Hugging Face folder; the weights need not be there"
        raise ConfigError("model.path", wanted="a folder with config.json", given=str(path), fix=fix) from error
    text = config.get("text_config", config)
    return ModelShape.of(text, source=str(path))


def _candidates(settings: Settings, shape: ModelShape) -> Iterator[Candidate]:
    """Every layout of powers of two that divides the model and the cluster, whether it fits or not."""
    cluster, step_tokens = settings.cluster, settings.trainer.micro_step_tokens
    num_gpus = cluster.nodes * cluster.gpus_per_node
    weight_bytes = 4 if settings.engine.dtype is Dtype.FLOAT32 else 2
    for tp in _powers(cluster.gpus_per_node):
        if shape.heads % tp:
            continue
        for pp in (one for one in range(1, min(shape.layers, num_gpus) + 1) if shape.layers % one == 0):
            for cp in _powers(8):
                ranks = tp * pp * cp
                if num_gpus % ranks or num_gpus // ranks > MOST_CELLS:
                    continue
                # Experts spread over as many of a stage's ranks as they divide into.
                ep = max(one for one in _powers(tp * cp) if shape.num_experts % one == 0) if shape.num_experts else 1
                layout = Layout(tp=tp, pp=pp, cp=cp, ep=ep)
                memory = memory_of(
                    shape,
                    layout,
                    weight_bytes=weight_bytes,
                    gpu_bytes=int(cluster.gpu_memory_gb * GIB),
                    reserve_bytes=int(cluster.reserve_gb * GIB),
                    micro_step_tokens=step_tokens,
                )
                room = capacity(memory, rollout_tokens=cluster.rollout_tokens, engines=cp)
                yield Candidate(
                    layout=layout, num_cells=num_gpus // ranks, memory=memory, cell_capacity=room, seconds={}
                )


def _powers(most: int) -> list[int]:
    return [1 << bit for bit in range(most.bit_length()) if 1 << bit <= most]


def feasible(settings: Settings, shape: ModelShape) -> list[Candidate]:
    """Those that fit in both roles. Raises ConfigError with the number that breaks the best of them if none does."""
    limit = int(settings.cluster.gpu_memory_gb * GIB)
    every = list(_candidates(settings, shape))
    if not every:
        gpus = settings.cluster.nodes * settings.cluster.gpus_per_node
        raise ConfigError(
            "cluster.nodes",
            wanted=f"GPUs that divide into at most {MOST_CELLS} cells of tp x pp x cp for {shape.layers} layers",
            given=gpus,
            fix="change the number of nodes",
        )
    good = [one for one in every if one.memory.core <= limit and one.cell_capacity >= 1]
    if good:
        return good
    nearest = min(every, key=lambda one: max(one.memory.core, one.memory.rollout + _one_rollout(settings, one)))
    memory, layout = nearest.memory, nearest.layout
    where = f"tp {layout.tp}, pp {layout.pp}, cp {layout.cp}, ep {layout.ep}"
    if memory.core > limit:
        raise ConfigError(
            "cluster.gpu_memory_gb",
            wanted=f"at least {memory.core / GIB:.1f} for the core in training ({where}: {_parts(memory)})",
            given=settings.cluster.gpu_memory_gb,
            fix="more nodes, a larger GPU, or fewer trainer.micro_step_tokens",
        )
    raise ConfigError(
        "cluster.gpu_memory_gb",
        wanted=f"at least {(memory.rollout + _one_rollout(settings, nearest)) / GIB:.1f} to serve one rollout of "
        f"{settings.cluster.rollout_tokens} tokens ({where}: {memory.kv / GIB:.1f} GiB are left for KV)",
        given=settings.cluster.gpu_memory_gb,
        fix="more nodes, a larger GPU, or fewer cluster.rollout_tokens",
    )


def _one_rollout(settings: Settings, one: Candidate) -> int:
    return one.memory.kv_token * settings.cluster.rollout_tokens


def _parts(memory: Memory) -> str:
    parts = ("weights", "gradients", "optimizer", "snapshot", "activations", "reserve")
    return ", ".join(f"{name} {getattr(memory, name) / GIB:.1f}" for name in parts)


def _best_by_cells(layouts: list[Candidate]) -> list[Candidate]:
    """For each number of cells the layout with most KV, of equals the one with least pipeline."""
    best: dict[int, Candidate] = {}
    for one in layouts:
        key = (one.cell_capacity, -one.layout.pp)
        old = best.get(one.num_cells)
        if old is None or key > (old.cell_capacity, -old.layout.pp):
            best[one.num_cells] = one
    return [best[cells] for cells in sorted(best)]


def switch_seconds(settings: Settings, memory: Memory) -> tuple[float, float, float]:
    """(to training, to rollout, pull): fixed parts of the published figures, and bytes over links.

    A pull moves one GPU's weights over its network link. Joining pulls once more; the core's optimizer comes from
    host memory over its own link, which is slower, and the larger of both counts.
    """
    cluster = settings.cluster
    pull = memory.weights / (cluster.network_gb_s * 1e9)
    state = memory.optimizer / (cluster.host_gb_s * 1e9)
    return cluster.release_s + max(pull, state), cluster.resume_s, pull


def _simulated(settings: Settings, one: Candidate) -> Candidate:
    """The run with this candidate's cells; speeds scale from those of the configured cell.

    KV room is the most that C_e can be. A smaller one keeps cells faster and in rollout for longer, so halves of it
    are tried at staleness 1.
    """
    scale = one.layout.num_ranks / settings.ranks_per_cell
    to_training, to_rollout, pull = switch_seconds(settings, one.memory)
    room = min(one.cell_capacity, settings.engine.max_running_requests * one.layout.cp)
    base = replace(
        settings,
        placement=replace(settings.placement, num_cells=one.num_cells),
        schedule=replace(settings.schedule, policy=PolicyName.WATERLEVEL),
        simulate=replace(
            settings.simulate,
            half_speed_rollouts=settings.simulate.half_speed_rollouts * scale,
            train_ratio=settings.simulate.train_ratio / scale,
            switch_to_training_s=to_training,
            switch_to_rollout_s=to_rollout,
            pull_s=pull,
        ),
    )
    settings_by_room = {
        room >> halvings: setting_of(replace(base, schedule=replace(base.schedule, cell_capacity=room >> halvings)))
        for halvings in range(HALVINGS)
        if room >> halvings >= 1
    }
    tried = {
        size: setting.run(PolicyName.WATERLEVEL, staleness=1.0).seconds for size, setting in settings_by_room.items()
    }
    best = min(tried, key=lambda size: tried[size])
    seconds = {eta: settings_by_room[best].run(PolicyName.WATERLEVEL, staleness=eta).seconds for eta in STALENESS}
    return replace(one, cell_capacity=best, seconds=seconds)


def recommend(candidates: list[Candidate]) -> tuple[Candidate, float]:
    """The fastest cells, and the least staleness that costs little."""
    best = min(candidates, key=lambda one: min(one.seconds.values()))
    limit = min(best.seconds.values()) * WORTH
    # Of all cells: a smaller staleness may prefer others.
    for staleness in STALENESS:
        one = min(candidates, key=lambda one: one.seconds[staleness])
        if one.seconds[staleness] <= limit:
            return one, staleness
    raise AssertionError("the best is within its own limit")


def toml_of(one: Candidate, staleness: float) -> str:
    """The settings that do it."""
    layout = one.layout
    return (
        f"[placement]\nnum_cells = {one.num_cells}\ntp = {layout.tp}\npp = {layout.pp}\ncp = {layout.cp}\n"
        f'ep = {layout.ep}\ndevice = "cuda"\n\n'
        f'[schedule]\npolicy = "waterlevel"\nstaleness = {staleness}\ncell_capacity = {one.cell_capacity}\n'
    )


def _text(
    settings: Settings,
    shape: ModelShape,
    layouts: list[Candidate],
    best: list[Candidate],
    chosen: Candidate,
    staleness: float,
) -> str:
    cluster = settings.cluster
    lines = [
        f"model     {shape.params / 1e9:.3f} B parameters, {shape.layers} layers"
        + (f", {shape.num_experts} experts" if shape.num_experts else ""),
        f"cluster   {cluster.nodes} nodes x {cluster.gpus_per_node} GPUs of {cluster.gpu_memory_gb:g} GiB; "
        f"{len(layouts)} layouts fit in both roles",
        "",
        f"{'cells':>6}{'ranks':>7}{'tp':>4}{'pp':>4}{'cp':>4}{'ep':>5}{'C_e':>6}{'core GiB':>10}{'KV GiB':>8}"
        f"{'to train':>10}{'pull':>7}" + "".join(f"{f'h at {eta:g}':>9}" for eta in STALENESS),
    ]
    for one in best:
        layout, memory = one.layout, one.memory
        to_training, _, pull = switch_seconds(settings, memory)
        lines.append(
            f"{one.num_cells:>6}{layout.num_ranks:>7}{layout.tp:>4}{layout.pp:>4}{layout.cp:>4}{layout.ep:>5}"
            f"{one.cell_capacity:>6}{memory.core / GIB:>10.1f}{memory.kv / GIB:>8.1f}{to_training:>8.1f} s"
            f"{pull:>5.1f} s" + "".join(f"{one.seconds[eta] / 3600:>9.2f}" for eta in STALENESS)
        )
    memory = chosen.memory
    lines += [
        "",
        "bytes a GPU, recommended layout (GiB):",
        f"  rollout    weights {memory.weights / GIB:.2f}, KV {memory.kv / GIB:.2f}, "
        f"reserve {memory.reserve / GIB:.2f}",
        f"  satellite  weights {memory.weights / GIB:.2f}, gradients {memory.gradients / GIB:.2f}, "
        f"activations {memory.activations / GIB:.2f}, reserve {memory.reserve / GIB:.2f}",
        f"  core       besides: optimizer {memory.optimizer / GIB:.2f}, snapshot {memory.snapshot / GIB:.2f}",
        "",
        f"recommended: {chosen.num_cells} cells at staleness {staleness:g}",
        "",
        toml_of(chosen, staleness),
    ]
    return "\n".join(lines)


def _fields(
    settings: Settings,
    shape: ModelShape,
    layouts: list[Candidate],
    best: list[Candidate],
    chosen: Candidate,
    staleness: float,
) -> dict[str, object]:
    def one_fields(one: Candidate) -> dict[str, object]:
        layout, memory = one.layout, one.memory
        to_training, to_rollout, pull = switch_seconds(settings, memory)
        names = ("weights", "gradients", "optimizer", "snapshot", "activations", "reserve", "kv")
        return {
            "num_cells": one.num_cells, "tp": layout.tp, "pp": layout.pp, "cp": layout.cp, "ep": layout.ep,
            "cell_capacity": one.cell_capacity, "switch_to_training_s": to_training,
            "switch_to_rollout_s": to_rollout, "pull_s": pull,
            "hours": {f"{eta:g}": seconds / 3600 for eta, seconds in one.seconds.items()},
            "bytes": {name: getattr(memory, name) for name in names},
        }  # fmt: skip

    return {
        "params": shape.params,
        "num_layouts": len(layouts),
        "by_cells": [one_fields(one) for one in best],
        "recommended": one_fields(chosen) | {"staleness": staleness, "toml": toml_of(chosen, staleness)},
    }
