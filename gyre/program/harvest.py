"""From a finished group to micro-steps: advantages, bounded paths, rows, packing.

A rollout with no advantage contributes no gradient and is not trained on, but counts among the batch's
rollouts (N of the loss). Dropped rollouts are in neither.
"""

import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gyre.algo.advantage import group_advantages
from gyre.algo.packing import pack
from gyre.config.schema import Settings
from gyre.tree.sample import layout_row, select_paths
from gyre.tree.tree import Tree
from gyre.types import RolloutId, TreeRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A scored rollout: its tree and reward."""

    rollout: RolloutId
    tree: Tree
    reward: float
    task: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Harvest:
    """A group ready for training."""

    micro_steps: list[tuple[TreeRow, ...]]
    advantages: dict[RolloutId, float]
    num_rollouts: int
    tokens_trained: int
    tokens_shared: int
    staleness_sum: float


def harvest(finished: list[Finished], settings: Settings, *, step: int) -> Harvest:
    """Pack one group's scored rollouts, in order of their ids, for training at `step` (from version `step`).

    `staleness_sum` adds, over the trained tokens, how many versions before it each was sampled.
    """
    finished = sorted(finished, key=lambda one: one.rollout)
    rewards = np.array([one.reward for one in finished], dtype=np.float32)
    advantages = group_advantages(rewards, settings.trainer.advantage_scale)
    rows: list[TreeRow] = []
    for one, advantage in zip(finished, advantages, strict=True):
        if advantage == 0.0:
            continue
        selection = select_paths(
            one.tree,
            max_paths=settings.sampling.max_paths,
            priority=settings.sampling.path_priority,
            seed=zlib.crc32(f"{settings.run.seed}/{one.rollout}".encode()),
        )
        row = layout_row(one.tree, selection, rollout=one.rollout, advantage=float(advantage))
        if row is not None:
            rows.append(row)
    trainer = settings.trainer
    return Harvest(
        micro_steps=pack(rows, trainer.micro_step_rollouts, trainer.micro_step_tokens),
        advantages={one.rollout: float(a) for one, a in zip(finished, advantages, strict=True)},
        num_rollouts=len(finished),
        tokens_trained=sum(row.num_targets for row in rows),
        tokens_shared=sum(one.tree.shared_tokens for one in finished),
        staleness_sum=float(sum((step - row.versions).sum() for row in rows)),
    )
