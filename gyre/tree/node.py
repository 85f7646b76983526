"""One segment of a trajectory tree: a run of context tokens, or of tokens that the policy sampled in one turn.

A node is frozen and its arrays are read-only copies, so nothing outside the tree can change what was
recorded. Log-probs and versions exist for sampled tokens only. A node knows its parent but not its
children: those belong to the tree.
"""

from dataclasses import dataclass

import numpy as np

from gyre.config.choices import PathRole
from gyre.types import Float32, Int32


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A segment. `depth` counts the tokens before it on its path.

    `behavior_logprobs` and `versions` have the length of `tokens` when `sampled`, and length 0 otherwise.
    """

    id: int
    parent: int | None
    depth: int
    tokens: Int32
    sampled: bool
    behavior_logprobs: Float32
    versions: Int32
    role: PathRole

    def __post_init__(self) -> None:
        wanted = len(self.tokens) if self.sampled else 0
        assert len(self.behavior_logprobs) == wanted, (self.id, len(self.behavior_logprobs), wanted)
        assert len(self.versions) == wanted, (self.id, len(self.versions), wanted)

    @property
    def num_targets(self) -> int:
        """Tokens of the node that can be trained: all that were sampled, except one that nothing precedes."""
        if not self.sampled or len(self.tokens) == 0:
            return 0
        return len(self.tokens) - (1 if self.depth == 0 else 0)


def frozen_int32(values: Int32) -> Int32:
    """A read-only copy of `values`, shape (n,)."""
    copy = np.array(values, dtype=np.int32, copy=True).reshape(-1)
    copy.setflags(write=False)
    return copy


def frozen_float32(values: Float32) -> Float32:
    """A read-only copy of `values`, shape (n,)."""
    copy = np.array(values, dtype=np.float32, copy=True).reshape(-1)
    copy.setflags(write=False)
    return copy
