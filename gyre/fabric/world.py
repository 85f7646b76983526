"""All ranks of a run: how they meet, learn of each other and agree where each belongs.

Facts and digests are gathered in two levels, inside a node and then among the nodes' first ranks: a flat gloo
all_gather grows with the square of the ranks. A lost rank always means a new world, so nothing here is repaired.
"""

import logging
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from gyre.config.schema import Settings
from gyre.errors import DeadlineError, GyreError, PlacementError
from gyre.fabric.device import runs_on_cpu
from gyre.fabric.facts import collect_facts
from gyre.fabric.groups import Groups, Placement, new_group
from gyre.fabric.roll_call import await_marks, leave_mark
from gyre.types import RankFacts

log = logging.getLogger(__name__)

T = TypeVar("T")
P = TypeVar("P", bound=Placement)

START_TIMEOUT_S = 300.0
"""Slow nodes of one start may differ by minutes (container images)."""
TELL_EVERY_S = 10.0


class World:
    """This rank's view of the world. One a process."""

    def __init__(self, *, settings: Settings, store: dist.Store, rank: int, size: int, local_rank: int) -> None:
        """Use `join`."""
        self.rank, self.size, self.local_rank = rank, size, local_rank
        self._settings, self._store = settings, store
        self._on_cpu = runs_on_cpu(settings.placement.device)
        width = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.node = rank // width
        firsts = list(range(0, size, width))
        timeout = timedelta(seconds=settings.placement.control_timeout_s)
        ranks = list(range(self.node * width, min(size, (self.node + 1) * width)))
        self._in_node = new_group(
            ranks, backend="gloo", timeout=timeout, use_local_synchronization=True, group_desc=f"node {self.node}"
        )
        self._firsts = new_group(firsts, backend="gloo", timeout=timeout, group_desc="nodes")
        self._node_ranks, self._num_nodes = ranks, len(firsts)

    @classmethod
    def join(cls, settings: Settings, local_rank: int, *, timeout_s: float = START_TIMEOUT_S) -> "World":
        """Collective over the world: meet at torchrun's store and make the world group.

        Reads RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Rank 0 logs who is missing every
        ten seconds. Raises DeadlineError naming the missing ranks after `timeout_s`.
        """
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        try:
            store, _, _ = next(rendezvous("env://", rank, size, timeout=timedelta(seconds=timeout_s)))
        except dist.DistError as error:
            raise DeadlineError("meeting at the store", seconds=timeout_s, missing=str(error)) from error
        leave_mark(store, "start", rank)
        await_marks(
            store,
            "start",
            range(size),
            timeout_s=timeout_s,
            tell_every_s=TELL_EVERY_S if rank == 0 else None,
        )
        on_cpu = runs_on_cpu(settings.placement.device)
        if not on_cpu:
            torch.cuda.set_device(local_rank)
        dist.init_process_group(
            "gloo" if on_cpu else "cpu:gloo,cuda:nccl",
            store=dist.PrefixStore("world", store),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=settings.placement.data_timeout_s),
        )
        return cls(settings=settings, store=store, rank=rank, size=size, local_rank=local_rank)

    def share_text(self, name: str, text: str | None) -> str:
        """Every rank calls it; rank 0 gives the text that all get. Raises DeadlineError."""
        key = f"gyre/text/{name}"
        if self.rank == 0:
            assert text is not None, name
            self._store.set(key, text)
            return text
        wait_s = self._settings.placement.control_timeout_s
        try:
            self._store.wait([key], timedelta(seconds=wait_s))
        except dist.DistStoreError as error:
            raise DeadlineError(f"text {name} of rank 0", seconds=wait_s, missing="rank 0") from error
        return self._store.get(key).decode()

    def gather(self, value: T) -> list[T]:
        """Collective over the world: every rank's value, by rank. Values are pickled."""
        in_node: list[T] = [value] * len(self._node_ranks)
        dist.all_gather_object(in_node, value, group=self._in_node)
        nodes: list[list[T]] = [in_node] * self._num_nodes
        if self.rank == self._node_ranks[0]:
            dist.all_gather_object(nodes, in_node, group=self._firsts)
        dist.broadcast_object_list(nodes, src=self._node_ranks[0], group=self._in_node)
        return [one for node in nodes for one in node]

    def agree_placement(self, place: Callable[[Sequence[RankFacts]], P]) -> P:
        """Collective over the world: gather facts, place on every rank, compare the digests.

        `place` must be a pure function of the facts. Raises its error on all ranks, and PlacementError with the
        ranks whose placement differs from rank 0's.
        """
        facts = self.gather(collect_facts(rank=self.rank, local_rank=self.local_rank, on_cpu=self._on_cpu))
        placement, refusal = None, None
        try:
            placement = place(facts)
            verdict = placement.digest()
        except GyreError as error:
            refusal, verdict = error, f"{type(error).__name__}: {error}"
        verdicts = self.gather(verdict)
        others = [rank for rank, one in enumerate(verdicts) if one != verdicts[0]]
        if others:
            raise PlacementError(
                f"ranks {others} placed the same facts otherwise than rank 0 "
                f"({verdicts[others[0]][:80]} instead of {verdicts[0][:80]}); is their code or configuration another?"
            )
        if refusal is not None:
            raise refusal
        assert placement is not None
        return placement

    def build_groups(self, placement: Placement) -> Groups:
        """Collective over the world: the groups of every rank, in one order."""
        return Groups.build(
            placement,
            # Of its own: a wait on a store's connection blocks every other use of that connection.
            store=self._store.clone(),
            control_timeout_s=self._settings.placement.control_timeout_s,
            data_timeout_s=self._settings.placement.data_timeout_s,
        )

    def close(self) -> None:
        """Leave: all groups of this rank are gone. Others need not have finished."""
        dist.destroy_process_group()
