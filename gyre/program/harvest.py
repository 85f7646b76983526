"""From a finished group to micro-steps: advantages, bounded paths, rows, packing.

A rollout with no advantage contributes no gradient and is not trained on (unless a KL term asks for it), but counts
in what the loss is divided by: the batch's rollouts, or their targets. Dropped rollouts are in neither, and a group
that the filter leaves out is not in the batch at all.
"""

import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gyre.algo.advantage import group_advantages
from gyre.algo.objective import is_token_mean
from gyre.algo.packing import pack
from gyre.algo.staleness import keep_newest
from gyre.config.choices import GroupFilter, MixedVersions
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
    """A group ready for training. `num_rollouts` and `num_targets` are its share of the batch's divisors.

    Targets are counted only for an objective that divides by them.
    """

    micro_steps: list[tuple[TreeRow, ...]]
    advantages: dict[RolloutId, float]
    num_rollouts: int
    num_targets: int
    tokens_trained: int
    tokens_shared: int
    staleness_sum: float


def harvest(finished: list[Finished], settings: Settings, *, step: int) -> Harvest:
    """Pack one group's scored rollouts, in order of their ids, for training at `step` (from version `step`).

    `staleness_sum` adds, over the trained tokens, how many versions before it each was sampled.
    """
    finished = sorted(finished, key=lambda one: one.rollout)
    trainer = settings.trainer
    rewards = np.array([one.reward for one in finished], dtype=np.float32)
    advantages = group_advantages(rewards, trainer.advantage_scale)
    is_left_out = trainer.group_filter is GroupFilter.INFORMATIVE and not advantages.any()
    has_kl, counts_targets = trainer.kl_coefficient > 0, is_token_mean(trainer.objective)
    rows: list[TreeRow] = []
    num_targets = 0
    for one, advantage in zip(finished, advantages, strict=True):
        is_trained = advantage != 0.0 or has_kl
        if is_left_out or not (is_trained or counts_targets):
            continue
        row = _lay_out(one, float(advantage), settings)
        if row is None:
            continue
        num_targets += row.num_targets
        if is_trained:
            rows.append(row)
    return Harvest(
        micro_steps=pack(rows, trainer.micro_step_rollouts, trainer.micro_step_tokens),
        advantages={one.rollout: float(a) for one, a in zip(finished, advantages, strict=True)},
        num_rollouts=0 if is_left_out else len(finished),
        num_targets=num_targets,
        tokens_trained=sum(row.num_targets for row in rows),
        tokens_shared=sum(one.tree.shared_tokens for one in finished),
        staleness_sum=float(sum((step - row.versions).sum() for row in rows)),
    )


def _lay_out(one: Finished, advantage: float, settings: Settings) -> TreeRow | None:
    """The rollout's row, if anything in it can be trained."""
    selection = select_paths(
        one.tree,
        max_paths=settings.sampling.max_paths,
        priority=settings.sampling.path_priority,
        seed=zlib.crc32(f"{settings.run.seed}/{one.rollout}".encode()),
    )
    row = layout_row(one.tree, selection, rollout=one.rollout, advantage=advantage)
    if row is not None and settings.trainer.mixed_versions is MixedVersions.MASK:
        return keep_newest(row)
    return row
