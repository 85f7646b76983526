"""GSPO on a tree (arXiv 2507.18071, with the rollout as the sequence): constant weights on log-probs.

For one rollout with n trainable targets, l_t = log pi(t) - behavior log-prob(t) and advantage A:
    s = exp(sum_t l_t / n)        L = -min(s A, clip(s, 1 - low, 1 + high) A)
    dL / d log pi(t) = -A s [the minimum is the unclipped term] / n, the same for every t.
So one pass of log-probs fixes the weights, and the backward of sum_t weight_t log pi(t) has the gradient of
L, in any number of pieces. The mean over rollouts (1/N) is left to whoever knows N.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class GspoWeights:
    """`weights` has shape (n,), float64; `ratio` is s; `loss` is L before 1/N; `clipped`: the gradient is zero."""

    weights: NDArray[np.float64]
    ratio: float
    clipped: bool
    loss: float


def gspo_weights(
    logprobs: ArrayLike,
    behavior: ArrayLike,
    advantage: float,
    num_targets: int,
    clip_low: float,
    clip_high: float,
) -> GspoWeights:
    """The weights of one rollout from its log-probs and behavior log-probs, both of shape (num_targets,).

    All of the rollout's targets must be given, because its ratio is over all of them. A tie between the two
    terms of the minimum counts as unclipped: inside the clip range they are equal.
    """
    now = np.asarray(logprobs, dtype=np.float64)
    then = np.asarray(behavior, dtype=np.float64)
    assert now.shape == then.shape == (num_targets,) and num_targets > 0, (now.shape, then.shape, num_targets)
    mean = float((now - then).sum()) / num_targets
    assert np.isfinite(mean), "log-probs are not finite"
    ratio = float(np.exp(mean))
    unclipped_term = ratio * advantage
    clipped_term = min(max(ratio, 1.0 - clip_low), 1.0 + clip_high) * advantage
    is_clipped = clipped_term < unclipped_term
    weight = 0.0 if is_clipped else -unclipped_term / num_targets
    return GspoWeights(
        weights=np.full(num_targets, weight),
        ratio=ratio,
        clipped=is_clipped,
        loss=-min(unclipped_term, clipped_term),
    )
