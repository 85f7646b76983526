"""A decoder's shape from its Hugging Face config.json: parameters, KV bytes and how they divide. Pure numbers.

Qwen2, Qwen3 and their mixtures of experts are understood: grouped-query attention, gated MLPs, RMS norms, routed
and shared experts. Anything else is counted by the same fields; what has none of them is a ConfigError.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from gyre.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Counts of a decoder. `num_experts` is 0 for a dense model; `dense_layers` of a mixture have a plain MLP."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    intermediate: int
    is_tied: bool
    attention_bias: bool
    qk_norm: bool
    num_experts: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    dense_layers: int = 0

    @classmethod
    def of(cls, config: Mapping[str, object], *, source: str) -> "ModelShape":
        """The shape in a config.json; `source` names it in errors."""

        def number(*names: str, default: int | None = None) -> int:
            for name in names:
                value = config.get(name)
                if isinstance(value, int):
                    return value
            if default is None:
                raise ConfigError("model.path", wanted=f"a config.json with {names[0]}", given=source)
            return default

        heads, hidden = number("num_attention_heads"), number("hidden_size")
        experts = number("num_experts", "n_routed_experts", "num_local_experts", default=0)
        kind = str(config.get("model_type", ""))
        layers = number("num_hidden_layers")
        step = number("decoder_sparse_step", default=1)
        only = config.get("mlp_only_layers")
        dense = len(only) if isinstance(only, list) else 0
        dense += layers - layers // max(step, 1) if experts else 0
        return cls(
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=number("num_key_value_heads", default=heads),
            head_dim=number("head_dim", default=hidden // heads),
            vocab=number("vocab_size"),
            intermediate=number("intermediate_size", default=0 if experts else None),
            is_tied=bool(config.get("tie_word_embeddings", False)),
            attention_bias=bool(config.get("attention_bias", kind.startswith("qwen2"))),
            qk_norm=kind.startswith("qwen3"),
            num_experts=experts,
            expert_intermediate=number("moe_intermediate_size", default=0) if experts else 0,
            shared_intermediate=number("shared_expert_intermediate_size", default=0) if experts else 0,
            dense_layers=dense if experts else layers,
        )

    @property
    def embedding_params(self) -> int:
        """Input embedding and, if it is another, the output head."""
        return self.vocab * self.hidden * (1 if self.is_tied else 2)

    @property
    def attention_params(self) -> int:
        """One layer's projections, biases and norms."""
        query, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        weights = self.hidden * (2 * query + 2 * kv)
        bias = query + 2 * kv if self.attention_bias else 0
        return weights + bias + (2 * self.head_dim if self.qk_norm else 0) + 2 * self.hidden

    @property
    def expert_params(self) -> int:
        """All routed experts of the model."""
        return (self.layers - self.dense_layers) * self.num_experts * 3 * self.hidden * self.expert_intermediate

    @property
    def shared_params(self) -> int:
        """Everything but the routed experts."""
        sparse = self.layers - self.dense_layers
        router = sparse * self.num_experts * self.hidden
        shared = sparse * (
            3 * self.hidden * self.shared_intermediate + (self.hidden if self.shared_intermediate else 0)
        )
        dense = self.dense_layers * 3 * self.hidden * self.intermediate
        return self.embedding_params + self.layers * self.attention_params + router + shared + dense + self.hidden

    @property
    def params(self) -> int:
        """All parameters."""
        return self.expert_params + self.shared_params

    def kv_values_per_token(self) -> int:
        """Keys and values of one token over all layers, as numbers."""
        return 2 * self.layers * self.kv_heads * self.head_dim
