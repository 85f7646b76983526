"""What every rank of a training cell does, in the same order: join a step, run micro-steps, close it.

The cell's leader decides and relays; followers repeat. A satellite joins with the core's exposed weights and
zeroed gradients; the core keeps its own. Gradients are sums of absolutely weighted micro-steps, so it does
not matter which cell ran which.
"""

import logging
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from gyre.algo.objective import ObjectiveSettings, batch_divisor
from gyre.algo.rows import decode_rows
from gyre.config.schema import Settings
from gyre.fabric.weights import pull_weights
from gyre.train.groups import DataGroups
from gyre.train.replica import ApplyStats, MicroStepStats, Replica
from gyre.wire.messages import MicroStepWork, StepClosed

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Relayed: join `step` with the weights described."""

    step: int
    version: int
    weights: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """Relayed while a cell serves, so that no follower waits without a word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quit:
    """Relayed: the cell ends."""


Relayed = Join | MicroStepWork | StepClosed | Idle | Quit


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """A step the core applied: its new weights by Hugging Face name (on the leader) and the checkpoint's name."""

    stats: ApplyStats
    tensors: list[tuple[str, Tensor]]
    checkpoint: str


class TrainingCell:
    """One rank's part of its cell's training. `folder` takes the core's checkpoints."""

    def __init__(self, *, replica: Replica, settings: Settings, cell: int, folder: Path) -> None:
        self._replica, self._cell, self._settings, self._folder = replica, cell, settings, folder
        trainer = settings.trainer
        self._objective = ObjectiveSettings(
            objective=trainer.objective,
            clip_low=trainer.clip_low,
            clip_high=trainer.clip_high,
            token_constant=trainer.token_constant,
            importance=trainer.importance,
            importance_cap=trainer.importance_cap,
            mixed_versions=trainer.mixed_versions,
            kl_coefficient=trainer.kl_coefficient,
        )
        self._version = -1

    @property
    def is_core(self) -> bool:
        """Whether this is cell 0."""
        return self._cell == 0

    def join(self, order: Join) -> None:
        """Hold the weights of `order.version` and zeroed gradients."""
        if not self.is_core and order.version != self._version:
            deadline = time.monotonic() + self._settings.engine.load_timeout_s
            self._replica.load_hf(dict(pull_weights(order.weights, deadline)))
        self._version = order.version
        self._replica.begin_step()

    def work(self, order: MicroStepWork) -> MicroStepStats:
        """Accumulate one micro-step's gradient."""
        return self._replica.micro_step(decode_rows(order.rows), self._objective, self._version)

    def close(self, order: StepClosed) -> Applied | None:
        """Reduce into the core, which applies the step. None on satellites and cells that are no members."""
        if self._cell >= order.members:
            return None
        if order.members > 1:
            self._replica.reduce(order.members)
        if not self.is_core:
            return None
        divisor = batch_divisor(self._objective.objective, order.num_rollouts, order.num_targets)
        stats = self._replica.apply(divisor)
        checkpoint = self._checkpoint(order.step + 1, is_asked=order.checkpoint)
        return Applied(stats=stats, tensors=self._replica.export_hf(), checkpoint=checkpoint)

    def _checkpoint(self, version: int, *, is_asked: bool) -> str:
        """Save the state after `version` steps if due or asked, and drop the oldest. Returns its name or ""."""
        trainer = self._settings.trainer
        is_due = not version % trainer.checkpoint_every_steps or version == self._settings.run.steps
        if not is_due and not is_asked:
            return ""
        path = self._folder / f"step-{version:06d}"
        self._replica.save_checkpoint(path, version)
        for old in sorted(self._folder.glob("step-*"))[: -trainer.keep_checkpoints]:
            shutil.rmtree(old, ignore_errors=True)
        return path.name


class CellRelay:
    """Carries the leader's orders to the other ranks of its cell, over the cell's group."""

    def __init__(self, groups: DataGroups, *, is_leader: bool) -> None:
        self._group, self._is_leader = groups.cell, is_leader
        self._size = dist.get_world_size(groups.cell)
        self._source = dist.get_global_rank(groups.cell, 0)

    @property
    def is_alone(self) -> bool:
        """Whether the cell has no other rank."""
        return self._size == 1

    def send(self, order: Relayed) -> None:
        """Collective over the cell, leader's side."""
        if self._size > 1:
            dist.broadcast_object_list([order], src=self._source, group=self._group)

    def recv(self) -> Relayed:
        """Collective over the cell, follower's side. The group's time-out bounds the wait."""
        box: list[Relayed | None] = [None]
        dist.broadcast_object_list(box, src=self._source, group=self._group)
        assert box[0] is not None
        return box[0]
