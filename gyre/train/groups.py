"""The process groups a replica works in, made once by all ranks in one order.

Cells are contiguous blocks of ranks. A cell's model-parallel group spans the whole cell; the gradient groups
join the ranks of one model-parallel coordinate over a prefix {0..k-1} of the cells, because cells join training
in order, so K prebuilt groups cover every membership.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist

from gyre.types import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class DataGroups:
    """What one rank knows of the groups. All ranks named here are global ranks.

    `prefix[k]` is the group of this coordinate over cells [0, k); it is there only if this cell is among them
    and k >= 2. `core_peer_rank` is the rank of cell 0 with the same coordinate.
    """

    cell: int
    num_cells: int
    rank_in_cell: int
    cell_ranks: tuple[int, ...]
    core_peer_rank: int
    cell_group: dist.ProcessGroup
    self_group: dist.ProcessGroup
    prefix: Mapping[int, dist.ProcessGroup]

    @property
    def is_core(self) -> bool:
        """Whether this rank's cell holds the authoritative weights and the optimizer."""
        return self.cell == 0

    @property
    def is_leader(self) -> bool:
        """Whether this rank is the lowest of its cell."""
        return self.rank_in_cell == 0

    @property
    def leader_rank(self) -> int:
        """Global rank of this cell's leader."""
        return self.cell_ranks[0]


def make_data_groups(num_cells: int, layout: Layout) -> DataGroups:
    """Collective over the world: every rank calls it once. The world is `num_cells` cells of `layout`."""
    rank, world, width = dist.get_rank(), dist.get_world_size(), layout.num_ranks
    assert world == num_cells * width, f"{world} ranks are not {num_cells} cells of {width}"
    cell, rank_in_cell = divmod(rank, width)
    cells = [tuple(range(index * width, (index + 1) * width)) for index in range(num_cells)]
    cell_groups = [dist.new_group(list(ranks)) for ranks in cells]
    self_groups = [dist.new_group([index]) for index in range(world)]
    prefix: dict[int, dist.ProcessGroup] = {}
    for members in range(2, num_cells + 1):
        for coordinate in range(width):
            group = dist.new_group([ranks[coordinate] for ranks in cells[:members]])
            if coordinate == rank_in_cell and cell < members:
                prefix[members] = group
    return DataGroups(
        cell=cell,
        num_cells=num_cells,
        rank_in_cell=rank_in_cell,
        cell_ranks=cells[cell],
        core_peer_rank=rank_in_cell,
        cell_group=cell_groups[cell],
        self_group=self_groups[rank],
        prefix=prefix,
    )
