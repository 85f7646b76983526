"""What a replica reports of a micro-step and of a step.

Shapes: E targets of all rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gyre.algo.objective import TokenWeights
from gyre.algo.staleness import staleness
from gyre.types import TreeRow


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroStepStats:
    """Figures of one micro-step. `loss` is a sum before the batch's factor; gaps are |trainer - behaviour|.

    `clipped` counts the rollouts whose every target the clip has left without a gradient, `clipped_targets` the
    targets. `ratios` holds each rollout's geometric mean of pi / behaviour, `kl` the mean over targets of k3 to the
    reference, `entropy` a mean over targets in nats, `max_staleness` the age in versions of the oldest target.
    """

    num_targets: int = 0
    loss: float = 0.0
    max_logprob_gap: float = 0.0
    mean_logprob_gap: float = 0.0
    clipped: int = 0
    clipped_targets: int = 0
    kl: float = 0.0
    max_staleness: int = 0
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
    chosen: Sequence[TokenWeights],
    policy_version: int | None,
    *,
    entropy: float,
    seconds: float,
) -> MicroStepStats:
    """Figures of `rows` from the trainer's log-probs and each row's weights.

    The gaps are over the targets that `policy_version` sampled, over all if it is None.
    """
    gap_E = np.abs(values_E - np.concatenate([row.behavior_logprobs for row in rows]))
    versions_E = np.concatenate([row.versions for row in rows])
    oldest = 0
    if policy_version is not None:
        oldest = staleness(versions_E, policy_version)[1]
        gap_E = gap_E[versions_E == policy_version]
    return MicroStepStats(
        num_targets=len(values_E),
        loss=float(sum(choice.loss for choice in chosen)),
        max_logprob_gap=float(gap_E.max(initial=0.0)),
        mean_logprob_gap=float(gap_E.mean()) if len(gap_E) else 0.0,
        clipped=sum(choice.clipped for choice in chosen),
        clipped_targets=sum(choice.clipped_targets for choice in chosen),
        kl=sum(choice.kl * len(choice.weights) for choice in chosen) / len(values_E),
        max_staleness=oldest,
        ratios={row.rollout: float(choice.ratio) for row, choice in zip(rows, chosen, strict=True)},
        entropy=entropy,
        seconds=seconds,
    )
