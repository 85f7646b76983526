"""What a replica is told of the optimizer. Values come from the configuration's [trainer]."""

from dataclasses import dataclass

import torch
from megatron.core.optimizer import OptimizerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """Adam with decoupled weight decay, after the gradient is clipped to norm `clip_grad` (0: never)."""

    learning_rate: float
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 1.0


def make_optimizer_config(settings: OptimizerSettings) -> OptimizerConfig:
    """Megatron's Adam in fp32. It does not clip: the replica must know the norm before anything moves."""
    return OptimizerConfig(
        optimizer="adam",
        lr=settings.learning_rate,
        min_lr=0.0,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.adam_beta1,
        adam_beta2=settings.adam_beta2,
        adam_eps=settings.adam_eps,
        clip_grad=0.0,
        params_dtype=torch.float32,
    )
