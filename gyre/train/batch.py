"""One micro-batch: rows of trees as tensors, and the targets read from them.

Rows that are short lie padded side by side. If one is longer than `LONG_TOKENS`, all lie end to end as one row: a
forest needs no more than intervals shifted by what lies before, and no padding. Targets of all rows lie one
after another, row by row, in the order the rows give them.

Shapes: B rows, T tokens of the longest row, E targets of all rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gyre.train.attention import Carry, Visible, make_tree_mask, plan_blocks
from gyre.types import TreeRow

LONG_TOKENS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Tensors of one forward pass. `source_row_E`, `source_E` and `token_E` name each target's place and token."""

    tokens_BT: Tensor
    positions_BT: Tensor
    visible: Visible
    source_row_E: Tensor
    source_E: Tensor
    token_E: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """Rows end to end as one forest: token arrays of shape (T,), target arrays of shape (E,)."""

    tokens: NDArray[np.integer]
    positions: NDArray[np.integer]
    until: NDArray[np.integer]
    source: NDArray[np.integer]
    token: NDArray[np.integer]


def make_micro_batch(rows: Sequence[TreeRow], device: torch.device) -> MicroBatch:
    """The micro-batch of `rows` (at least one). Asserts that sources and tokens lie inside their rows."""
    for row in rows:
        assert len(row.edge_source) == len(row.edge_token), (row.rollout, len(row.edge_source), len(row.edge_token))
        assert not len(row.edge_source) or 0 <= row.edge_source.min() <= row.edge_source.max() < len(row.tokens)
    length = max(len(row.tokens) for row in rows)
    if length > LONG_TOKENS:
        joined = join(rows)
        return take(joined, 0, len(joined.tokens), np.arange(len(joined.source)), device)
    # Padding is visible to itself alone.
    alone = np.arange(1, length + 1)
    until = np.stack([np.concatenate([row.visible_until, alone[len(row.tokens) :]]) for row in rows])
    return MicroBatch(
        tokens_BT=_to_tensor(_pad([row.tokens for row in rows], length), device),
        positions_BT=_to_tensor(_pad([row.positions for row in rows], length), device),
        visible=Visible(dense_B1TT=make_tree_mask(_to_tensor(until, device))),
        source_row_E=_to_tensor(np.repeat(np.arange(len(rows)), [len(row.edge_source) for row in rows]), device),
        source_E=_to_tensor(np.concatenate([row.edge_source for row in rows]), device),
        token_E=_to_tensor(np.concatenate([row.edge_token for row in rows]), device),
    )


def join(rows: Sequence[TreeRow]) -> Joined:
    """The rows end to end."""
    offsets = np.cumsum([0, *(len(row.tokens) for row in rows[:-1])])
    return Joined(
        tokens=np.concatenate([row.tokens for row in rows]),
        positions=np.concatenate([row.positions for row in rows]),
        until=np.concatenate([row.visible_until + offset for row, offset in zip(rows, offsets, strict=True)]),
        source=np.concatenate([row.edge_source + offset for row, offset in zip(rows, offsets, strict=True)]),
        token=np.concatenate([row.edge_token for row in rows]),
    )


def take(
    joined: Joined,
    start: int,
    end: int,
    targets: NDArray[np.integer],
    device: torch.device,
    *,
    carried: NDArray[np.integer] | None = None,
    carry: Carry | None = None,
) -> MicroBatch:
    """The tokens [start, end) of a forest with the given targets; `carry` holds keys of the tokens `carried`."""
    return MicroBatch(
        tokens_BT=_to_tensor(joined.tokens[None, start:end], device),
        positions_BT=_to_tensor(joined.positions[None, start:end], device),
        visible=plan_blocks(joined.until, start, end, device=device, carried=carried, carry=carry),
        source_row_E=_to_tensor(np.zeros(len(targets)), device),
        source_E=_to_tensor(joined.source[targets] - start, device),
        token_E=_to_tensor(joined.token[targets], device),
    )


def split_by_row(values_E: NDArray[np.floating], rows: Sequence[TreeRow]) -> list[NDArray[np.floating]]:
    """The values of each row's targets."""
    return np.split(values_E, np.cumsum([len(row.edge_source) for row in rows])[:-1])


def _pad(arrays: Sequence[NDArray[np.integer]], length: int) -> NDArray[np.integer]:
    return np.stack([np.pad(array, (0, length - len(array))) for array in arrays])


def _to_tensor(array: NDArray[np.generic], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(device)
