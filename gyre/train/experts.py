"""The mixture of experts of Qwen3-MoE, with experts divided over the ranks that tensor parallelism already has.

Attention under tensor parallelism leaves every token on every rank of its group, so a rank computes its own
experts for all tokens and one sum over the group puts them together: no token is sent, dropped or padded. The router is
whole on every rank and sees every token, so all ranks choose alike. Experts are computed one after another.

    y = sum over the top k experts e of p_e * W2_e (silu(G_e x) * U_e x),   p = softmax(R x), of the top k
    divided by their sum if `norm_topk_prob`          (transformers, Qwen3MoeSparseMoeBlock)

Shapes: T tokens, B rows, H hidden, X experts, L experts of this rank, I inner, K chosen experts a token.
"""

import torch
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, reduce_from_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from gyre.train.model_config import ModelConfig


class TreeExperts(MegatronModule):
    """The experts of one layer that this rank holds, and the router."""

    def __init__(self, config: TransformerConfig, *, model: ModelConfig, rank: int, size: int) -> None:
        """`rank` of `size` is that in the tensor-parallel group. Parameters are uninitialised."""
        super().__init__(config=config)
        held = model.num_experts // size
        hidden, inner, dtype = model.hidden_size, model.moe_intermediate_size, config.params_dtype
        self._first, self._chosen, self._has_norm = rank * held, model.num_experts_per_tok, model.norm_topk_prob
        self.router = nn.Parameter(torch.empty(model.num_experts, hidden, dtype=dtype))
        self.fc1 = nn.Parameter(torch.empty(held, 2 * inner, hidden, dtype=dtype))
        self.fc2 = nn.Parameter(torch.empty(held, hidden, inner, dtype=dtype))

    def forward(self, hidden_TBH: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, None]:
        """Collective over the tensor-parallel group: [T, B, H], and no bias."""
        tokens_TH = hidden_TBH.flatten(0, 1)
        share_TX = linear(tokens_TH, self.router).softmax(-1, dtype=torch.promote_types(tokens_TH.dtype, torch.float32))
        share_TK, expert_TK = share_TX.topk(self._chosen, dim=-1)
        if self._has_norm:
            share_TK = share_TK / share_TK.sum(-1, keepdim=True)
        # What enters the experts is the same on every rank; their gradients are summed over the ranks here, so that
        # the router's and the layers' below are whole and equal.
        share_TK = copy_to_tensor_model_parallel_region(share_TK.to(tokens_TH.dtype))
        input_TH = copy_to_tensor_model_parallel_region(tokens_TH)
        output_TH = torch.zeros_like(tokens_TH)
        for index in range(len(self.fc1)):
            # An expert that nobody chose takes part with no tokens, or its ranks would miss the sums above.
            token, place = torch.where(expert_TK == self._first + index)
            gate, up = linear(input_TH[token], self.fc1[index]).chunk(2, dim=-1)
            part = linear(silu(gate) * up, self.fc2[index]) * share_TK[token, place, None]
            output_TH = output_TH.index_add(0, token, part)
        return reduce_from_tensor_model_parallel_region(output_TH).view_as(hidden_TBH), None
