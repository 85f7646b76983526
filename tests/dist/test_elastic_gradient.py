"""The elastic gradient: which cells trained what, and when they joined, does not change the step.

Satellites start from NaN weights, join a batch in progress with the core's exported weights, and all cells claim
micro-steps from one shared counter. Everything is compared with one cell that runs every micro-step alone.
"""

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gyre.types import Layout, TreeRow
from tests.dist.replica_world import (
    CLIP_HIGH,
    CLIP_LOW,
    build_replica,
    find_gap,
    make_tree_row,
    run_world,
    to_numpy,
    with_behavior,
)
from tests.dist.test_replica import write_model
from tests.fakes.tiny_model import build_tiny_model

pytestmark = pytest.mark.timeout(400)

VOCAB_SIZE = 256
NUM_MICRO_STEPS = 14
ROWS_PER_MICRO_STEP = 2
# Well below the gradient's norm, so that a wrong norm shows in the weights.
CLIP_GRAD = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the core's leader saw: gradients before the step, weights after it, by Hugging Face name."""

    gradients: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]
    grad_norm: float


def make_micro_steps(rank: int, world: Path, model: Path) -> list[list[TreeRow]]:
    """Random trees whose behaviour log-probs are near the model's own, with every ninth rollout far off."""
    replica = build_replica(model, 1, Layout())
    rows = [make_tree_row(seed, VOCAB_SIZE) for seed in range(NUM_MICRO_STEPS * ROWS_PER_MICRO_STEP)]
    rows = [
        with_behavior(row, logprobs, shift=0.3 * (index % 9 == 0))
        for index, (row, logprobs) in enumerate(zip(rows, replica.logprobs(rows), strict=True))
    ]
    return [rows[i : i + ROWS_PER_MICRO_STEP] for i in range(0, len(rows), ROWS_PER_MICRO_STEP)]


def train_alone(rank: int, world: Path, model: Path, layout: Layout, micro_steps: list[list[TreeRow]]) -> Outcome:
    """Every micro-step on the one cell there is."""
    replica = build_replica(model, 1, layout, clip_grad=CLIP_GRAD)
    for micro_step in micro_steps:
        replica.micro_step(micro_step, _objective())
    return _finish(replica)


def train_elastically(
    rank: int, world: Path, model: Path, num_cells: int, layout: Layout, micro_steps: list[list[TreeRow]]
) -> Outcome | None:
    """One cell's part of the step. Cell c joins after the core has finished 2c micro-steps."""
    import torch.distributed as dist

    width = layout.num_ranks
    replica = build_replica(model, num_cells, layout, clip_grad=CLIP_GRAD)
    cell, is_leader = rank // width, rank % width == 0
    store = dist.FileStore(str(world / "queue"), num_cells * width)  # pyright: ignore[reportPrivateImportUsage]
    exposed = world / "weights"
    if cell == 0:
        named = replica.export_hf()
        if is_leader:
            exposed.write_bytes(pickle.dumps(named))
    else:
        store.wait([f"core-finished-{2 * cell}"])
        assert all(bool(tensor.isnan().all()) for _, tensor in replica.export_hf())
        replica.load_hf(dict(pickle.loads(exposed.read_bytes())))
        replica.begin_step()
    claimed: list[int] = []
    while (index := _claim(store, is_leader, replica)) < len(micro_steps):
        replica.micro_step(micro_steps[index], _objective())
        claimed.append(index)
        if is_leader:
            _keep_everyone_busy(store, cell, num_cells, len(claimed))
    replica.reduce(num_cells)
    everything: list[Any] = [None] * (num_cells * width)
    dist.all_gather_object(everything, claimed)
    assert all(everything[c * width] for c in range(num_cells)), f"an idle cell: {everything}"
    assert sorted(i for c in range(num_cells) for i in everything[c * width]) == list(range(len(micro_steps)))
    return _finish(replica) if cell == 0 else None


def _keep_everyone_busy(store: Any, cell: int, num_cells: int, num_done: int) -> None:
    """Free claims could leave nothing for a late cell: nobody goes on before the cells due by now have trained."""
    if cell == 0:
        store.set(f"core-finished-{num_done}", "")
        joined = min(num_done // 2, num_cells - 1)
    else:
        store.set(f"trained-{cell}", "")
        joined = num_cells - 1
    store.wait([f"trained-{satellite}" for satellite in range(1, joined + 1)])


def _objective() -> Any:
    from gyre.algo.objective import ObjectiveSettings

    return ObjectiveSettings(clip_low=CLIP_LOW, clip_high=CLIP_HIGH)


def _claim(store: Any, is_leader: bool, replica: Any) -> int:
    """The leader claims for its cell; the cell follows."""
    import torch
    import torch.distributed as dist

    index = torch.tensor([store.add("next", 1) - 1 if is_leader else -1])
    dist.broadcast(index, dist.get_process_group_ranks(replica.groups.cell)[0], group=replica.groups.cell)
    return int(index)


def _finish(replica: Any) -> Outcome:
    gradients = to_numpy(replica.export_gradients())
    applied = replica.apply(NUM_MICRO_STEPS * ROWS_PER_MICRO_STEP)
    named = replica.export_hf()
    weights = to_numpy(named)
    # The step's weights survive a load: cutting and joining is exact in this layout.
    whole = [dict(named)]
    if replica.groups.cell.size() > 1:
        import torch.distributed as dist

        dist.broadcast_object_list(whole, 0, group=replica.groups.cell)
    replica.load_hf(whole[0])
    again = to_numpy(replica.export_hf())
    assert all(np.array_equal(again[name], value) for name, value in weights.items())
    return Outcome(gradients=gradients, weights=weights, grad_norm=applied.grad_norm)


def write_policy(folder: Path, kind: str) -> Path:
    """A tiny dense model, one with tied embeddings, or one of experts, of the rows' vocabulary."""
    if kind == "qwen3_moe":
        return write_model(folder, kind, tied=False, vocab_size=VOCAB_SIZE)
    return build_tiny_model(folder, tie_word_embeddings=kind == "tied").path


@pytest.mark.parametrize(
    ("kind", "num_cells", "layout"),
    [
        ("qwen3", 3, Layout()),
        ("qwen3", 2, Layout(tp=2)),
        ("tied", 2, Layout(pp=2)),
        ("qwen3_moe", 2, Layout(tp=2, ep=2)),
    ],
)
def test_cells_that_join_a_step_in_progress_give_the_step_of_one_cell(
    tmp_path: Path, kind: str, num_cells: int, layout: Layout
) -> None:
    model = write_policy(tmp_path / "model", kind)
    (micro_steps,) = run_world(1, tmp_path, make_micro_steps, model)
    alone = run_world(layout.num_ranks, tmp_path, train_alone, model, layout, micro_steps)[0]
    num_ranks = num_cells * layout.num_ranks
    elastic = run_world(num_ranks, tmp_path, train_elastically, model, num_cells, layout, micro_steps)[0]
    assert find_gap(elastic.gradients, alone.gradients) < 1e-6
    assert elastic.grad_norm == pytest.approx(alone.grad_norm, rel=1e-6)
    assert _find_largest_move(elastic.weights, alone.weights) < 2e-5


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("qwen3", Layout(tp=2)),
        ("qwen3", Layout(pp=2)),
        ("tied", Layout(tp=2, pp=2)),
        ("qwen3_moe", Layout(tp=2, ep=2)),
        ("qwen3_moe", Layout(pp=2)),
    ],
)
def test_a_layout_changes_neither_gradient_nor_norm_nor_clipped_step(tmp_path: Path, kind: str, layout: Layout) -> None:
    model = write_policy(tmp_path / "model", kind)
    (micro_steps,) = run_world(1, tmp_path, make_micro_steps, model)
    (one,) = run_world(1, tmp_path, train_alone, model, Layout(), micro_steps)
    two = run_world(layout.num_ranks, tmp_path, train_alone, model, layout, micro_steps)[0]
    # The gradients of the heads' norms, and of embeddings tied across stages, are partial sums until the step.
    partial = ("q_norm.weight", "k_norm.weight", *(["embed_tokens.weight"] if kind == "tied" else []))
    names = [name for name in one.gradients if not name.endswith(partial)]
    # Row-parallel products are summed in another order; these weights are wide, which shows it.
    assert find_gap({n: two.gradients[n] for n in names}, {n: one.gradients[n] for n in names}) < 5e-6
    assert one.grad_norm > 2 * CLIP_GRAD
    assert two.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)
    assert _find_largest_move(two.weights, one.weights) < 2e-5


def _find_largest_move(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    return max(float(np.abs(one[name] - value).max()) for name, value in other.items())
