"""Tree attention: what a token may see, and the attention that obeys it.

Tokens of a row lie in DFS order, so key k is visible to query q iff k <= q < visible_until[k]: one interval a
key instead of a path a query. Short rows are padded to one batch under a dense mask; padding sees itself alone,
because a softmax over nothing is NaN, and nothing sees padding. A long row is computed in blocks of queries, each
against the keys of its first token's path and its own: invisible keys cost next to nothing, no mask is [T, T], and
keys and values of tokens that precede the row can be carried in. CPU has no block-sparse backward (torch 2.13).

Shapes: B rows, T tokens, N query heads, G key-value groups, D head size; Q queries and K keys of one block, S
carried tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

BLOCK_TOKENS = 256


@dataclass(slots=True, kw_only=True)
class Carry:
    """Keys and values [S or T, 1, G, D] by layer number: `given` precede the row, `made` are the row's own."""

    given: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    made: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Queries [start, end) and the pieces of the row that hold their keys; `visible_QK` also covers carried keys."""

    start: int
    end: int
    pieces: tuple[int, ...]
    visible_QK: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Visible:
    """What the tokens of one forward pass see: a dense [B, 1, T, T] mask, or blocks over the pieces of one row."""

    dense_B1TT: Tensor | None = None
    pieces: tuple[int, ...] = ()
    blocks: tuple[Block, ...] = ()
    carry: Carry | None = None


def make_tree_mask(visible_until_BT: Tensor) -> Tensor:
    """[B, 1, T, T] bool, True where query (third axis) sees key (fourth axis)."""
    index_T = torch.arange(visible_until_BT.shape[1], device=visible_until_BT.device)
    query_T1, key_1T = index_T[:, None], index_T[None, :]
    return ((key_1T <= query_T1) & (query_T1 < visible_until_BT[:, None, :]))[:, None]


def plan_blocks(
    until: NDArray[np.integer],
    start: int,
    end: int,
    *,
    device: torch.device,
    carried: NDArray[np.integer] | None = None,
    carry: Carry | None = None,
    block_tokens: int = BLOCK_TOKENS,
) -> Visible:
    """Blocks for the tokens [start, end) of a row with `visible_until` = `until`.

    `carried` are the row indices of the keys in `carry`, which precede `start`.
    """
    before = np.zeros(0, np.int64) if carried is None else np.asarray(carried)
    cuts = _cut(until, start, end, block_tokens)
    ends = np.append(cuts[1:], end)
    blocks = []
    for first in range(start, end, block_tokens):
        last = min(first + block_tokens, end)
        # A piece never crosses a fork or a block, so all of it is visible to the block's first token or none.
        pieces = np.flatnonzero((cuts >= first) & (cuts < last) | (cuts < first) & (until[cuts] > first))
        keys = np.concatenate([before, *(np.arange(cuts[piece], ends[piece]) for piece in pieces)])
        query_Q1 = np.arange(first, last)[:, None]
        visible_QK = (keys <= query_Q1) & (query_Q1 < until[keys])
        blocks.append(
            Block(
                start=first - start,
                end=last - start,
                pieces=tuple(pieces.tolist()),
                visible_QK=torch.from_numpy(visible_QK).to(device),
            )
        )
    return Visible(pieces=tuple((ends - cuts).tolist()), blocks=tuple(blocks), carry=carry)


def _cut(until: NDArray[np.integer], start: int, end: int, block_tokens: int) -> NDArray[np.integer]:
    """Where pieces begin: at blocks, and where the tokens before and after are not seen equally far."""
    index = np.arange(start + 1, end)
    is_fork = (until[start + 1 : end] != until[start : end - 1]) | (until[start : end - 1] <= index)
    return np.union1d(index[is_fork], np.arange(start, end, block_tokens))


class TreeAttention(MegatronModule):
    """Core attention of a layer under a `Visible`. No dropout, no fixed causality."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query_TBND: Tensor,
        key_TBGD: Tensor,
        value_TBGD: Tensor,
        attention_mask: Visible,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: object = None,
    ) -> Tensor:
        """[T, B, N*D]. What megatron calls a mask is passed through its layers as it is."""
        assert attention_bias is None and packed_seq_params is None, "tree attention takes what is visible, no more"
        if attention_mask.dense_B1TT is None:
            return self._attend_in_blocks(query_TBND, key_TBGD, value_TBGD, attention_mask)
        query_BNTD, key_BGTD, value_BGTD = (x.permute(1, 2, 0, 3) for x in (query_TBND, key_TBGD, value_TBGD))
        heads_per_group = query_BNTD.shape[1] // key_BGTD.shape[1]
        context_BNTD = scaled_dot_product_attention(
            query_BNTD,
            key_BGTD.repeat_interleave(heads_per_group, dim=1),
            value_BGTD.repeat_interleave(heads_per_group, dim=1),
            attn_mask=attention_mask.dense_B1TT,
            scale=self.softmax_scale,
        )
        return context_BNTD.permute(2, 0, 1, 3).flatten(2)

    def _attend_in_blocks(self, query_T1ND: Tensor, key_T1GD: Tensor, value_T1GD: Tensor, visible: Visible) -> Tensor:
        given: Sequence[tuple[Tensor, Tensor]] = ()
        if visible.carry is not None:
            visible.carry.made[self.layer_number] = (key_T1GD, value_T1GD)
            given = [visible.carry.given[self.layer_number]] if self.layer_number in visible.carry.given else []
        keys, values = key_T1GD.split(visible.pieces), value_T1GD.split(visible.pieces)
        groups, heads = key_T1GD.shape[2], query_T1ND.shape[2]
        outputs = []
        for block in visible.blocks:
            key_K1GD = torch.cat([*(k for k, _ in given), *(keys[piece] for piece in block.pieces)])
            value_K1GD = torch.cat([*(v for _, v in given), *(values[piece] for piece in block.pieces)])
            # The heads of a group share its keys: laid one after another as queries, nothing has to be repeated.
            query_QGhD = query_T1ND[block.start : block.end, 0].unflatten(1, (groups, heads // groups))
            size = block.end - block.start
            context_1GqD = scaled_dot_product_attention(
                query_QGhD.permute(1, 2, 0, 3).flatten(1, 2)[None],
                key_K1GD.permute(1, 2, 0, 3),
                value_K1GD.permute(1, 2, 0, 3),
                attn_mask=block.visible_QK.repeat(heads // groups, 1),
                scale=self.softmax_scale,
            )
            outputs.append(context_1GqD[0].unflatten(1, (heads // groups, size)).permute(2, 0, 1, 3).flatten(1))
        return torch.cat(outputs)[:, None]
