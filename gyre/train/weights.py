"""Hugging Face names <-> megatron-core parameters of Qwen2, Qwen3 and Qwen3-MoE, their cuts and their stages.

One `Slot` a megatron parameter says which Hugging Face tensors it is made of and how tensor parallelism cuts
it. Everything here is a permutation or a slice: `split(join(x))` and `unshard(shard(x))` are exact, so the same
code carries Adam's moments. Megatron keeps queries, keys and values of one key-value group side by side and the
gate and up projections in one matrix; each of these is cut so that a rank holds whole groups and matching halves.
Experts are stacked in one parameter and cut between experts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from torch import Tensor

from gyre.train.model_config import ModelConfig


class Cut(StrEnum):
    """How tensor parallelism divides a parameter."""

    WHOLE = "whole"
    ROWS = "rows"
    COLUMNS = "columns"
    GATED_ROWS = "gated_rows"


class Form(StrEnum):
    """How the Hugging Face tensors of a parameter lie in it."""

    PLAIN = "plain"
    QKV = "qkv"
    GATED = "gated"
    EXPERTS = "experts"
    GATED_EXPERTS = "gated_experts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A megatron parameter, the Hugging Face tensors in it, how they lie there, its cut, and its pipeline stage.

    `is_copy` marks the last stage's copy of tied embeddings, which is loaded but never exported.
    """

    name: str
    hf_names: tuple[str, ...]
    cut: Cut
    form: Form = Form.PLAIN
    stage: int = 0
    is_copy: bool = False


def get_slots(config: ModelConfig, num_stages: int = 1) -> tuple[Slot, ...]:
    """Every parameter of the model, in the order of Hugging Face checkpoints."""
    last, layers = num_stages - 1, config.num_hidden_layers
    slots = [_slot("embedding.word_embeddings.weight", Cut.ROWS, "model.embed_tokens.weight")]
    for index in range(layers):
        stage = index * num_stages // layers
        of_layer = _layer_slots(config, f"decoder.layers.{index}.", f"model.layers.{index}.")
        slots += [replace(slot, stage=stage) for slot in of_layer]
    slots.append(replace(_slot("decoder.final_layernorm.weight", Cut.WHOLE, "model.norm.weight"), stage=last))
    if not config.tie_word_embeddings:
        slots.append(replace(_slot("output_layer.weight", Cut.ROWS, "lm_head.weight"), stage=last))
    elif last:
        copy = _slot("output_layer.weight", Cut.ROWS, "model.embed_tokens.weight")
        slots.append(replace(copy, stage=last, is_copy=True))
    return tuple(slots)


def get_stage_slots(config: ModelConfig, stage: int, num_stages: int) -> tuple[Slot, ...]:
    """The parameters that a stage holds."""
    return tuple(slot for slot in get_slots(config, num_stages) if slot.stage == stage)


def _slot(name: str, cut: Cut, *hf_names: str, form: Form = Form.PLAIN) -> Slot:
    return Slot(name=name, hf_names=hf_names, cut=cut, form=form)


def _layer_slots(config: ModelConfig, ours: str, theirs: str) -> list[Slot]:
    attention, mlp = theirs + "self_attn.", theirs + "mlp."
    slots = [_slot(ours + "input_layernorm.weight", Cut.WHOLE, theirs + "input_layernorm.weight")]
    for kind in ("weight", "bias") if config.has_qkv_bias else ("weight",):
        qkv = tuple(f"{attention}{part}_proj.{kind}" for part in "qkv")
        slots.append(_slot(f"{ours}self_attention.linear_qkv.{kind}", Cut.ROWS, *qkv, form=Form.QKV))
    if config.has_qk_norm:
        slots += [
            _slot(f"{ours}self_attention.{part}_layernorm.weight", Cut.WHOLE, f"{attention}{part}_norm.weight")
            for part in "qk"
        ]
    return [
        *slots,
        _slot(ours + "self_attention.linear_proj.weight", Cut.COLUMNS, attention + "o_proj.weight"),
        _slot(ours + "pre_mlp_layernorm.weight", Cut.WHOLE, theirs + "post_attention_layernorm.weight"),
        *(_expert_slots(config, ours, mlp) if config.num_experts else _dense_slots(ours, mlp)),
    ]


def _dense_slots(ours: str, mlp: str) -> list[Slot]:
    gated = (mlp + "gate_proj.weight", mlp + "up_proj.weight")
    return [
        _slot(ours + "mlp.linear_fc1.weight", Cut.GATED_ROWS, *gated, form=Form.GATED),
        _slot(ours + "mlp.linear_fc2.weight", Cut.COLUMNS, mlp + "down_proj.weight"),
    ]


def _expert_slots(config: ModelConfig, ours: str, mlp: str) -> list[Slot]:
    experts = [f"{mlp}experts.{index}." for index in range(config.num_experts)]
    gated = [f"{expert}{part}_proj.weight" for expert in experts for part in ("gate", "up")]
    return [
        _slot(ours + "mlp.router", Cut.WHOLE, mlp + "gate.weight"),
        _slot(ours + "mlp.fc1", Cut.ROWS, *gated, form=Form.GATED_EXPERTS),
        _slot(ours + "mlp.fc2", Cut.ROWS, *(e + "down_proj.weight" for e in experts), form=Form.EXPERTS),
    ]


def join(slot: Slot, tensors: Mapping[str, Tensor], config: ModelConfig) -> Tensor:
    """The whole megatron parameter of `slot`. Raises KeyError for a missing Hugging Face name."""
    parts = [tensors[name] for name in slot.hf_names]
    match slot.form:
        case Form.PLAIN:
            return parts[0]
        case Form.GATED:
            return torch.cat(parts)
        case Form.EXPERTS:
            return torch.stack(parts)
        case Form.GATED_EXPERTS:
            return torch.stack(parts).unflatten(0, (-1, 2)).flatten(1, 2)
        case Form.QKV:
            groups, tail = config.num_key_value_heads, parts[0].shape[1:]
            return torch.cat([part.reshape(groups, -1, *tail) for part in parts], dim=1).reshape(-1, *tail)


def split(slot: Slot, whole: Tensor, config: ModelConfig) -> list[tuple[str, Tensor]]:
    """The Hugging Face tensors of a whole megatron parameter: the inverse of `join`. Contiguous."""
    match slot.form:
        case Form.PLAIN:
            parts: Sequence[Tensor] = (whole,)
        case Form.GATED:
            parts = whole.chunk(2)
        case Form.EXPERTS:
            parts = whole.unbind()
        case Form.GATED_EXPERTS:
            parts = whole.unflatten(1, (2, -1)).flatten(0, 1).unbind()
        case Form.QKV:
            groups, dim, tail = config.num_key_value_heads, config.head_dim, whole.shape[1:]
            heads_per_group = config.num_attention_heads // groups
            sizes = [heads_per_group * dim, dim, dim]
            parts = [p.reshape(-1, *tail) for p in whole.view(groups, -1, *tail).split(sizes, dim=1)]
    return [(name, part.contiguous()) for name, part in zip(slot.hf_names, parts, strict=True)]


def shard(whole: Tensor, cut: Cut, rank: int, size: int) -> Tensor:
    """The piece of a whole parameter that tensor-parallel rank `rank` of `size` holds."""
    match cut:
        case Cut.WHOLE:
            return whole
        case Cut.ROWS:
            return whole.chunk(size)[rank]
        case Cut.COLUMNS:
            return whole.chunk(size, dim=1)[rank]
        case Cut.GATED_ROWS:
            return torch.cat([half.chunk(size)[rank] for half in whole.chunk(2)])


def unshard(pieces: Sequence[Tensor], cut: Cut) -> Tensor:
    """The whole parameter from the pieces of all tensor-parallel ranks: the inverse of `shard`."""
    match cut:
        case Cut.WHOLE:
            return pieces[0]
        case Cut.ROWS:
            return torch.cat(list(pieces))
        case Cut.COLUMNS:
            return torch.cat(list(pieces), dim=1)
        case Cut.GATED_ROWS:
            halves = [piece.chunk(2) for piece in pieces]
            return torch.cat([half[0] for half in halves] + [half[1] for half in halves])


def get_hf_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every Hugging Face tensor of the model."""
    hidden, dim = config.hidden_size, config.head_dim
    inner = config.moe_intermediate_size or config.intermediate_size
    q_size, kv_size = config.num_attention_heads * dim, config.num_key_value_heads * dim
    by_suffix: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (config.vocab_size, hidden),
        "lm_head.weight": (config.vocab_size, hidden),
        "q_proj.weight": (q_size, hidden),
        "k_proj.weight": (kv_size, hidden),
        "v_proj.weight": (kv_size, hidden),
        "q_proj.bias": (q_size,),
        "k_proj.bias": (kv_size,),
        "v_proj.bias": (kv_size,),
        "q_norm.weight": (dim,),
        "k_norm.weight": (dim,),
        "o_proj.weight": (hidden, q_size),
        "gate.weight": (config.num_experts, hidden),
        "gate_proj.weight": (inner, hidden),
        "up_proj.weight": (inner, hidden),
        "down_proj.weight": (hidden, inner),
        "norm.weight": (hidden,),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    names = [name for slot in get_slots(config) for name in slot.hf_names]
    return {name: by_suffix[".".join(name.split(".")[-2:])] for name in names}


def make_random_tensors(config: ModelConfig, seed: int) -> dict[str, Tensor]:
    """Hugging Face tensors of an untrained model: normal(0, initializer_range), norms 1, biases 0.

    A function of (config, seed) alone: the layout does not change it.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in get_hf_shapes(config).items():
        if name.endswith("norm.weight"):
            tensors[name] = torch.ones(shape)
        elif name.endswith(".bias"):
            tensors[name] = torch.zeros(shape)
        else:
            tensors[name] = torch.randn(shape, generator=generator) * config.initializer_range
    return tensors
