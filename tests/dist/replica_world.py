"""Small gloo worlds for replica tests, forked from one preloaded server, and rows with a flattened reference.

A world function runs on every rank as `function(rank, folder, *arguments)`; what it returns comes back by rank.
Functions must be importable (top level of a test module), and what they return must pickle.
"""

import faulthandler
import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np

from gyre.algo.rows import decode_rows, encode_rows
from gyre.tree.sample import layout_row, select_paths
from gyre.tree.tree import Tree
from gyre.types import FinishReason, Int32, Layout, Sample, TreeRow, VersionSpan

# A world takes seconds on an idle machine; the deadlines leave room for a crowded one.
WORLD_DEADLINE_S = 200.0
COLLECTIVE_DEADLINE_S = 150.0
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
        running = list(ranks)
        while running:
            # The first rank that fails ends the world: the others would wait for it.
            ended = wait([process.sentinel for process in running], timeout=WORLD_DEADLINE_S)
            assert ended, f"a world of {num_ranks} did not end within {WORLD_DEADLINE_S} s"
            assert not any(process.exitcode for process in running), _read_errors(world)
            running = [process for process in running if process.is_alive()]
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
    stacks = (world / f"error-stacks-{rank}").open("w")
    # Where each rank stood, should one of them hang until gloo gives up.
    faulthandler.dump_traceback_later(COLLECTIVE_DEADLINE_S - 10.0, file=stacks)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{world}/rendezvous",
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=COLLECTIVE_DEADLINE_S),
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


def make_tree_row(seed: int, vocab_size: int, *, num_turns: int = 4, longest: int = 9) -> TreeRow:
    """A random rollout: turns are sampled after new context at random places of its tree; every path is selected.

    It went over the wire once. Behaviour log-probs are placeholders until `with_behavior`.
    """
    rng = np.random.default_rng(seed)
    tree, nodes = Tree(), list[int | None]([None])
    for _ in range(num_turns):
        place = nodes[int(rng.integers(len(nodes)))]
        context = tree.add_context(place, _draw_tokens(rng, vocab_size, longest))
        tokens = _draw_tokens(rng, vocab_size, longest)
        spans = (VersionSpan(start=0, end=len(tokens), version=0),)
        zeros = np.zeros(len(tokens), np.float32)
        sample = Sample(tokens=tokens, logprobs=zeros, spans=spans, finish=FinishReason.STOP)
        nodes.append(tree.add_sampled(context, sample))
    selection = select_paths(tree, max_paths=num_turns, seed=seed)
    row = layout_row(tree, selection, rollout=f"0.{seed}", advantage=float(rng.normal()))
    assert row is not None
    return decode_rows(encode_rows([row]))[0]


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


def _draw_tokens(rng: np.random.Generator, vocab_size: int, longest: int) -> Int32:
    return rng.integers(0, vocab_size, int(rng.integers(2, longest + 1))).astype(np.int32)
