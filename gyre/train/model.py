"""The megatron-core GPT of a cell, with tree attention and a position for every token.

`TreeGPT` reads rows of tokens with explicit positions and a tree mask and returns hidden states; logits are
computed only where a target is read, since the vocabulary is what is large. Built: tensor parallelism of dense
Qwen2 and Qwen3 in fp32. Pipeline, context and expert parallelism are refused.

Shapes: B rows, T tokens, H hidden, E targets, V vocabulary of this rank, D head size.
"""

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.nn.functional import silu

from gyre.errors import ConfigError
from gyre.train.attention import TreeAttention, Visible
from gyre.train.model_config import ModelConfig
from gyre.train.weights import Cut, get_slots
from gyre.types import Layout


class TreeGPT(GPTModel):
    """A GPTModel whose rows are trees."""

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
    model = TreeGPT(
        _make_transformer_config(config, layout),
        spec,
        vocab_size=config.vocab_size,
        max_sequence_length=config.max_position_embeddings,
        position_embedding_type="rope",
        rotary_base=int(config.rope_theta),
        parallel_output=True,
        share_embeddings_and_output_weights=config.tie_word_embeddings,
        pg_collection=groups,
    )
    parameters = dict(model.named_parameters())
    for slot in get_slots(config):
        # Megatron marks cut parameters only when it initialises them; an unmarked one is taken for a duplicate and
        # its other ranks' share is left out of the gradient's norm.
        parameters[slot.name].tensor_model_parallel = slot.cut is not Cut.WHOLE  # pyright: ignore
    return model


def check_layout(config: ModelConfig, layout: Layout) -> None:
    """Raises ConfigError for a layout that the trainer cannot give this model."""
    for name in ("pp", "cp", "ep"):
        if getattr(layout, name) != 1:
            raise ConfigError(f"placement.{name}", wanted="1 (not built yet)", given=getattr(layout, name))
    for name in ("vocab_size", "num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if getattr(config, name) % layout.tp:
            wanted = f"a divisor of the model's {name} ({getattr(config, name)})"
            raise ConfigError("placement.tp", wanted=wanted, given=layout.tp)


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
