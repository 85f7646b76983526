"""All loss math: each objective as constant weights on the log-probs of one rollout's targets.

The trainer computes log-probs once, asks for weights, and the backward of sum_t weight_t log pi(t) has the
gradient of the loss, in any number of pieces. Weights are absolute: what a rollout knows of itself (advantage,
ratios, n) is in them, and what only a whole batch knows is one factor, applied once by whoever closes the batch:
    1 / N           N rollouts of the batch: gspo, gspo_path, grpo, dr_grpo, reinforce
    1 / sum_i n_i   its targets ("token mean"): dapo, cispo, ppo
so streaming, packing and the number of cells never change the gradient.

One rollout: targets t = 1..n, advantage A, r_t = pi(t) / old(t); `old` is the behaviour policy that sampled t, or
the proximal policy (weights at the start of the step). clip is to [1 - low, 1 + high], sg stops the gradient.
    gspo       -1/n sum_t min(s A, clip(s) A),      s = (prod_t r_t)^(1/n)      arXiv 2507.18071 on the rollout
    gspo_path  the same with one s for each path of the rollout's tree (its own targets)
    grpo       -1/n sum_t min(r_t A, clip(r_t) A)                               arXiv 2402.03300
    dr_grpo    -1/L sum_t min(r_t A, clip(r_t) A),  L a constant, A not scaled  arXiv 2503.20783
    dapo, ppo  -sum_t min(r_t A, clip(r_t) A)         arXiv 2503.14476 (high > low), arXiv 1707.06347
    cispo      -sum_t sg(min(r_t, 1 + high)) A log pi(t)                        arXiv 2506.13585
    reinforce  -sum_t A log pi(t), the group's mean as baseline                 Williams 1992
Truncated importance (arXiv 2110.00641, decoupled; truncation as in IMPALA, arXiv 1802.01561): for the targets
concerned `old` is the proximal policy and their terms are multiplied by sg(min(cap, proximal / behaviour)).
KL to a frozen reference: + beta k3_t, k3 = ref/pi - ln(ref/pi) - 1, under the objective's own mean (joschu.net/blog/
kl-approx.html; arXiv 2402.03300, equation 4).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gyre.config.choices import Importance, MixedVersions, Objective

Float64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveSettings:
    """The objective and its parameters; `token_constant` is L of dr_grpo, `importance_cap` bounds the correction."""

    objective: Objective = Objective.GSPO
    clip_low: float
    clip_high: float
    token_constant: int = 1024
    importance: Importance = Importance.BEHAVIOR
    importance_cap: float = 2.0
    mixed_versions: MixedVersions = MixedVersions.KEEP
    kl_coefficient: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """All targets of one rollout; every array has shape (n,).

    `versions` are the policy versions that sampled them. `path` names the path each belongs to (gspo_path only).
    `proximal` is None where the weights are still those of the step's start: then it equals `logprobs`.
    """

    logprobs: ArrayLike
    behavior: ArrayLike
    advantage: float
    versions: ArrayLike | None = None
    path: ArrayLike | None = None
    proximal: ArrayLike | None = None
    reference: ArrayLike | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenWeights:
    """`weights` (n,) are dL/dlogprob and `loss` is L, both before the batch's factor.

    `ratio` is the geometric mean of pi / behaviour over the rollout, `clipped_targets` how many targets the clip has
    left without a gradient, `correction` the mean importance factor, `kl` the mean k3 in nats.
    """

    weights: Float64
    loss: float
    ratio: float
    clipped_targets: int
    correction: float = 1.0
    kl: float = 0.0

    @property
    def clipped(self) -> bool:
        """Whether the clip has taken the gradient of every target."""
        return self.clipped_targets == len(self.weights)


def is_token_mean(objective: Objective) -> bool:
    """Whether a batch is divided by its targets rather than by its rollouts."""
    return objective in (Objective.DAPO, Objective.CISPO, Objective.PPO)


def batch_divisor(objective: Objective, num_rollouts: int, num_targets: int) -> int:
    """What the sums of a whole batch are divided by when it closes: all of its rollouts, or all of their targets."""
    return num_targets if is_token_mean(objective) else num_rollouts


def weigh(targets: Targets, settings: ObjectiveSettings) -> TokenWeights:
    """The weights of one rollout, float64. All of its targets must be given, for ratios and means are over them."""
    now, behavior = _vector(targets.logprobs), _vector(targets.behavior)
    assert now.shape == behavior.shape and len(now) > 0, (now.shape, behavior.shape)
    assert np.isfinite(now).all() and np.isfinite(behavior).all(), "log-probs are not finite"
    old, factor = _importance(targets, now, behavior, settings)
    surrogate = _surrogate(targets, now, now - old, settings)
    divisor = _divisor(settings, len(now))
    weights = -(factor * surrogate.slope) / divisor
    loss = -float((factor * surrogate.value).sum()) / divisor
    kl = 0.0
    if targets.reference is not None and settings.kl_coefficient:
        gap = _vector(targets.reference) - now
        weights = weights + settings.kl_coefficient * (1.0 - np.exp(gap)) / divisor
        k3 = np.exp(gap) - gap - 1.0
        loss += settings.kl_coefficient * float(k3.sum()) / divisor
        kl = float(k3.mean())
    return TokenWeights(
        weights=weights,
        loss=loss,
        ratio=float(np.exp((now - behavior).sum() / len(now))),
        clipped_targets=int(surrogate.clipped.sum()),
        correction=float(factor.mean()),
        kl=kl,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Surrogate:
    """Of each target: its term (to be maximised), the term's derivative by its log-prob, and whether it is clipped."""

    value: Float64
    slope: Float64
    clipped: NDArray[np.bool_]


def _surrogate(targets: Targets, now: Float64, gap: Float64, settings: ObjectiveSettings) -> _Surrogate:
    advantage, low, high = targets.advantage, settings.clip_low, settings.clip_high
    match settings.objective:
        case Objective.GSPO:
            return _clipped(np.full(len(gap), np.exp(gap.sum() / len(gap))), advantage, low, high)
        case Objective.GSPO_PATH:
            assert targets.path is not None, "gspo_path needs the path of each target"
            return _clipped(np.exp(_means(gap, np.asarray(targets.path))), advantage, low, high)
        case Objective.GRPO | Objective.DR_GRPO | Objective.DAPO | Objective.PPO:
            return _clipped(np.exp(gap), advantage, low, high)
        case Objective.CISPO:
            slope = np.minimum(np.exp(gap), 1.0 + high) * advantage
            return _Surrogate(value=slope * now, slope=slope, clipped=np.zeros(len(gap), bool))
        case Objective.REINFORCE:
            slope = np.full(len(gap), advantage, np.float64)
            return _Surrogate(value=slope * now, slope=slope, clipped=np.zeros(len(gap), bool))


def _clipped(ratio: Float64, advantage: float, low: float, high: float) -> _Surrogate:
    """min(r A, clip(r) A). A tie counts as unclipped: inside the clip range both terms are equal.

    A ratio of several targets is their geometric mean; as each term holds it once, a term's derivative by the
    log-prob of one target, summed over the terms, is again r A.
    """
    free, bound = ratio * advantage, np.minimum(np.maximum(ratio, 1.0 - low), 1.0 + high) * advantage
    clipped = bound < free
    return _Surrogate(value=np.minimum(free, bound), slope=np.where(clipped, 0.0, free), clipped=clipped)


def _means(values: Float64, group: NDArray[np.integer]) -> Float64:
    """The mean of `values` over the members of each one's group, shape (n,)."""
    _, index = np.unique(group, return_inverse=True)
    return (np.bincount(index, values) / np.bincount(index))[index]


def _importance(
    targets: Targets, now: Float64, behavior: Float64, settings: ObjectiveSettings
) -> tuple[Float64, Float64]:
    """(log-probs of the old policy, factor) of each target."""
    if settings.importance is Importance.TRUNCATED:
        concerned = np.ones(len(now), bool)
    elif settings.mixed_versions is MixedVersions.CORRECT and targets.versions is not None:
        concerned = np.asarray(targets.versions) != np.max(targets.versions)
    else:
        return behavior, np.ones(len(now))
    proximal = now if targets.proximal is None else _vector(targets.proximal)
    factor = np.minimum(settings.importance_cap, np.exp(proximal - behavior))
    return np.where(concerned, proximal, behavior), np.where(concerned, factor, 1.0)


def _divisor(settings: ObjectiveSettings, num_targets: int) -> int:
    match settings.objective:
        case Objective.GSPO | Objective.GSPO_PATH | Objective.GRPO:
            return num_targets
        case Objective.DR_GRPO:
            return settings.token_constant
        case Objective.DAPO | Objective.PPO | Objective.CISPO | Objective.REINFORCE:
            return 1


def _vector(values: ArrayLike) -> Float64:
    return np.asarray(values, dtype=np.float64)
