"""Tree attention: what a token may see, and the attention that obeys it.

Tokens of a row lie in DFS order, so key k is visible to query q iff k <= q < visible_until[k]: one interval a
key instead of a path a query. Padding sees itself alone, because a softmax over nothing is NaN, and nothing
sees padding. CPU has no block-sparse backward (torch 2.13), so the mask is dense here.

Shapes: B rows, T tokens, N query heads, G key-value groups, D head size.
"""

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def make_tree_mask(visible_until_BT: Tensor) -> Tensor:
    """[B, 1, T, T] bool, True where query (third axis) sees key (fourth axis)."""
    index_T = torch.arange(visible_until_BT.shape[1], device=visible_until_BT.device)
    query_T1, key_1T = index_T[:, None], index_T[None, :]
    return ((key_1T <= query_T1) & (query_T1 < visible_until_BT[:, None, :]))[:, None]


class TreeAttention(MegatronModule):
    """Core attention of a layer under a [B, 1, T, T] mask of what is visible. No dropout, no fixed causality."""

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
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query_TBND: Tensor,
        key_TBGD: Tensor,
        value_TBGD: Tensor,
        attention_mask: Tensor,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: object = None,
    ) -> Tensor:
        """[T, B, N*D]. `attention_mask` is True where visible (megatron's own convention is the opposite)."""
        assert attention_bias is None and packed_seq_params is None, "tree attention takes a mask and nothing else"
        query_BNTD, key_BGTD, value_BGTD = (x.permute(1, 2, 0, 3) for x in (query_TBND, key_TBGD, value_TBGD))
        heads_per_group = query_BNTD.shape[1] // key_BGTD.shape[1]
        context_BNTD = scaled_dot_product_attention(
            query_BNTD,
            key_BGTD.repeat_interleave(heads_per_group, dim=1),
            value_BGTD.repeat_interleave(heads_per_group, dim=1),
            attn_mask=attention_mask,
            scale=self.softmax_scale,
        )
        return context_BNTD.permute(2, 0, 1, 3).flatten(2)
