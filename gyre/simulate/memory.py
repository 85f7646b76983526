"""Bytes of one GPU in both roles, from the model's shape and the layout of a cell. An estimate that says its parts.

In rollout a GPU holds its shard of the weights and the KV cache. In training a satellite holds weights,
gradients and activations; the core also Adam's float32 master weights and moments and the snapshot that it
exposes. Assumed: the engine gives all its memory back; the trainer's memory is free while the cell serves, with
the core's optimizer in host memory; activations are recomputed, one input a layer kept; logits are float32 and
sharded. Weights divide over TP and PP, experts over PP and the larger of EP and TP, optimizer state also over CP.
"""

from dataclasses import dataclass

from gyre.simulate.model import ModelShape
from gyre.types import Layout

GIB = 2**30
GRADIENT_BYTES = 4
OPTIMIZER_BYTES = 12
"""float32 master weight and two moments."""
LAYER_WORK = 34
"""Bytes a token and hidden unit that one recomputed layer works with (Korthikanti et al., arXiv 2205.05198)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of one GPU by kind; `kv` is what is left for KV in rollout."""

    weights: int
    gradients: int
    optimizer: int
    snapshot: int
    activations: int
    reserve: int
    kv: int
    kv_token: int
    """KV bytes of one token on one GPU."""

    @property
    def rollout(self) -> int:
        """Used while serving, without KV."""
        return self.weights + self.reserve

    @property
    def satellite(self) -> int:
        """Used while training."""
        return self.weights + self.gradients + self.activations + self.reserve

    @property
    def core(self) -> int:
        """Used by the core while training."""
        return self.satellite + self.optimizer + self.snapshot


def memory_of(
    shape: ModelShape, layout: Layout, *, weight_bytes: int, gpu_bytes: int, reserve_bytes: int, micro_step_tokens: int
) -> Memory:
    """The estimate; `kv` may be negative, which means that the weights alone do not fit."""
    dense = -(-shape.shared_params // (layout.tp * layout.pp))
    experts = -(-shape.expert_params // (layout.pp * max(layout.ep, layout.tp)))
    params = dense + experts
    tokens = -(-micro_step_tokens // (layout.tp * layout.cp))
    kept = tokens * shape.hidden * 2 * -(-shape.layers // layout.pp) * min(layout.pp, 2)
    activations = kept + tokens * shape.hidden * LAYER_WORK + tokens * shape.vocab * 4
    # A KV head is the least that a tensor-parallel rank can hold.
    kv_heads = -(-shape.kv_heads // layout.tp)
    weights = params * weight_bytes
    return Memory(
        weights=weights,
        gradients=params * GRADIENT_BYTES,
        optimizer=-(-params * OPTIMIZER_BYTES // layout.cp),
        snapshot=weights,
        activations=activations,
        reserve=reserve_bytes,
        kv=gpu_bytes - weights - reserve_bytes,
        kv_token=2 * -(-shape.layers // layout.pp) * kv_heads * shape.head_dim * weight_bytes,
    )


def capacity(memory: Memory, *, rollout_tokens: int, engines: int) -> int:
    """C_e: rollouts of `rollout_tokens` whose KV a cell of `engines` engines holds at once."""
    return max(memory.kv // (memory.kv_token * rollout_tokens), 0) * engines
