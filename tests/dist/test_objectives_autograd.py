"""Every objective against autograd in fp64: the published loss on tensors, stopped gradients as `detach`."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gyre.algo.objective import ObjectiveSettings, Targets, batch_divisor, weigh
from gyre.config.choices import Importance, Objective

SETTINGS = ObjectiveSettings(clip_low=0.2, clip_high=0.28, token_constant=11, importance_cap=1.3)


def loss_of(logprobs: Any, case: Targets, settings: ObjectiveSettings) -> Any:
    """One rollout's loss before the batch's divisor."""
    import torch

    n, advantage = len(logprobs), case.advantage
    behavior, reference = torch.tensor(case.behavior), torch.tensor(case.reference)
    path = torch.tensor(case.path)
    old, factor = behavior, torch.ones(n, dtype=torch.float64)
    if settings.importance is Importance.TRUNCATED:
        old = logprobs.detach()
        factor = (old - behavior).exp().clamp(max=settings.importance_cap)
    gap = logprobs - old
    low, high = 1 - settings.clip_low, 1 + settings.clip_high

    def surrogate(ratio: Any) -> Any:
        return torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)

    def sequence(members: Any) -> Any:
        # GSPO-token: the value of the sequence's ratio, the gradient of each token's own (section 4.3).
        return gap[members].mean().detach().exp() * (logprobs - logprobs.detach())[members].exp()

    everything, share = torch.arange(n), float(n)
    match settings.objective:
        case Objective.GSPO:
            terms = surrogate(sequence(everything))
        case Objective.GSPO_PATH:
            terms = torch.empty(n, dtype=torch.float64)
            for one in path.unique():
                members = everything[path == one]
                terms = terms.index_copy(0, members, surrogate(sequence(members)))
        case Objective.GRPO:
            terms = surrogate(gap.exp())
        case Objective.DR_GRPO:
            terms, share = surrogate(gap.exp()), float(settings.token_constant)
        case Objective.DAPO | Objective.PPO:
            terms, share = surrogate(gap.exp()), 1.0
        case Objective.CISPO:
            terms, share = gap.exp().clamp(max=high).detach() * advantage * logprobs, 1.0
        case Objective.REINFORCE:
            terms, share = advantage * logprobs, 1.0
    to_reference = reference - logprobs
    kl = to_reference.exp() - to_reference - 1
    return (-(factor * terms) + settings.kl_coefficient * kl).sum() / share


@pytest.mark.parametrize("objective", list(Objective))
@pytest.mark.parametrize("importance", list(Importance))
def test_a_batchs_weights_are_autograds_gradient(objective: Objective, importance: Importance) -> None:
    import torch

    rng = np.random.default_rng(5)
    chosen = replace(SETTINGS, objective=objective, importance=importance, kl_coefficient=0.1)
    cases, tensors = [], []
    for _ in range(12):
        n = int(rng.integers(1, 30))
        behavior = rng.normal(-2, 1, n)
        logprobs = behavior + rng.normal(0, 0.4, n)
        cases.append(
            Targets(
                logprobs=logprobs,
                behavior=behavior,
                advantage=float(rng.normal()),
                path=np.sort(rng.integers(0, 3, n)),
                reference=behavior + rng.normal(0, 0.4, n),
            )
        )
        tensors.append(torch.tensor(logprobs, requires_grad=True))
    divisor = batch_divisor(objective, len(cases), sum(len(x) for x in tensors))
    loss = sum(loss_of(x, case, chosen) for x, case in zip(tensors, cases, strict=True)) / divisor
    loss.backward()
    found = [weigh(case, chosen) for case in cases]
    assert sum(one.loss for one in found) / divisor == pytest.approx(float(loss), abs=1e-12)
    for one, x in zip(found, tensors, strict=True):
        assert np.abs(one.weights / divisor - x.grad.numpy()).max() < 1e-14


@pytest.mark.parametrize("num_paths", [1, 3])
def test_gspo_needs_no_stopped_gradient(num_paths: int) -> None:
    """The plain sequence loss of each path, weighted by its share of the targets, has the same gradient."""
    import torch

    rng = np.random.default_rng(num_paths)
    behavior, path = rng.normal(-2, 1, 20), np.sort(rng.integers(0, num_paths, 20))
    x = torch.tensor(behavior + rng.normal(0, 0.2, 20), requires_grad=True)
    loss = torch.zeros((), dtype=torch.float64)
    for one in np.unique(path):
        members = torch.tensor(np.flatnonzero(path == one))
        s = (x[members] - torch.tensor(behavior)[members]).mean().exp()
        loss = loss - torch.minimum(s * 0.7, s.clamp(0.8, 1.28) * 0.7) * len(members) / 20
    loss.backward()
    case = Targets(logprobs=x.detach().numpy(), behavior=behavior, advantage=0.7, path=path)
    objective = Objective.GSPO if num_paths == 1 else Objective.GSPO_PATH
    assert np.abs(weigh(case, replace(SETTINGS, objective=objective)).weights - x.grad.numpy()).max() < 1e-15
