"""The groups of a rank: its cell, itself, the training prefixes, and the control group of the leaders.

All of them are made once, in one order on all ranks. Because cells join training in order, membership is always
a prefix of the cells, so one group for each prefix and each model-parallel coordinate covers every membership.
Control runs over gloo on any device and is used by one thread of a leader; data groups are the main thread's.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, cast

import torch
import torch.distributed as dist

from gyre.errors import RunError
from gyre.fabric.roll_call import await_marks, erase_mark, leave_mark
from gyre.types import Duty

_DUTIES = list(Duty)


class CellPlace(Protocol):
    """What is needed of a placed cell: its ranks in order, the leader first."""

    @property
    def ranks(self) -> Sequence[int]:
        """Global ranks of the cell."""
        ...


class Placement(Protocol):
    """What is needed of a placement: cells of equal width that are blocks of the ranks, in order."""

    @property
    def cells(self) -> Sequence[CellPlace]:
        """All cells, the core first."""
        ...

    def digest(self) -> str:
        """Equal on two ranks if and only if their placements are."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DataGroups:
    """The data groups of one rank.

    `cell` has all ranks of its cell, leader first; `self_` has this rank alone. `prefix[k]` joins the ranks of
    this coordinate in cells [0, k), for each k >= 2 with this cell among them. `core_peer_rank` is the global
    rank of cell 0 with the same coordinate.
    """

    cell: dist.ProcessGroup
    self_: dist.ProcessGroup
    prefix: Mapping[int, dist.ProcessGroup]
    rank_in_cell: int
    core_peer_rank: int


class Groups:
    """Data groups of any rank; on a leader also the control group."""

    def __init__(
        self,
        *,
        data: DataGroups,
        control: dist.ProcessGroup | None,
        leaders: Sequence[int],
        store: dist.Store,
        rank: int,
        control_timeout_s: float,
    ) -> None:
        self.data = data
        self._control, self._leaders, self._rank = control, tuple(leaders), rank
        self._store, self._timeout_s = store, control_timeout_s
        self._last_epoch: int | None = None

    @classmethod
    def build(
        cls, placement: Placement, *, store: dist.Store, control_timeout_s: float, data_timeout_s: float
    ) -> "Groups":
        """Collective over the world: every rank calls it once with equal placements. `store` is for roll calls."""
        rank = dist.get_rank()
        cells = [list(cell.ranks) for cell in placement.cells]
        leaders = [ranks[0] for ranks in cells]
        timeout = timedelta(seconds=data_timeout_s)
        control = new_group(leaders, backend="gloo", timeout=timedelta(seconds=control_timeout_s), group_desc="control")
        return cls(
            data=_build_data_groups(cells, rank, timeout),
            control=control if rank in leaders else None,
            leaders=leaders,
            store=store,
            rank=rank,
            control_timeout_s=control_timeout_s,
        )

    def agree_roles(self, epoch: int, duties: list[str]) -> list[str]:
        """Collective over the control group of leaders: agree role epoch `epoch`; returns duty by cell.

        Rank 0's vector is what holds; each leader checks it against the order it was given itself. Epochs may
        not go back. Raises DeadlineError with the leaders that did not come, RunError with those that were given
        another order.
        """
        assert self._control is not None, "only leaders agree roles"
        assert len(duties) == len(self._leaders), (len(duties), len(self._leaders))
        assert self._last_epoch is None or epoch > self._last_epoch, (epoch, self._last_epoch)
        leave_mark(self._store, _epoch_name(epoch), self._rank)
        await_marks(self._store, _epoch_name(epoch), self._leaders, timeout_s=self._timeout_s)
        vector = torch.tensor([epoch, *(_DUTIES.index(Duty(duty)) for duty in duties)], dtype=torch.int64)
        mine = _digest(vector)
        dist.broadcast(vector, src=self._leaders[0], group=self._control)
        theirs = [torch.empty(1, dtype=torch.int64) for _ in self._leaders]
        dist.all_gather(theirs, mine, group=self._control)
        wanted = int(_digest(vector))
        others = [leader for leader, digest in zip(self._leaders, theirs, strict=True) if int(digest) != wanted]
        if others:
            raise RunError(f"role epoch {epoch}: ranks {others} were given another order than rank {self._leaders[0]}")
        # Whoever is here has passed the epoch before, so its marks are no longer read.
        if self._last_epoch is not None:
            erase_mark(self._store, _epoch_name(self._last_epoch), self._rank)
        self._last_epoch = epoch
        return [_DUTIES[code].value for code in vector[1:].tolist()]


def new_group(
    ranks: list[int],
    *,
    timeout: timedelta,
    group_desc: str,
    backend: str | None = None,
    use_local_synchronization: bool = False,
) -> dist.ProcessGroup:
    """Collective over the world, or over `ranks` with local synchronisation: `dist.new_group`, typed.

    A rank that is no member gets torch's placeholder, which must not be used.
    """
    return cast(
        dist.ProcessGroup,
        dist.new_group(
            ranks,
            timeout=timeout,
            backend=backend,
            use_local_synchronization=use_local_synchronization,
            group_desc=group_desc,
        ),
    )


def _epoch_name(epoch: int) -> str:
    return f"role epoch {epoch}"


def _digest(vector: torch.Tensor) -> torch.Tensor:
    """63 bits of SHA-256 of an integer vector, as an int64 tensor [1]."""
    data = hashlib.sha256(json.dumps(vector.tolist()).encode()).digest()
    return torch.tensor([int.from_bytes(data[:8], "big") >> 1], dtype=torch.int64)


def _build_data_groups(cells: list[list[int]], rank: int, timeout: timedelta) -> DataGroups:
    """Collective over the world."""
    width = len(cells[0])
    cell, rank_in_cell = next((index, ranks.index(rank)) for index, ranks in enumerate(cells) if rank in ranks)
    cell_groups = [new_group(ranks, timeout=timeout, group_desc="cell") for ranks in cells]
    # A group of one exchanges nothing, so each rank makes only its own: 1,536 world-wide rounds are saved.
    alone = new_group([rank], timeout=timeout, use_local_synchronization=True, group_desc="self")
    prefix: dict[int, dist.ProcessGroup] = {}
    for members in range(2, len(cells) + 1):
        for coordinate in range(width):
            group = new_group(
                [ranks[coordinate] for ranks in cells[:members]], timeout=timeout, group_desc=f"prefix {members}"
            )
            if coordinate == rank_in_cell and cell < members:
                prefix[members] = group
    return DataGroups(
        cell=cell_groups[cell],
        self_=alone,
        prefix=prefix,
        rank_in_cell=rank_in_cell,
        core_peer_rank=cells[0][rank_in_cell],
    )
