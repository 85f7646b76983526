"""Tree training on one CPU thread: step time against flattened paths, and memory of very long rollouts.

A tiny Qwen3 (2 layers of width 256). For each shape `ideal` is the ratio of tokens, flattened to tree; `speedup` the
ratio of CPU times of one forward-backward, flattened paths packed in the faster of two ways; `of_ideal` the share of
the ideal that is reached. `peak_bytes_per_token` is the growth of the process's peak memory during a segmented
step, by tokens of the rollout, whose paths are at most 16K tokens long. `python -m bench train [time|memory]`.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from gyre.types import FinishReason, Sample, TreeRow, VersionSpan

VOCAB_SIZE, WIDTH, LAYERS = 512, 256, 2
SEGMENT_TOKENS = 1024
MEMORY_TOKENS = {"64k": 1 << 16, "256k": 1 << 18}
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 1 << 20,
    "tie_word_embeddings": False,
    "initializer_range": 0.05,
}
Part = tuple[int, int, int]
"""(index of the parent or -1, context tokens, sampled tokens)."""


def shapes() -> dict[str, list[Part]]:
    """Rollouts by the ratio of tokens that they would have flattened."""
    compaction = [(-1, 64, 0), *[(0, 160, 160)] * 3]
    forks = [(-1, 1024, 0), *[(0, 0, 256)] * 4]
    edits: list[Part] = [(-1, 384, 0)]
    trunk = 0
    for _ in range(10):
        edits += [(trunk, 90, 30), (trunk, 30, 30)]
        trunk = len(edits) - 2
    thinking: list[Part] = [(-1, 384, 0)]
    trunk = 0
    for _ in range(40):
        thinking += [(trunk, 0, 16), (trunk, 24, 0)]
        trunk = len(thinking) - 1
    return {"1.1": compaction, "2.5": forks, "5": edits, "16": thinking}


def make_row(parts: Sequence[Part], seed: int = 0) -> TreeRow:
    """The shape as a row of random tokens, all of whose paths are trained."""
    from gyre.tree.sample import layout_row, select_paths
    from gyre.tree.tree import Tree

    rng = np.random.default_rng(seed)
    tree, nodes = Tree(), []
    for parent, context, sampled in parts:
        at = nodes[parent] if parent >= 0 else None
        if context:
            at = tree.add_context(at, rng.integers(0, VOCAB_SIZE, context).astype(np.int32))
        if sampled:
            sample = Sample(
                tokens=rng.integers(0, VOCAB_SIZE, sampled).astype(np.int32),
                logprobs=np.full(sampled, -6.0, np.float32),
                spans=(VersionSpan(start=0, end=sampled, version=0),),
                finish=FinishReason.STOP,
            )
            at = tree.add_sampled(at, sample)
        nodes.append(at)
    row = layout_row(tree, select_paths(tree, max_paths=len(parts), seed=0), rollout="0.0", advantage=1.0)
    assert row is not None
    return row


def build_replica(segment_tokens: int) -> object:
    """One core cell of one rank with random weights."""
    import torch.distributed as dist

    from gyre.train.groups import make_data_groups
    from gyre.train.replica import Replica
    from gyre.train.settings import OptimizerSettings
    from gyre.types import Layout

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(CONFIG))
        return Replica.build(
            Path(name),
            Layout(),
            make_data_groups(1, Layout()),
            OptimizerSettings(learning_rate=1e-4),
            is_core=True,
            segment_tokens=segment_tokens,
        )


def cpu_seconds(act: Callable[[], None], repeats: int) -> float:
    """Least CPU time of several runs."""
    times = []
    for _ in range(repeats):
        began = time.process_time()
        act()
        times.append(time.process_time() - began)
    return min(times)


def measure_time() -> dict[str, float]:
    """`ideal_*`, `speedup_*`, `of_ideal_*` of every shape."""
    from gyre.algo.forest import flatten
    from gyre.algo.packing import pack

    replica = build_replica(0)
    found: dict[str, float] = {}

    def step(batches: Sequence[Sequence[TreeRow]]) -> None:
        for rows in batches:
            passed = replica.forward_targets(rows)
            replica.backward(passed, np.full(len(passed.values_E), 1e-3))
        replica.begin_step()

    for name, parts in shapes().items():
        row = make_row(parts)
        paths = flatten(row)
        ideal = sum(len(path.tokens) for path in paths) / len(row.tokens)
        tree = cpu_seconds(lambda row=row: step([[row]]), 3)
        ways = [pack(paths, 8, 16384), [[path] for path in paths]]
        flat = min(cpu_seconds(lambda way=way: step(way), 1) for way in ways)
        found[f"ideal_{name}"] = round(ideal, 3)
        found[f"speedup_{name}"] = round(flat / tree, 3)
        found[f"of_ideal_{name}"] = round(flat / tree / ideal, 3)
    return found


def long_parts(num_tokens: int) -> list[Part]:
    """Windows of 16K tokens from a shared prompt, each with short side branches, up to `num_tokens`."""
    parts: list[Part] = [(-1, 2048, 0)]
    total = 2048
    while total < num_tokens:
        parent = 0
        for _ in range(14):
            parts.append((parent, 640, 384))
            parts.append((len(parts) - 1, 64, 64))
            parent = len(parts) - 2
            total += 1152
    return parts


def measure_memory(num_tokens: int) -> dict[str, float]:
    """Peak memory of one segmented step of a rollout of about `num_tokens`, in a process of its own."""
    from gyre.algo.objective import ObjectiveSettings

    replica = build_replica(SEGMENT_TOKENS)
    objective = ObjectiveSettings(clip_low=0.1, clip_high=0.1)
    replica.micro_step([make_row(long_parts(4096))], objective)
    row = make_row(long_parts(num_tokens))
    before = memory_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    began = time.process_time()
    replica.micro_step([row], objective)
    return {
        "tokens": len(row.tokens),
        "peak_bytes": memory_bytes("VmHWM") - before,
        "cpu_s": round(time.process_time() - began, 1),
    }


def memory_bytes(key: str) -> int:
    """A figure of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) * 1024


def main() -> dict:
    """Everything, or the part that is named."""
    part = sys.argv[1] if len(sys.argv) > 1 else "all"
    if part.isdigit():
        return measure_memory(int(part))
    result: dict[str, object] = {}
    if part in ("all", "time"):
        result |= measure_time()
    if part in ("all", "memory"):
        peaks: dict[str, int] = {}
        for name, tokens in MEMORY_TOKENS.items():
            command = [sys.executable, "-m", "bench", "train", str(tokens)]
            done = subprocess.run(
                command, capture_output=True, text=True, env=dict(os.environ), check=True, timeout=900
            )
            one = json.loads(done.stdout.splitlines()[-1])
            peaks[name] = round(one["peak_bytes"] / one["tokens"])
            result |= {f"peak_mb_{name}": round(one["peak_bytes"] / 2**20), f"cpu_s_{name}": one["cpu_s"]}
        result["peak_bytes_per_token"] = peaks
    return result
