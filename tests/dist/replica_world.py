"""Small gloo worlds for replica tests, forked from one preloaded server, and rows with a flattened reference.

A world function runs on every rank as `function(rank, folder, *arguments)`; what it returns comes back by rank.
Functions must be importable (top level of a test module), and what they return must pickle.
"""

import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np

from gyre.types import Layout, TreeRow

WORLD_DEADLINE_S = 120.0
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
CLIP_LOW, CLIP_HIGH = 0.1, 0.1


def run_world(num_ranks: int, folder: Path, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `function` returned on each rank of a fresh world. Raises AssertionError with a rank's traceback."""
    os.environ.update(ENVIRONMENT)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["gyre.train.supervised", "transformers.models.qwen3.modeling_qwen3"])
    world = folder / f"world-{len(list(folder.glob('world-*')))}"
    world.mkdir()
    ranks = [
        context.Process(target=_run_rank, args=(rank, num_ranks, world, function, arguments), daemon=True)
        for rank in range(num_ranks)
    ]
    for process in ranks:
        process.start()
    try:
        running = {process.sentinel: process for process in ranks}
        while running:
            ended = wait(list(running), timeout=WORLD_DEADLINE_S)
            assert ended, f"a world of {num_ranks} did not end within {WORLD_DEADLINE_S} s"
            for sentinel in ended:
                process = running.pop(sentinel)
                process.join()
                assert process.exitcode == 0, _read_errors(world)
    finally:
        for process in ranks:
            process.kill()
    return [pickle.loads((world / f"result-{rank}").read_bytes()) for rank in range(num_ranks)]


def _read_errors(world: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(world.glob("error-*"))) or "a rank died without a word"


def _run_rank(rank: int, num_ranks: int, world: Path, function: Callable[..., Any], arguments: tuple) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{world}/rendezvous",
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=60),
        )
        result = function(rank, world, *arguments)
        (world / f"result-{rank}").write_bytes(pickle.dumps(result))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        (world / f"error-{rank}").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        raise


def build_replica(model: Path, num_cells: int, layout: Layout, **optimizer: float) -> Any:
    """Collective over the world: this rank's replica."""
    import torch.distributed as dist

    from gyre.train.groups import make_data_groups
    from gyre.train.replica import OptimizerSettings, Replica

    groups = make_data_groups(num_cells, layout)
    settings = OptimizerSettings(**({"learning_rate": 1e-3} | optimizer))
    is_core = dist.get_rank() == groups.core_peer_rank
    return Replica.build(model, layout, groups, settings, is_core=is_core)


def to_numpy(named: list[tuple[str, Any]]) -> dict[str, np.ndarray]:
    """Tensors by name as arrays."""
    return {name: tensor.numpy().copy() for name, tensor in named}


def find_gap(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    """The largest difference over all tensors, relative to the largest entry of `other`."""
    assert one.keys() == other.keys()
    scale = max(float(np.abs(value).max()) for value in other.values())
    return max(float(np.abs(one[name] - other[name]).max()) for name in one) / scale


@dataclass(slots=True)
class _Segment:
    parent: int
    tokens: np.ndarray
    depth: int


def make_tree_row(seed: int, vocab_size: int, *, num_segments: int = 5, longest: int = 9) -> TreeRow:
    """A random tree: segments hang at the end of random earlier ones; about half of the edges are targets.

    Behaviour log-probs are placeholders until `with_behavior`.
    """
    rng = np.random.default_rng(seed)
    segments = [_Segment(-1, _draw_tokens(rng, vocab_size, longest), 0)]
    for _ in range(num_segments - 1):
        parent = int(rng.integers(len(segments)))
        depth = segments[parent].depth + len(segments[parent].tokens)
        segments.append(_Segment(parent, _draw_tokens(rng, vocab_size, longest), depth))
    order = _depth_first(segments)
    starts = dict(zip(order, np.cumsum([0] + [len(segments[i].tokens) for i in order]).tolist(), strict=False))
    tokens = np.concatenate([segments[i].tokens for i in order])
    until = np.concatenate([np.full(len(segments[i].tokens), _subtree_end(segments, starts, i)) for i in order])
    sources, targets = [], []
    for i in order:
        for offset, token in enumerate(segments[i].tokens):
            source = starts[i] + offset - 1
            if offset == 0:
                parent = segments[i].parent
                source = starts[parent] + len(segments[parent].tokens) - 1 if parent >= 0 else -1
            if source >= 0 and rng.random() < 0.5:
                sources.append(source)
                targets.append(token)
    return TreeRow(
        rollout=f"0.{seed}",
        advantage=float(rng.normal()),
        num_targets=len(sources),
        tokens=tokens.astype(np.int32),
        positions=np.concatenate([segments[i].depth + np.arange(len(segments[i].tokens)) for i in order]).astype(
            np.int32
        ),
        visible_until=until.astype(np.int32),
        edge_source=np.array(sources, np.int32),
        edge_token=np.array(targets, np.int32),
        behavior_logprobs=np.zeros(len(sources), np.float32),
        versions=np.zeros(len(sources), np.int32),
    )


def with_behavior(row: TreeRow, logprobs: np.ndarray, *, shift: float = 0.0) -> TreeRow:
    """The row as if the engine had sampled it with `logprobs`, less `shift` (a shift of 0.3 gives a ratio of 1.35)."""
    noise = np.random.default_rng(row.num_targets).normal(scale=1e-3, size=row.num_targets)
    return replace(row, behavior_logprobs=(logprobs - shift + noise).astype(np.float32))


def flatten_edges(row: TreeRow) -> list[np.ndarray]:
    """For each target the whole sequence of its path, ending in the target: nothing shared, nothing masked."""
    index = np.arange(len(row.tokens))
    sequences = []
    for source, token in zip(row.edge_source, row.edge_token, strict=True):
        path = index[(index <= source) & (source < row.visible_until)]
        assert row.positions[path].tolist() == list(range(len(path)))
        sequences.append(np.append(row.tokens[path], token))
    return sequences


def compute_reference_logprobs(model: Any, rows: list[TreeRow]) -> list[Any]:
    """Log-probs with gradient from a Hugging Face model on the flattened paths, one tensor a row."""
    import torch

    results = []
    for row in rows:
        sequences = flatten_edges(row)
        last = torch.tensor([len(sequence) - 2 for sequence in sequences])
        width = max(len(sequence) for sequence in sequences)
        ids = torch.tensor(np.stack([np.pad(s[:-1], (0, width - len(s))) for s in sequences]), dtype=torch.long)
        logits = model(ids).logits[torch.arange(len(sequences)), last]
        results.append(logits.log_softmax(-1)[torch.arange(len(sequences)), torch.tensor(row.edge_token).long()])
    return results


def _draw_tokens(rng: np.random.Generator, vocab_size: int, longest: int) -> np.ndarray:
    return rng.integers(0, vocab_size, int(rng.integers(2, longest + 1)))


def _depth_first(segments: list[_Segment]) -> list[int]:
    order, stack = [], [0]
    while stack:
        current = stack.pop()
        order.append(current)
        stack += [i for i, segment in enumerate(segments) if segment.parent == current]
    return order


def _subtree_end(segments: list[_Segment], starts: dict[int, int], index: int) -> int:
    ends = [starts[index] + len(segments[index].tokens)]
    ends += [_subtree_end(segments, starts, i) for i, segment in enumerate(segments) if segment.parent == index]
    return max(ends)
