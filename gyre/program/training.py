"""What every rank of a training cell does, in the same order: join a step, run micro-steps, close it.

The cell's leader decides and relays; followers repeat. A satellite joins with the core's exposed weights and
zeroed gradients; the core keeps its own. Gradients are sums of absolutely weighted micro-steps, so it does
not matter which cell ran which.
"""

import logging
import time
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from gyre.algo.rows import decode_rows
from gyre.config.schema import Settings
from gyre.fabric.groups import DataGroups
from gyre.fabric.weights import pull_weights
from gyre.train.replica import ApplyStats, MicroStepStats, ObjectiveSettings, Replica
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


class TrainingCell:
    """One rank's part of its cell's training."""

    def __init__(self, *, replica: Replica, groups: DataGroups, settings: Settings, cell: int) -> None:
        self.replica, self.cell = replica, cell
        self._groups, self._settings = groups, settings
        self._objective = ObjectiveSettings(
            clip_low=settings.trainer.clip_low, clip_high=settings.trainer.clip_high
        )
        self._version = -1

    @property
    def is_core(self) -> bool:
        """Whether this is cell 0."""
        return self.cell == 0

    def join(self, order: Join) -> None:
        """Hold the weights of `order.version` and zeroed gradients."""
        if not self.is_core and order.version != self._version:
            deadline = time.monotonic() + self._settings.engine.load_timeout_s
            self.replica.load_hf(dict(pull_weights(order.weights, deadline)))
            self._version = order.version
        self.replica.begin_step()

    def work(self, order: MicroStepWork) -> MicroStepStats:
        """Accumulate one micro-step's gradient."""
        return self.replica.micro_step(decode_rows(order.rows), self._objective)

    def close(self, order: StepClosed) -> ApplyStats | None:
        """Reduce into the core, which applies the step. None on satellites and cells that are no members."""
        if self.cell >= order.members:
            return None
        if order.members > 1:
            self.replica.reduce(order.members)
        return self.replica.apply(order.num_rollouts) if self.is_core else None

    def checkpoint(self, folder: Path, step: int) -> Path:
        """Save the core's weights and optimizer state after `step` steps; prune old checkpoints."""
        path = folder / f"step-{step:06d}"
        self.replica.save_checkpoint(path, step)
        return path


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
