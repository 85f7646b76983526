"""What the trainer refuses, with the reason and the nearest layout that it takes; no torch is imported for it."""

import json
import sys
from pathlib import Path

import pytest

from gyre.errors import ConfigError
from gyre.train.capabilities import CPU_TESTED, check_layout, describe_training, find_nearest, refuse
from gyre.train.model_config import ModelConfig, read_model_config
from gyre.types import Layout

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}


def read(folder: Path, **fields: object) -> ModelConfig:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SIZES | {"model_type": "qwen3"} | fields))
    return read_model_config(folder)


@pytest.mark.parametrize(
    ("layout", "key", "fix"),
    [
        (Layout(cp=2), "placement.cp", "tp = 1, pp = 2, cp = 1, ep = 1"),
        (Layout(tp=4), "placement.tp", "tp = 2, pp = 2, cp = 1, ep = 1"),
        (Layout(pp=3), "placement.pp", "tp = 1, pp = 2, cp = 1, ep = 1"),
        (Layout(tp=2, ep=2), "placement.ep", "tp = 2, pp = 1, cp = 1, ep = 1"),
    ],
)
def test_a_refused_layout_names_the_nearest_supported_one(tmp_path: Path, layout: Layout, key: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_layout(read(tmp_path), layout)
    assert (caught.value.key, caught.value.fix) == (key, f"nearest supported layout: {fix}")


def test_experts_go_with_tensor_parallelism(tmp_path: Path) -> None:
    config = read(tmp_path, model_type="qwen3_moe", **EXPERTS)
    assert refuse(config, Layout(tp=2)) is not None
    assert find_nearest(config, Layout(tp=2)) == Layout(tp=2, ep=2)
    assert refuse(config, Layout(tp=2, pp=2, ep=2)) is None
    assert describe_training(config, Layout(tp=2, ep=2)).endswith("tested on CPU")
    assert describe_training(config, Layout(tp=2, pp=2, ep=2)).endswith("supported, not in tests")


def test_what_is_tested_is_supported(tmp_path: Path) -> None:
    for families, layout in CPU_TESTED:
        for family in families.split(", "):
            config = read(tmp_path, model_type=family, **(EXPERTS if family == "qwen3_moe" else {}))
            assert refuse(config, layout) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "llama"},
        {"rope_scaling": {"rope_type": "yarn"}},
        {"use_sliding_window": True},
        {"model_type": "qwen3_moe", "mlp_only_layers": [0], **EXPERTS},
        {"model_type": "qwen3_moe", "decoder_sparse_step": 2, **EXPERTS},
    ],
)
def test_models_that_would_silently_differ_are_refused(tmp_path: Path, fields: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"model\.path"):
        read(tmp_path, **fields)


def test_the_check_needs_no_torch() -> None:
    module = sys.modules["gyre.train.capabilities"]
    assert not any(name in vars(module) for name in ("torch", "megatron"))
