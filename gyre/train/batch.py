"""One padded micro-batch: rows of trees as tensors, and the targets read from them.

Targets of all rows lie one after another, row by row, in the order the rows give them.

Shapes: B rows, T tokens of the longest row, E targets of all rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gyre.train.attention import make_tree_mask
from gyre.types import TreeRow


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Tensors of one forward pass. `source_row_E`, `source_E` and `token_E` name each target's place and token."""

    tokens_BT: Tensor
    positions_BT: Tensor
    visible_B1TT: Tensor
    source_row_E: Tensor
    source_E: Tensor
    token_E: Tensor


def make_micro_batch(rows: Sequence[TreeRow], device: torch.device) -> MicroBatch:
    """Pad `rows` (at least one) to the longest. Asserts that sources and tokens lie inside their rows."""
    length = max(len(row.tokens) for row in rows)
    # Padding is visible to itself alone.
    alone = np.arange(1, length + 1)
    until = np.stack([np.concatenate([row.visible_until, alone[len(row.tokens) :]]) for row in rows])
    for row in rows:
        assert len(row.edge_source) == len(row.edge_token), (row.rollout, len(row.edge_source), len(row.edge_token))
        assert not len(row.edge_source) or 0 <= row.edge_source.min() <= row.edge_source.max() < len(row.tokens)
    return MicroBatch(
        tokens_BT=_to_tensor(_pad([row.tokens for row in rows], length), device),
        positions_BT=_to_tensor(_pad([row.positions for row in rows], length), device),
        visible_B1TT=make_tree_mask(_to_tensor(until, device)),
        source_row_E=_to_tensor(np.repeat(np.arange(len(rows)), [len(row.edge_source) for row in rows]), device),
        source_E=_to_tensor(np.concatenate([row.edge_source for row in rows]), device),
        token_E=_to_tensor(np.concatenate([row.edge_token for row in rows]), device),
    )


def split_by_row(values_E: NDArray[np.floating], rows: Sequence[TreeRow]) -> list[NDArray[np.floating]]:
    """The values of each row's targets."""
    return np.split(values_E, np.cumsum([len(row.edge_source) for row in rows])[:-1])


def _pad(arrays: Sequence[NDArray[np.integer]], length: int) -> NDArray[np.integer]:
    return np.stack([np.pad(array, (0, length - len(array))) for array in arrays])


def _to_tensor(array: NDArray[np.integer], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(device)
