"""What the trainer needs from a Hugging Face config.json, and nothing of transformers.

Qwen2, Qwen3 and Qwen3-MoE are built. What a config asks for and the trainer does not do (scaled RoPE, sliding
windows, layers without experts among others, biases elsewhere) is a ConfigError here rather than a silent
difference from the engine.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gyre.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes of a decoder. Names follow config.json; `rope_theta` is the base of the rotary angles.

    `num_experts` is 0 for a dense model; otherwise every layer has them.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    initializer_range: float
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False

    @property
    def has_qkv_bias(self) -> bool:
        """Qwen2 adds a bias to the projections of queries, keys and values."""
        return self.model_type == "qwen2"

    @property
    def has_qk_norm(self) -> bool:
        """Qwen3 normalises each head's queries and keys."""
        return self.model_type.startswith("qwen3")


def read_model_config(folder: Path) -> ModelConfig:
    """The model described by `folder`/config.json. Raises ConfigError for what the trainer cannot do."""
    path = folder / "config.json"
    try:
        raw: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError("model.path", wanted="a folder with a readable config.json", given=str(folder)) from error
    _refuse_unsupported(raw)
    rope = raw.get("rope_parameters") or {}
    heads = raw["num_attention_heads"]
    return ModelConfig(
        model_type=raw["model_type"],
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_hidden_layers=raw["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=raw.get("num_key_value_heads", heads),
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope_theta=float(raw.get("rope_theta") or rope.get("rope_theta") or 10000.0),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        max_position_embeddings=raw.get("max_position_embeddings", 32768),
        initializer_range=raw.get("initializer_range", 0.02),
        **_read_experts(raw),
    )


def _read_experts(raw: dict[str, Any]) -> dict[str, Any]:
    """The fields of a mixture of experts, or nothing."""
    if raw["model_type"] != "qwen3_moe":
        return {}
    if raw.get("decoder_sparse_step", 1) != 1 or raw.get("mlp_only_layers"):
        raise ConfigError("model.path", wanted="experts in every layer", given="layers without experts")
    return {
        # transformers 5 writes the second name, published models have the first.
        "num_experts": raw["num_experts"] if "num_experts" in raw else raw["num_local_experts"],
        "num_experts_per_tok": raw["num_experts_per_tok"],
        "moe_intermediate_size": raw["moe_intermediate_size"],
        "norm_topk_prob": bool(raw.get("norm_topk_prob", False)),
    }


def _refuse_unsupported(raw: dict[str, Any]) -> None:
    model_type = raw.get("model_type")
    if model_type not in ("qwen2", "qwen3", "qwen3_moe"):
        wanted = "a qwen2, qwen3 or qwen3_moe model"
        raise ConfigError("model.path", wanted=wanted, given=model_type, fix="choose another folder")
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ConfigError("model.path", wanted="plain rotary positions", given=f"rope type {kind}")
    if raw.get("use_sliding_window"):
        raise ConfigError("model.path", wanted="full attention", given="use_sliding_window=true")
    if raw.get("attention_bias") and model_type != "qwen2":
        raise ConfigError("model.path", wanted="no attention bias", given="attention_bias=true")
    if raw.get("hidden_act", "silu") != "silu":
        raise ConfigError("model.path", wanted="hidden_act silu", given=raw["hidden_act"])
