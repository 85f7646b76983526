"""Which ranks form which cell: a pure function of the ranks' facts and the settings, equal on every rank.

Cells are contiguous blocks of ranks in rank order, all with one layout; a cell's leader is its lowest rank, by
rule. The order in which facts arrive does not matter. Facts that do not fit raise `PlacementError` with the
ranks at fault. The memory estimate counts what is known before anything is built, and says what it leaves out.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from gyre.config.choices import DeviceChoice, Dtype
from gyre.config.schema import Settings
from gyre.errors import PlacementError
from gyre.types import Layout, RankFacts, Role

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class CellPlace:
    """One cell's ranks, in order; the leader is the first."""

    index: int
    ranks: tuple[int, ...]
    leader: int
    role: Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The world as every rank must see it. `hosts` and `local_ranks` are indexed by rank."""

    cells: tuple[CellPlace, ...]
    layout: Layout
    device: str
    hosts: tuple[str, ...]
    local_ranks: tuple[int, ...]

    @property
    def num_ranks(self) -> int:
        """Ranks of the world."""
        return len(self.hosts)

    @property
    def leaders(self) -> tuple[int, ...]:
        """The leader of each cell, in order of cells."""
        return tuple(cell.leader for cell in self.cells)

    def cell_of(self, rank: int) -> CellPlace:
        """The cell that a rank belongs to."""
        return self.cells[rank // len(self.cells[0].ranks)]

    def prefix_ranks(self, num_cells: int) -> tuple[int, ...]:
        """All ranks of the first `num_cells` cells: the members of a training prefix."""
        return tuple(rank for cell in self.cells[:num_cells] for rank in cell.ranks)

    def digest(self) -> str:
        """SHA-256 of the whole placement: equal on two ranks if and only if their placements are."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes a rank holds for weights, gradients and optimizer; not KV cache, activations or libraries."""

    engine_bytes: int
    satellite_bytes: int
    core_bytes: int


def plan_cells(settings: Settings) -> tuple[CellPlace, ...]:
    """The cells that the settings ask for."""
    width = settings.ranks_per_cell
    return tuple(
        CellPlace(
            index=index,
            ranks=tuple(range(index * width, (index + 1) * width)),
            leader=index * width,
            role=Role.CORE if index == 0 else Role.SATELLITE,
        )
        for index in range(settings.placement.num_cells)
    )


def place(facts: Sequence[RankFacts], settings: Settings) -> Placement:
    """The placement of these ranks. Raises PlacementError that names the ranks at fault."""
    ordered = sorted(facts, key=lambda fact: fact.rank)
    _check_world(ordered, settings)
    _check_alike(ordered, "device", lambda fact: fact.device_kind)
    for name in sorted({name for fact in ordered for name in fact.versions}):
        _check_alike(ordered, f"version of {name}", lambda fact, name=name: fact.versions.get(name, "none"))
    device, wanted = ordered[0].device_kind, settings.placement.device
    if wanted is not DeviceChoice.AUTO and device != wanted:
        raise PlacementError(
            f"placement.device is {wanted}, {_span([fact.rank for fact in ordered])} have {device}; "
            "change the setting or the nodes"
        )
    return Placement(
        cells=plan_cells(settings),
        layout=settings.layout,
        device=device,
        hosts=tuple(fact.host for fact in ordered),
        local_ranks=tuple(fact.local_rank for fact in ordered),
    )


def _check_world(ordered: Sequence[RankFacts], settings: Settings) -> None:
    """Ranks 0..n-1, each once, as many as the cells need."""
    given = [fact.rank for fact in ordered]
    wanted = settings.num_ranks
    twice = sorted({rank for rank in given if given.count(rank) > 1}) if len(set(given)) < len(given) else []
    if twice:
        raise PlacementError(f"{_span(twice)} reported their facts twice")
    missing = sorted(set(range(wanted)) - set(given))
    extra = sorted(set(given) - set(range(wanted)))
    if missing or extra:
        where = settings.placement
        trouble = f"missing: {_span(missing)}" if missing else f"too many: {_span(extra)}"
        raise PlacementError(
            f"{where.num_cells} cells x {settings.ranks_per_cell} ranks "
            f"(tp {where.tp} x pp {where.pp} x cp {where.cp}) need {wanted} ranks, "
            f"the world has {len(given)}; {trouble}; "
            f"start torchrun with {wanted} processes in all, or change [placement]"
        )


def _check_alike(ordered: Sequence[RankFacts], what: str, value: Callable[[RankFacts], str]) -> None:
    """Raise if the ranks differ in `value`, listing which ranks have which."""
    by_value: dict[str, list[int]] = {}
    for fact in ordered:
        by_value.setdefault(value(fact), []).append(fact.rank)
    if len(by_value) > 1:
        parts = "; ".join(f"{one} on {_span(ranks)}" for one, ranks in by_value.items())
        raise PlacementError(f"the ranks differ in {what}: {parts}")


def _span(ranks: Sequence[int]) -> str:
    """Sorted ranks as text, runs shortened: `rank 7`, `ranks 0-3, 7`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


def memory_estimate(params_bytes: int, settings: Settings) -> MemoryEstimate:
    """Bytes a rank, from `params_bytes`: the model's parameters in float32 (4 bytes each).

    Parameters divide over TP and PP; this counts every parameter as divisible, which embeddings and norms are
    not quite. The trainer holds float32 weights and gradients; the core also Adam's two moments and the snapshot
    it exposes. An engine of unknown dtype is counted as float32.
    """
    shard = -(-params_bytes // (settings.placement.tp * settings.placement.pp))
    engine = shard // 2 if settings.engine.dtype is Dtype.BFLOAT16 else shard
    return MemoryEstimate(engine_bytes=engine, satellite_bytes=2 * shard, core_bytes=5 * shard)


def describe_placement(settings: Settings, params_bytes: int | None = None) -> str:
    """The planned cells, ranks and layout as text, with the memory estimate if the parameters are known."""
    layout = settings.layout
    lines = [
        f"cells    {settings.placement.num_cells} x {settings.ranks_per_cell} ranks = {settings.num_ranks} ranks",
        f"layout   tp {layout.tp}, pp {layout.pp}, cp {layout.cp}, ep {layout.ep}; device {settings.placement.device}",
    ]
    lines += [
        f"cell {cell.index:<3} {_span(cell.ranks)}, leader {cell.leader}, {cell.role}" for cell in plan_cells(settings)
    ]
    if params_bytes is not None:
        estimate = memory_estimate(params_bytes, settings)
        lines += [
            f"model    {params_bytes // 4:,} parameters",
            "memory   a rank, only weights and what training keeps of them:",
            f"         engine {_mib(estimate.engine_bytes)}",
            f"         satellite trainer {_mib(estimate.satellite_bytes)}",
            f"         core trainer {_mib(estimate.core_bytes)}",
            "         not counted: KV cache, activations, libraries (about 1.9 GB a rank on CPU)",
        ]
    return "\n".join(lines)


def _mib(size: int) -> str:
    return f"{size / MIB:,.1f} MiB"
