"""Warm up the quickstart's policy: `python -m gyre.program.warm OUT`.

Demonstrations with mostly bad habits are executed, a tokenizer is learned from them, and a small Qwen3 is
trained on them by supervised steps of the same replica that later trains it by reward. None of the held-out
tasks is demonstrated. One process, no engine; a few minutes on two cores. Everything follows from --seed, up to
the rounding of the machine.
"""

import argparse
import json
import logging
import random
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from gyre.program.warm_text import END, PAD, Lesson, encode, train_tokenizer, write_tokenizer
from gyre.tasks.shell import Kind, draw, draw_split
from gyre.tasks.shell_demos import Demonstration, Habits, demonstrate, script
from gyre.train.folder import write_hf_folder
from gyre.train.groups import make_data_groups
from gyre.train.replica import Replica
from gyre.train.settings import OptimizerSettings
from gyre.train.supervised import SupervisedRow, nll_micro_step
from gyre.types import Layout

log = logging.getLogger(__name__)

VOCAB_SIZE = 640
TOLD_EVERY_STEPS = 25
RAMP_STEPS = 30
LAST_RATE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmSettings:
    """How long and how hard. The rate rises over RAMP_STEPS and then falls linearly to a tenth."""

    seed: int = 0
    steps: int = 600
    batch: int = 32
    learning_rate: float = 3e-3
    demonstrations: int = 6000
    held_out: int = 64
    task_seed: int = 0
    threads: int = 1


def model_config(vocab_size: int, end_id: int, pad_id: int) -> dict[str, object]:
    """config.json of the policy: 3 layers of width 128, 0.6 million parameters."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocab_size,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "initializer_range": 0.05,
        "torch_dtype": "float32",
        "eos_token_id": end_id,
        "pad_token_id": pad_id,
    }


def make_demonstrations(settings: WarmSettings, habits: Habits) -> list[Demonstration]:
    """Executed demonstrations, the kinds in turn, of tasks that are not held out."""
    _, held_out = draw_split(settings.task_seed, num_train=0, num_held_out=settings.held_out)
    hidden = {task.instruction for task in held_out}

    def make(index: int) -> Demonstration:
        rng = random.Random(f"{settings.seed} demonstration {index}")
        task = draw(rng, list(Kind)[index % len(Kind)])
        while task.instruction in hidden:
            task = draw(rng, task.kind)
        return demonstrate(task, script(task, rng, habits))

    with ThreadPoolExecutor(settings.threads) as pool:
        return list(pool.map(make, range(settings.demonstrations)))


def rate_at(step: int, settings: WarmSettings) -> float:
    """Learning rate of supervised step `step` (0 is the first)."""
    ramp = min(1.0, (step + 1) / RAMP_STEPS)
    return settings.learning_rate * ramp * (1 - (1 - LAST_RATE) * step / settings.steps)


def fit(replica: Replica, lessons: Sequence[Lesson], settings: WarmSettings) -> None:
    """Supervised steps on random batches; each step's loss is the weighted mean over its tokens."""
    rng = random.Random(f"{settings.seed} batches")
    for step in range(settings.steps):
        batch = rng.sample(lessons, settings.batch)
        total = sum(float(lesson.weights.sum()) for lesson in batch)
        rows = [SupervisedRow(tokens=lesson.tokens, weights=lesson.weights / total) for lesson in batch]
        replica.set_learning_rate(rate_at(step, settings))
        replica.begin_step()
        stats = nll_micro_step(replica, rows)
        replica.apply(1)
        if (step + 1) % TOLD_EVERY_STEPS == 0 or step + 1 == settings.steps:
            log.info("step=%d loss=%.4f", step + 1, stats.loss)


def warm_up(out: Path, settings: WarmSettings, habits: Habits) -> None:
    """Write the warmed-up policy to the Hugging Face folder `out`, replacing it."""
    demonstrations = make_demonstrations(settings, habits)
    mean = sum(each.reward for each in demonstrations) / len(demonstrations)
    log.info("demonstrations=%d mean_reward=%.3f", len(demonstrations), mean)
    tokenizer = train_tokenizer(demonstrations, VOCAB_SIZE)
    lessons = [encode(tokenizer, each.messages) for each in demonstrations]
    end_id, pad_id = tokenizer.token_to_id(END), tokenizer.token_to_id(PAD)
    assert end_id is not None and pad_id is not None, "the tokenizer was trained with both"
    config = model_config(VOCAB_SIZE, end_id, pad_id)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with tempfile.TemporaryDirectory(prefix="gyre-warm-") as name:
            bare = Path(name) / "bare"
            bare.mkdir()
            (bare / "config.json").write_text(json.dumps(config))
            replica = Replica.build(
                bare,
                Layout(),
                make_data_groups(1, Layout()),
                OptimizerSettings(learning_rate=settings.learning_rate),
                is_core=True,
                threads=settings.threads,
                seed=settings.seed,
            )
            fit(replica, lessons, settings)
            out.parent.mkdir(parents=True, exist_ok=True)
            tokenizer_files = write_tokenizer(tokenizer, Path(name))
            write_hf_folder(out, config, dict(replica.export_hf()), tokenizer_files)
    finally:
        dist.destroy_process_group()
    log.info("policy=%s", out)


def main(argv: list[str]) -> int:
    """`python -m gyre.program.warm configs/quickstart/policy --seed 0`."""
    default = WarmSettings()
    parser = argparse.ArgumentParser(prog="python -m gyre.program.warm", description="Warm up the quickstart's policy.")
    parser.add_argument("out", type=Path, help="Hugging Face folder to write")
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--steps", type=int, default=default.steps, help="supervised steps")
    parser.add_argument("--demonstrations", type=int, default=default.demonstrations)
    parser.add_argument("--threads", type=int, default=default.threads)
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("megatron").setLevel(logging.WARNING)
    settings = WarmSettings(seed=args.seed, steps=args.steps, demonstrations=args.demonstrations, threads=args.threads)
    warm_up(args.out, settings, Habits())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
