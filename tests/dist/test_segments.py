"""Tree mask, blocks, segments and flattened paths give one gradient: in fp64 to the last digits, and in fp32."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gyre.algo.forest import flatten, target_paths
from gyre.algo.packing import pack
from gyre.types import Layout, TreeRow
from tests.dist.replica_world import CLIP_HIGH, CLIP_LOW, find_gap, make_tree_row, run_world, to_numpy
from tests.dist.test_replica import write_model

pytestmark = pytest.mark.timeout(400)

SEGMENTS = (7, 64, 1000)


def make_deep_rows() -> list[TreeRow]:
    """Forests of many turns: deep paths, wide forks, several roots."""
    shapes = [(1, 24, 9), (2, 60, 5), (3, 12, 40)]
    return [make_tree_row(seed, 96, num_turns=turns, longest=longest) for seed, turns, longest in shapes]


def compare_exactly(rank: int, world: Path, dtype_name: str) -> dict[str, float]:
    """The largest relative gap of log-probs and gradient of each way to the flattened paths."""
    import torch

    from gyre.train import patches
    from gyre.train.attention import Visible, make_tree_mask
    from gyre.train.batch import join, make_micro_batch, take
    from gyre.train.groups import make_data_groups
    from gyre.train.model import build_model
    from gyre.train.model_config import read_model_config
    from gyre.train.replica import _make_megatron_groups
    from gyre.train.segments import SegmentedPass
    from gyre.train.stage import Stage

    patches.install()
    config = read_model_config(write_model(world / "model", "qwen3", tied=False))
    groups = _make_megatron_groups(Layout(), make_data_groups(1, Layout()))
    model = build_model(config, Layout(), groups).to(getattr(torch, dtype_name))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2 + (parameter.dim() == 1))
    stage, device = Stage(model, groups), torch.device("cpu")
    rows = make_deep_rows()
    joined = join(rows)
    weights_E = torch.randn(len(joined.source), generator=generator, dtype=torch.float64)
    everything = np.arange(len(joined.source))

    def gradient(run: Callable[[], np.ndarray]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        model.zero_grad()
        values_E = run()
        return values_E, {name: p.grad.numpy().copy() for name, p in model.named_parameters()}

    def run_flattened() -> np.ndarray:
        values_E, offset = np.empty(len(everything)), 0
        for row in rows:
            paths, indices = target_paths(row), offset + np.arange(row.num_targets)
            offset += row.num_targets
            for path in flatten(row):
                own = indices[paths == int(path.rollout.split("/")[1])]
                passed = stage.forward(make_micro_batch([path], device))
                stage.backward(passed, weights_E[own])
                values_E[own] = passed.values_E
        return values_E

    def run_whole(is_dense: bool) -> np.ndarray:
        batch = take(joined, 0, len(joined.tokens), everything, device)
        if is_dense:
            mask = make_tree_mask(torch.from_numpy(joined.until.astype(np.int64))[None])
            batch = replace(batch, visible=Visible(dense_B1TT=mask))
        passed = stage.forward(batch)
        stage.backward(passed, weights_E)
        return passed.values_E

    def run_segments(size: int) -> np.ndarray:
        passed = SegmentedPass(stage, joined, size, device, want_entropy=True)
        passed.backward(weights_E)
        assert not passed._kept and not passed._slopes
        return passed.values_E

    ways: dict[str, Callable[[], np.ndarray]] = {"mask": lambda: run_whole(True), "blocks": lambda: run_whole(False)}
    ways |= {f"segments of {size}": lambda size=size: run_segments(size) for size in SEGMENTS}
    wanted, slopes = gradient(run_flattened)
    found = {}
    for name, run in ways.items():
        values_E, got = gradient(run)
        found[name] = max(float(np.abs(values_E - wanted).max()), find_gap(got, slopes))
    return found


@pytest.mark.parametrize(("dtype", "gap"), [("float64", 1e-13), ("float32", 2e-5)])
def test_every_way_to_train_a_tree_is_the_flattened_one(tmp_path: Path, dtype: str, gap: float) -> None:
    (found,) = run_world(1, tmp_path, compare_exactly, dtype)
    assert len(found) == 2 + len(SEGMENTS)
    assert all(value < gap for value in found.values()), found


def train_in_segments(rank: int, world: Path, layout: Layout, segment_tokens: int) -> dict[str, Any]:
    from gyre.algo.objective import ObjectiveSettings
    from gyre.train.groups import make_data_groups
    from gyre.train.replica import OptimizerSettings, Replica

    path = write_model(world / "model", "qwen3", tied=True)
    groups = make_data_groups(1, layout)
    replica = Replica.build(
        path, layout, groups, OptimizerSettings(learning_rate=1e-3), is_core=True, segment_tokens=segment_tokens
    )
    objective = ObjectiveSettings(clip_low=CLIP_LOW, clip_high=CLIP_HIGH)
    rows = make_deep_rows()
    rows = [replace(row, behavior_logprobs=x) for row, x in zip(rows, replica.logprobs(rows), strict=True)]
    stats = replica.micro_step(rows, objective)
    applied = replica.apply(len(rows))
    return {"weights": to_numpy(replica.export_hf()), "norm": applied.grad_norm, "entropy": stats.entropy}


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2)])
def test_a_replicas_step_in_segments_is_its_step_as_a_whole(tmp_path: Path, layout: Layout) -> None:
    whole = run_world(1, tmp_path, train_in_segments, Layout(), 0)[0]
    pieces = run_world(layout.num_ranks, tmp_path, train_in_segments, layout, 50)[0]
    assert pieces["norm"] == pytest.approx(whole["norm"], rel=1e-5)
    assert pieces["entropy"] == pytest.approx(whole["entropy"], abs=1e-5)
    moved = max(float(np.abs(pieces["weights"][name] - value).max()) for name, value in whole["weights"].items())
    assert moved < 2e-5


def test_packing_and_flattening_keep_every_target_once() -> None:
    for row in make_deep_rows():
        paths = flatten(row)
        assert sum(path.num_targets for path in paths) == row.num_targets
        assert all((path.visible_until == len(path.tokens)).all() for path in paths)
        assert [path for packed in pack(paths, 8, 100) for path in packed] == paths
