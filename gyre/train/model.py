"""The megatron-core GPT of a cell, with tree attention and a position for every token.

`TreeGPT` reads rows of tokens with explicit positions and a tree mask and returns hidden states; logits are
computed only where a target is read, since the vocabulary is what is large. A pipeline stage holds its share of the
layers; the first has the embedding, the last the output layer. All in fp32.

Shapes: B rows, T tokens, H hidden, E targets, V vocabulary of this rank, D head size.
"""

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor, nn
from torch.nn.functional import silu

from gyre.train.attention import TreeAttention, Visible
from gyre.train.capabilities import check_layout
from gyre.train.experts import TreeExperts
from gyre.train.model_config import ModelConfig
from gyre.train.weights import Cut, Slot, get_stage_slots
from gyre.types import Layout


class TreeGPT(GPTModel):
    """A GPTModel, or a stage of one, whose rows are trees."""

    def setup_embeddings_and_output_layer(self) -> None:
        """Marks tied weights. Megatron would also sum them over the stages, on CUDA, before there are any."""
        if self.config.pipeline_model_parallel_size == 1 or not self.share_embeddings_and_output_weights:
            super().setup_embeddings_and_output_layer()
            return
        weight = self.shared_embedding_or_output_weight()
        weight.shared_embedding = True  # pyright: ignore[reportAttributeAccessIssue]
        # The last stage's copy is no further parameter: it does not count in the gradient's norm.
        weight.shared = not self.pre_process  # pyright: ignore[reportAttributeAccessIssue]

    def forward(  # type: ignore[override]
        self, tokens_BT: Tensor, positions_BT: Tensor, visible: Visible, received_TBH: Tensor | None
    ) -> Tensor:
        """Hidden states [T, B, H] of this stage, after the final norm on the last. `received_TBH` are the stage's
        before; None on the first.
        """
        embedded_TBH = None
        if received_TBH is None:
            embedded_TBH = self.embedding(input_ids=tokens_BT, position_ids=positions_BT)
        else:
            self.decoder.set_input_tensor(received_TBH)
        return self.decoder(
            hidden_states=embedded_TBH,
            attention_mask=visible,
            rotary_pos_emb=self._make_angles(positions_BT),
        )

    @property
    def dtype(self) -> torch.dtype:
        """That of the parameters."""
        return next(self.parameters()).dtype

    def read_logits(self, hidden_EH: Tensor) -> Tensor:
        """[E, V] logits of this rank's part of the vocabulary."""
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits_E1V, _ = self.output_layer(hidden_EH[:, None], weight=weight)
        return logits_E1V[:, 0]

    def _make_angles(self, positions_BT: Tensor) -> Tensor:
        """Rotary angles [T, B, 1, D]: megatron would give every row of a batch the same positions."""
        inverse_frequency = self.rotary_pos_emb.inv_freq.to(positions_BT.device)
        half_TBd = positions_BT.t()[..., None].float() * inverse_frequency
        return torch.cat([half_TBd, half_TBd], dim=-1)[:, :, None]


def build_model(config: ModelConfig, layout: Layout, groups: ProcessGroupCollection) -> TreeGPT:
    """The model of this rank with its parameters uninitialised. `groups` are those of its cell."""
    check_layout(config, layout)
    spec = get_gpt_layer_local_spec(qk_layernorm=config.has_qk_norm, normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = TreeAttention  # pyright: ignore
    if config.num_experts:
        where = {"model": config, "rank": groups.tp.rank(), "size": groups.tp.size()}
        spec.submodules.mlp = ModuleSpec(module=TreeExperts, params=where)  # pyright: ignore
    model = TreeGPT(
        _make_transformer_config(config, layout),
        spec,
        vocab_size=config.vocab_size,
        max_sequence_length=config.max_position_embeddings,
        pre_process=groups.pp.rank() == 0,
        post_process=groups.pp.rank() == layout.pp - 1,
        position_embedding_type="rope",
        rotary_base=int(config.rope_theta),
        parallel_output=True,
        share_embeddings_and_output_weights=config.tie_word_embeddings,
        pg_collection=groups,
    )
    parameters = get_parameters(config, layout, model, groups)
    for slot in get_slots_of(config, layout, groups):
        # Megatron marks cut parameters only when it initialises them; an unmarked one is taken for a duplicate and
        # its other ranks' share is left out of the gradient's norm.
        parameters[slot.name].tensor_model_parallel = slot.cut is not Cut.WHOLE  # pyright: ignore
    return model


def get_slots_of(config: ModelConfig, layout: Layout, groups: ProcessGroupCollection) -> tuple[Slot, ...]:
    """The parameters of this rank's stage."""
    return get_stage_slots(config, groups.pp.rank(), layout.pp)


def get_parameters(
    config: ModelConfig, layout: Layout, model: nn.Module, groups: ProcessGroupCollection
) -> dict[str, nn.Parameter]:
    """This rank's parameters by slot name: layers are numbered through the stages, in megatron in each."""
    first = groups.pp.rank() * config.num_hidden_layers // layout.pp
    prefix = "decoder.layers."

    def rename(name: str) -> str:
        if not name.startswith(prefix):
            return name
        number, dot, rest = name.removeprefix(prefix).partition(".")
        return f"{prefix}{int(number) + first}{dot}{rest}"

    return {rename(name): parameter for name, parameter in model.named_parameters()}


def _make_transformer_config(config: ModelConfig, layout: Layout) -> TransformerConfig:
    return TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=config.head_dim,
        ffn_hidden_size=config.intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=silu,
        add_bias_linear=False,
        add_qkv_bias=config.has_qkv_bias,
        qk_layernorm=config.has_qk_norm,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        pipeline_dtype=torch.float32,
        params_dtype=torch.float32,
        use_cpu_initialization=not torch.cuda.is_available(),
        perform_initialization=False,
        # Gradients are sums of absolute weights: nothing in megatron may divide them.
        calculate_per_token_loss=True,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )
