"""One rank of a world of two cells of two ranks on two pretended nodes; writes what it saw as JSON.

Run by test_fabric_world.py with torchrun's variables set, and the file to write as its argument.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from gyre.errors import GyreError, PlacementError
from gyre.fabric.groups import Groups
from gyre.fabric.world import World
from gyre.schedule.placement import place
from tests.fakes.settings import make_settings


def main() -> None:
    """See the module."""
    settings = make_settings(Path("model"), num_cells=2, tp=2, control_timeout_s=20.0)
    world = World.join(settings, local_rank=0)
    seen: dict[str, object] = {"node": world.node}
    seen["text"] = world.share_text("front", "tcp://here" if world.rank == 0 else None)
    seen["gathered"] = world.gather(f"rank {world.rank}")
    seen["other code"] = error_of(lambda: world.agree_placement(lambda facts: OtherPlacement(world.rank)))
    seen["refused"] = error_of(lambda: world.agree_placement(refuse))
    placement = world.agree_placement(lambda facts: place(facts, settings))
    seen["leaders"] = list(placement.leaders)
    groups = world.build_groups(placement)
    data = groups.data
    seen["cell"] = dist.get_process_group_ranks(data.cell)
    seen["self"] = dist.get_process_group_ranks(data.self_)
    seen["prefix"] = {k: dist.get_process_group_ranks(group) for k, group in data.prefix.items()}
    seen["core peer"] = data.core_peer_rank
    summed = torch.tensor([float(world.rank)])
    dist.all_reduce(summed, group=data.prefix[2])
    seen["sum"] = summed.item()
    if world.rank in placement.leaders:
        agree(groups, world.rank, seen)
    dist.barrier()
    Path(sys.argv[1]).write_text(json.dumps(seen))
    world.close()


def agree(groups: Groups, rank: int, seen: dict[str, object]) -> None:
    """The leaders' part."""
    seen["epoch 1"] = groups.agree_roles(1, ["training", "rollout"])
    seen["epoch 2"] = groups.agree_roles(2, ["training", "training"])
    mine = ["rollout", "training"] if rank else ["training", "training"]
    seen["epoch 3"] = error_of(lambda: groups.agree_roles(3, mine))
    if rank == 0:
        groups._timeout_s = 1.0
        began = time.monotonic()
        seen["epoch 4"] = error_of(lambda: groups.agree_roles(4, ["rollout", "rollout"]))
        seen["waited"] = time.monotonic() - began


def error_of(act: Callable[[], object]) -> str:
    """The error's type and text."""
    try:
        act()
    except GyreError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


class OtherPlacement:
    """A placement on which rank 3 differs."""

    cells = ()

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def digest(self) -> str:
        """Different on rank 3."""
        return "other" if self._rank == 3 else "same"


def refuse(facts: object) -> OtherPlacement:
    """A placement function that finds the facts unfit."""
    raise PlacementError("not enough ranks")


if __name__ == "__main__":
    main()
