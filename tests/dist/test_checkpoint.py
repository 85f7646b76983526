"""A checkpoint continues the run exactly, under another layout too, and a damaged one is refused by name."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gyre.errors import StoreError
from gyre.types import Layout
from tests.dist.replica_world import build_replica, run_world, to_numpy
from tests.dist.test_elastic_gradient import write_policy
from tests.fakes.tiny_model import build_tiny_model

pytestmark = pytest.mark.timeout(400)

RATES = (1e-3, 3e-3, 2e-3)


def train(replica: Any, steps: list[int]) -> dict[str, np.ndarray]:
    """Supervised steps whose data and learning rate are functions of the step; the weights after them."""
    from gyre.train.supervised import SupervisedRow, nll_micro_step

    for step in steps:
        tokens = np.random.default_rng(step).integers(0, 256, 20).astype(np.int32)
        weights = np.full(20, 1 / 19, np.float32)
        weights[0] = 0.0
        replica.begin_step()
        replica.set_learning_rate(RATES[step])
        nll_micro_step(replica, [SupervisedRow(tokens=tokens, weights=weights)])
        replica.apply(1)
    return to_numpy(replica.export_hf())


def save_and_go_on(rank: int, world: Path, model: Path, layout: Layout, folder: Path) -> dict[str, np.ndarray]:
    replica = build_replica(model, 1, layout)
    train(replica, [0, 1])
    # Twice, as a run does that replaces what it finds.
    for _ in range(2):
        replica.save_checkpoint(folder, 2)
    return train(replica, [2])


def load_and_go_on(rank: int, world: Path, model: Path, layout: Layout, folder: Path) -> dict[str, np.ndarray]:
    replica = build_replica(model, 1, layout)
    # What was trained before the load must not show.
    train(replica, [2, 0])
    assert replica.load_checkpoint(folder) == 2
    return train(replica, [2])


@pytest.mark.parametrize(
    ("kind", "saved_by", "loaded_by"),
    [
        ("qwen3", Layout(), Layout()),
        ("qwen3", Layout(tp=2), Layout(tp=2)),
        ("qwen3", Layout(tp=2), Layout(pp=2)),
        ("tied", Layout(tp=2, pp=2), Layout()),
        ("qwen3_moe", Layout(tp=2, ep=2), Layout(pp=2)),
    ],
)
def test_the_step_after_a_load_is_the_step_after_the_save(
    tmp_path: Path, kind: str, saved_by: Layout, loaded_by: Layout
) -> None:
    model, folder = write_policy(tmp_path / "model", kind), tmp_path / "checkpoints" / "step-2"
    saved = run_world(saved_by.num_ranks, tmp_path, save_and_go_on, model, saved_by, folder)[0]
    loaded = run_world(loaded_by.num_ranks, tmp_path, load_and_go_on, model, loaded_by, folder)[0]
    gap = max(float(np.abs(loaded[name] - value).max()) for name, value in saved.items())
    assert gap == 0.0 if saved_by == loaded_by else gap < 2e-5
    assert [path.name for path in folder.parent.iterdir()] == ["step-2"]


def save_untrained(rank: int, world: Path, model: Path, folder: Path) -> bool:
    replica = build_replica(model, 1, Layout())
    replica.save_checkpoint(folder, 0)
    return replica.load_checkpoint(folder) == 0 and bool(np.isfinite(train(replica, [0])["model.norm.weight"]).all())


def test_a_checkpoint_before_the_first_step_is_one(tmp_path: Path) -> None:
    model = build_tiny_model(tmp_path / "model").path
    assert run_world(1, tmp_path, save_untrained, model, tmp_path / "step-0") == [True]


def write_small_checkpoint(folder: Path) -> Path:
    import torch

    from gyre.train.checkpoint import TrainerState, write_checkpoint

    tensors = {"model.norm.weight": torch.arange(8.0)}
    write_checkpoint(folder, TrainerState(step=3, adam_step=3, weights=tensors, exp_avg=tensors, exp_avg_sq=tensors))
    return folder


@pytest.mark.parametrize("name", ["model.safetensors", "adam_exp_avg.safetensors", "adam_exp_avg_sq.safetensors"])
def test_a_changed_or_missing_file_is_refused_by_name(tmp_path: Path, name: str) -> None:
    from gyre.train.checkpoint import read_checkpoint

    folder = write_small_checkpoint(tmp_path / "step-3")
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(StoreError, match=f"step-3 is damaged: {name}"):
        read_checkpoint(folder)
    (folder / name).write_bytes(whole[:-4])
    with pytest.raises(StoreError, match=f"step-3 is damaged: {name}"):
        read_checkpoint(folder)
    (folder / name).unlink()
    with pytest.raises(StoreError, match=f"step-3 is incomplete: {name}"):
        read_checkpoint(folder)


def test_a_checkpoint_without_its_manifest_or_of_another_format_is_refused(tmp_path: Path) -> None:
    from gyre.train.checkpoint import read_checkpoint

    folder = write_small_checkpoint(tmp_path / "step-3")
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"format": 99}))
    with pytest.raises(StoreError, match="has format 99, this version reads 1"):
        read_checkpoint(folder)
    (folder / "manifest.json").write_text("{")
    with pytest.raises(StoreError, match=r"incomplete: manifest\.json"):
        read_checkpoint(folder)
    (folder / "manifest.json").unlink()
    with pytest.raises(StoreError, match=r"incomplete: manifest\.json"):
        read_checkpoint(folder)


def test_a_save_that_was_cut_leaves_the_older_checkpoint_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gyre.train import checkpoint

    folder = write_small_checkpoint(tmp_path / "step-3")
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_describe", _fail)
        with pytest.raises(OSError, match="no space"):
            write_small_checkpoint(folder)
    assert checkpoint.read_checkpoint(folder).step == 3


def _fail(path: Path) -> None:
    raise OSError("no space")
