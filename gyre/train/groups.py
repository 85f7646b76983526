"""Data groups of a world that is nothing but cells of one layout in rank order.

A run builds its groups from its placement; warming up a policy and comparing replicas need no more than this.
"""

import hashlib
from dataclasses import dataclass

import torch.distributed as dist

from gyre.fabric.groups import DataGroups, Groups
from gyre.types import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cell:
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Blocks:
    """Cells that are blocks of the ranks, in order."""

    cells: tuple[_Cell, ...]

    def digest(self) -> str:
        return hashlib.sha256(repr(self.cells).encode()).hexdigest()


def make_data_groups(num_cells: int, layout: Layout, *, timeout_s: float = 120.0) -> DataGroups:
    """Collective over the world: every rank calls it once. The world is `num_cells` cells of `layout`.

    A collective of these groups that does not end within `timeout_s` fails.
    """
    width = layout.num_ranks
    assert dist.get_world_size() == num_cells * width, f"{dist.get_world_size()} ranks, {num_cells} cells of {width}"
    blocks = _Blocks(cells=tuple(_Cell(ranks=tuple(range(c * width, (c + 1) * width))) for c in range(num_cells)))
    # The store serves roll calls of the leaders, which such a world does not hold.
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    groups = Groups.build(blocks, store=store, control_timeout_s=timeout_s, data_timeout_s=timeout_s)
    return groups.data
