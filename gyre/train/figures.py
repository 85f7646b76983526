"""What a replica reports of a micro-step and of a step.

Shapes: E targets of all rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gyre.algo.objective import GspoWeights
from gyre.types import TreeRow


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroStepStats:
    """Figures of one micro-step. `loss` is the sum over rollouts before 1/N; gaps are |trainer - behaviour|.

    `clipped` counts rollouts, `ratios` holds each one's s_i, `entropy` is a mean over targets in nats.
    """

    num_targets: int = 0
    loss: float = 0.0
    max_logprob_gap: float = 0.0
    mean_logprob_gap: float = 0.0
    clipped: int = 0
    ratios: dict[str, float]
    entropy: float = 0.0
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyStats:
    """`grad_norm` is that of the scaled gradient before clipping; `is_applied` False means no weight moved."""

    grad_norm: float
    is_applied: bool
    seconds: float


def make_stats(
    rows: Sequence[TreeRow],
    values_E: NDArray[np.floating],
    chosen: Sequence[GspoWeights],
    policy_version: int | None,
    *,
    entropy: float,
    seconds: float,
) -> MicroStepStats:
    """Figures of `rows` from the trainer's log-probs and each row's GSPO weights.

    The gaps are over the targets that `policy_version` sampled, over all if it is None.
    """
    gap_E = np.abs(values_E - np.concatenate([row.behavior_logprobs for row in rows]))
    if policy_version is not None:
        gap_E = gap_E[np.concatenate([row.versions for row in rows]) == policy_version]
    return MicroStepStats(
        num_targets=len(values_E),
        loss=float(sum(choice.loss for choice in chosen)),
        max_logprob_gap=float(gap_E.max(initial=0.0)),
        mean_logprob_gap=float(gap_E.mean()) if len(gap_E) else 0.0,
        clipped=sum(bool(choice.clipped) for choice in chosen),
        ratios={row.rollout: float(choice.ratio) for row, choice in zip(rows, chosen, strict=True)},
        entropy=entropy,
        seconds=seconds,
    )
