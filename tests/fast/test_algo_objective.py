"""Every objective's weights are the derivative of its formula, written here a second time in plain floats."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.algo.objective import ObjectiveSettings, Targets, TokenWeights, batch_divisor, weigh
from gyre.config.choices import Importance, MixedVersions, Objective

SETTINGS = ObjectiveSettings(clip_low=0.2, clip_high=0.28, token_constant=7)
STEP = 1e-6


def loss_of(x: list[float], at: list[float], case: Targets, settings: ObjectiveSettings) -> float:
    """The loss at log-probs `x`; what a formula holds fixed (sg) is taken at `at`."""
    n, advantage, behavior = len(x), case.advantage, list(case.behavior)
    old, factor = list(behavior), [1.0] * n
    for t in range(n):
        is_old = settings.mixed_versions == "correct" and case.versions[t] != max(case.versions)
        if settings.importance == "truncated" or is_old:
            old[t] = at[t]
            factor[t] = min(settings.importance_cap, math.exp(at[t] - behavior[t]))

    def surrogate(ratio: float) -> float:
        bound = max(1 - settings.clip_low, min(1 + settings.clip_high, ratio))
        return min(ratio * advantage, bound * advantage)

    def sequence(members: list[int], t: int) -> float:
        """The sequence's ratio, through which only target t's log-prob may move (arXiv 2507.18071, section 4.3)."""
        fixed = math.exp(sum(at[u] - old[u] for u in members) / len(members))
        return fixed * math.exp(x[t] - at[t])

    total = 0.0
    for t in range(n):
        ratio = math.exp(x[t] - old[t])
        match settings.objective.value:
            case "gspo":
                term = surrogate(sequence(list(range(n)), t)) / n
            case "gspo_path":
                term = surrogate(sequence([u for u in range(n) if case.path[u] == case.path[t]], t)) / n
            case "grpo":
                term = surrogate(ratio) / n
            case "dr_grpo":
                term = surrogate(ratio) / settings.token_constant
            case "dapo" | "ppo":
                term = surrogate(ratio)
            case "cispo":
                term = min(math.exp(at[t] - old[t]), 1 + settings.clip_high) * advantage * x[t]
            case "reinforce":
                term = advantage * x[t]
        share = {"gspo": n, "gspo_path": n, "grpo": n, "dr_grpo": settings.token_constant}.get(settings.objective, 1)
        total -= factor[t] * term
        gap = case.reference[t] - x[t]
        total += settings.kl_coefficient * (math.exp(gap) - gap - 1) / share
    return total


def is_near_a_kink(case: Targets, settings: ObjectiveSettings) -> bool:
    gaps = np.asarray(case.logprobs) - np.asarray(case.behavior)
    ratios = [*np.exp(gaps), math.exp(gaps.mean())]
    ratios += [math.exp(gaps[np.asarray(case.path) == p].mean()) for p in set(case.path)]
    edges = (1 - settings.clip_low, 1 + settings.clip_high)
    return any(abs(ratio - edge) < 1e-4 for ratio in ratios for edge in edges)


def draw_case(seed: int) -> Targets:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 7))
    behavior = rng.normal(-2, 1, n)
    return Targets(
        logprobs=(behavior + rng.normal(0, 0.4, n)).tolist(),
        behavior=behavior.tolist(),
        advantage=float(rng.normal()),
        versions=rng.integers(3, 5, n).tolist(),
        path=np.sort(rng.integers(0, 3, n)).tolist(),
        reference=(behavior + rng.normal(0, 0.4, n)).tolist(),
    )


@pytest.mark.parametrize("objective", list(Objective))
@pytest.mark.parametrize("how", ["plain", "truncated", "correct", "kl"])
def test_weights_are_the_derivative_of_the_formula(objective: Objective, how: str) -> None:
    chosen = replace(SETTINGS, objective=objective)
    match how:
        case "truncated":
            chosen = replace(chosen, importance=Importance.TRUNCATED, importance_cap=1.2)
        case "correct":
            chosen = replace(chosen, mixed_versions=MixedVersions.CORRECT, importance_cap=1.2)
        case "kl":
            chosen = replace(chosen, kl_coefficient=0.3)
    for seed in range(12):
        case = draw_case(seed)
        if is_near_a_kink(case, chosen):
            continue
        found, at = weigh(case, chosen), list(case.logprobs)
        assert found.loss == pytest.approx(loss_of(at, at, case, chosen), abs=1e-12)
        for t in range(len(at)):
            above, below = list(at), list(at)
            above[t] += STEP
            below[t] -= STEP
            slope = (loss_of(above, at, case, chosen) - loss_of(below, at, case, chosen)) / (2 * STEP)
            assert found.weights[t] == pytest.approx(slope, abs=1e-8)


@settings(max_examples=30, deadline=None)
@given(gaps=st.lists(st.floats(-0.5, 0.5), min_size=1, max_size=6), advantage=st.floats(-2, 2))
def test_gspo_is_the_plain_formula_of_its_paper(gaps: list[float], advantage: float) -> None:
    """Without stopped gradients: min(s A, clip(s) A) of s as a function of all log-probs."""

    def loss(x: list[float]) -> float:
        s = math.exp(sum(x) / len(x))
        return -min(s * advantage, max(0.8, min(1.28, s)) * advantage)

    found = weigh(Targets(logprobs=gaps, behavior=[0.0] * len(gaps), advantage=advantage), SETTINGS)
    assert found.loss == pytest.approx(loss(gaps), abs=1e-12)
    if min(abs(found.ratio - 0.8), abs(found.ratio - 1.28)) > 1e-5:
        for t in range(len(gaps)):
            above, below = list(gaps), list(gaps)
            above[t] += STEP
            below[t] -= STEP
            assert found.weights[t] == pytest.approx((loss(above) - loss(below)) / (2 * STEP), abs=1e-8)


def weigh_one(now: float, then: float, advantage: float) -> TokenWeights:
    return weigh(Targets(logprobs=[now], behavior=[then], advantage=advantage), SETTINGS)


def test_only_the_side_that_would_pay_twice_is_clipped() -> None:
    assert weigh_one(-1, -3, 1).clipped and weigh_one(-3, -1, -1).clipped
    assert not weigh_one(-1, -3, -1).clipped and not weigh_one(-3, -1, 1).clipped


def test_gspo_on_policy_is_minus_advantage_over_targets() -> None:
    found = weigh(Targets(logprobs=[-1.0, -2.0], behavior=[-1.0, -2.0], advantage=0.5), SETTINGS)
    assert (found.weights.tolist(), found.ratio, found.clipped, found.loss) == ([-0.25, -0.25], 1.0, False, -0.5)


@pytest.mark.parametrize("objective", list(Objective))
def test_a_batch_trained_in_pieces_has_the_weights_of_the_whole_batch(objective: Objective) -> None:
    """The factor that only a whole batch knows is one number, applied when it closes."""
    chosen = replace(SETTINGS, objective=objective)
    cases = [draw_case(seed) for seed in range(5)]
    counts = [len(case.logprobs) for case in cases]
    divisor = batch_divisor(objective, len(cases), sum(counts))
    assert divisor == (sum(counts) if objective in ("dapo", "ppo", "cispo") else 5)
    whole = sum(weigh(case, chosen).loss for case in cases) / divisor
    streamed = 0.0
    for case in reversed(cases):
        streamed += weigh(case, chosen).loss
    assert streamed / divisor == pytest.approx(whole, abs=1e-12)


def test_masked_advantages_and_the_corrections_cap() -> None:
    case = replace(
        draw_case(3), logprobs=[-1.0, -1.0], behavior=[-3.0, -1.0], versions=[1, 2], reference=None, path=[0, 0]
    )
    found = weigh(case, replace(SETTINGS, mixed_versions=MixedVersions.CORRECT, objective=Objective.REINFORCE))
    assert found.weights.tolist() == [-2.0 * case.advantage, -case.advantage]
    assert found.correction == 1.5
