"""The process groups a replica works in, made once by all ranks in one order.

Cells are contiguous blocks of ranks. A cell's model-parallel group spans the whole cell; the gradient groups
join the ranks of one model-parallel coordinate over a prefix of the cells, because cells join training in order,
so that prebuilt groups cover every membership.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist

from gyre.types import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class DataGroups:
    """The groups of one rank.

    `cell` has all ranks of its cell, leader first; `self_` has this rank alone. `prefix[k]` joins the ranks of
    this coordinate in cells [0, k), for each k >= 2 with this cell among them. `core_peer_rank` is the global rank
    of cell 0 with the same coordinate.
    """

    cell: dist.ProcessGroup
    self_: dist.ProcessGroup
    prefix: Mapping[int, dist.ProcessGroup]
    rank_in_cell: int
    core_peer_rank: int


def make_data_groups(num_cells: int, layout: Layout) -> DataGroups:
    """Collective over the world: every rank calls it once. The world is `num_cells` cells of `layout`."""
    rank, world, width = dist.get_rank(), dist.get_world_size(), layout.num_ranks
    assert world == num_cells * width, f"{world} ranks are not {num_cells} cells of {width}"
    cell, rank_in_cell = divmod(rank, width)
    cells = [list(range(index * width, (index + 1) * width)) for index in range(num_cells)]
    cell_groups = [dist.new_group(ranks) for ranks in cells]
    self_groups = [dist.new_group([index]) for index in range(world)]
    prefix: dict[int, dist.ProcessGroup] = {}
    for members in range(2, num_cells + 1):
        for coordinate in range(width):
            group = dist.new_group([ranks[coordinate] for ranks in cells[:members]])
            if coordinate == rank_in_cell and cell < members:
                prefix[members] = group
    return DataGroups(
        cell=cell_groups[cell],
        self_=self_groups[rank],
        prefix=prefix,
        rank_in_cell=rank_in_cell,
        core_peer_rank=rank_in_cell,
    )
