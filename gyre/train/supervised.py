"""Supervised warm-up of a policy: a weighted negative log-likelihood on plain sequences.

It shares the replica's forward, gradient sums and optimizer, so that a policy is warmed up by the code that
trains it later. A step is `begin_step`, some `nll_micro_step`, `apply(1)`; whoever calls it chooses weights that
already sum to what a step should be (1 / number of trained tokens for a mean).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gyre.train.replica import Replica
from gyre.types import Float32, Int32, TreeRow


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedRow:
    """One sequence. `weights[t]` is the weight of predicting `tokens[t]` from what precedes it; weights[0] is 0."""

    tokens: Int32
    weights: Float32

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.weights) > 0, (len(self.tokens), len(self.weights))
        assert self.weights[0] == 0.0, "nothing precedes the first token"


@dataclass(frozen=True, slots=True, kw_only=True)
class NllStats:
    """`loss` is the weighted sum of negative log-probs, `num_targets` the tokens with a weight."""

    loss: float
    num_targets: int


def nll_micro_step(replica: Replica, batch: Sequence[SupervisedRow]) -> NllStats:
    """Collective over the cell: add the gradient of -sum(weights * log-probs) to the replica's sums."""
    rows = [_to_tree_row(row) for row in batch if np.any(row.weights)]
    if not rows:
        return NllStats(loss=0.0, num_targets=0)
    passed = replica.forward_targets(rows)
    weights_E = np.concatenate([row.weights[row.weights != 0] for row in batch])
    replica.backward(passed, -weights_E)
    loss = -float(np.dot(weights_E.astype(np.float64), passed.values_E))
    return NllStats(loss=loss, num_targets=len(weights_E))


def _to_tree_row(row: SupervisedRow) -> TreeRow:
    """A tree without a fork whose targets are the weighted tokens."""
    length = len(row.tokens)
    targets = np.flatnonzero(row.weights).astype(np.int32)
    return TreeRow(
        rollout="supervised",
        advantage=0.0,
        num_targets=len(targets),
        tokens=row.tokens,
        positions=np.arange(length, dtype=np.int32),
        visible_until=np.full(length, length, np.int32),
        edge_source=targets - 1,
        edge_token=row.tokens[targets],
        behavior_logprobs=np.zeros(len(targets), np.float32),
        versions=np.zeros(len(targets), np.int32),
    )
