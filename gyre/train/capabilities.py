"""What the trainer can do, checked at start: model family, layout, settings. Without torch.

A combination that is not supported is refused with the reason and the nearest one that is. Nearest means: as many
ranks a cell if possible, then the fewest factors of two away.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from gyre.errors import ConfigError
from gyre.train.model_config import ModelConfig
from gyre.types import Layout

CPU_TESTED = (
    ("qwen2, qwen3", Layout()),
    ("qwen3", Layout(tp=2)),
    ("qwen3", Layout(pp=2)),
    ("qwen3", Layout(tp=2, pp=2)),
    ("qwen3_moe", Layout()),
    ("qwen3_moe", Layout(tp=2, ep=2)),
    ("qwen3_moe", Layout(pp=2)),
)
"""Layouts whose gradients are compared with one rank's in tests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a layout is refused: the setting at fault, what it should be, and the reason."""

    key: str
    wanted: str
    given: int


def check_layout(config: ModelConfig, layout: Layout) -> None:
    """Raises ConfigError for a layout that the trainer cannot give this model."""
    refusal = refuse(config, layout)
    if refusal is not None:
        near = find_nearest(config, layout)
        fix = f"nearest supported layout: tp = {near.tp}, pp = {near.pp}, cp = {near.cp}, ep = {near.ep}"
        raise ConfigError(refusal.key, wanted=refusal.wanted, given=refusal.given, fix=fix)


def refuse(config: ModelConfig, layout: Layout) -> Refusal | None:
    """The first reason against `layout`, if there is one."""
    if layout.cp != 1:
        return Refusal(
            key="placement.cp",
            wanted="1 (megatron-core's local attention has no context parallelism; trees that do not fit are "
            "trained with trainer.segment_tokens)",
            given=layout.cp,
        )
    if config.num_hidden_layers % layout.pp:
        wanted = f"a divisor of the model's num_hidden_layers ({config.num_hidden_layers})"
        return Refusal(key="placement.pp", wanted=wanted, given=layout.pp)
    names = ["vocab_size", "num_attention_heads", "num_key_value_heads"]
    names += ["num_experts"] if config.num_experts else ["intermediate_size"]
    for name in names:
        if getattr(config, name) % layout.tp:
            wanted = f"a divisor of the model's {name} ({getattr(config, name)})"
            return Refusal(key="placement.tp", wanted=wanted, given=layout.tp)
    if not config.num_experts and layout.ep != 1:
        return Refusal(key="placement.ep", wanted="1 (the model has no experts)", given=layout.ep)
    if config.num_experts and layout.ep != layout.tp:
        wanted = f"tp ({layout.tp}), since experts are divided over the tensor-parallel ranks and nothing else"
        return Refusal(key="placement.ep", wanted=wanted, given=layout.ep)
    return None


def find_nearest(config: ModelConfig, layout: Layout) -> Layout:
    """The supported layout nearest to `layout`."""

    def distance(other: Layout) -> tuple[int, float]:
        pairs = ((layout.tp, other.tp), (layout.pp, other.pp), (layout.cp, other.cp), (layout.ep, other.ep))
        return abs(layout.num_ranks - other.num_ranks), sum(abs(math.log2(a / b)) for a, b in pairs)

    return min(_supported(config, layout.num_ranks), key=distance)


def _supported(config: ModelConfig, num_ranks: int) -> Iterator[Layout]:
    sizes = range(1, num_ranks + 1)
    for tp, pp in product(sizes, sizes):
        layout = Layout(tp=tp, pp=pp, ep=tp if config.num_experts else 1)
        if layout.num_ranks <= num_ranks and refuse(config, layout) is None:
            yield layout


def describe_training(config: ModelConfig, layout: Layout) -> str:
    """One line for `gyre.py check`. Raises ConfigError for a layout that is refused."""
    check_layout(config, layout)
    is_tested = any(config.model_type in families.split(", ") and layout == tested for families, tested in CPU_TESTED)
    sizes = f"tp {layout.tp}, pp {layout.pp}, cp {layout.cp}, ep {layout.ep}"
    return f"training: {config.model_type} with {sizes}, {'tested on CPU' if is_tested else 'supported, not in tests'}"
