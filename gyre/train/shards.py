"""This rank's shards of the model's parameters: whole Hugging Face tensors in, whole ones out.

What is shaped like the parameters (gradients, Adam's moments) goes the same way under the same names. Nothing is
rounded: what `export` gives after `load` is bitwise what was loaded.
"""

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gyre.errors import RunError
from gyre.train.model_config import ModelConfig
from gyre.train.weights import Cut, Slot, get_hf_shapes, get_slots, join, shard, split, unshard


class Shards:
    """The parameters of one rank, by slot. `group` is the tensor-parallel group, whose first rank exports."""

    def __init__(self, config: ModelConfig, parameters: Mapping[str, nn.Parameter], group: dist.ProcessGroup) -> None:
        self.parameters = dict(parameters)
        self._config, self._group = config, group
        self._slots = get_slots(config)
        self._leader = dist.get_process_group_ranks(group)[0]
        assert {slot.name for slot in self._slots} == set(self.parameters), sorted(self.parameters)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take this rank's part of whole tensors by Hugging Face name.

        Raises RunError, before anything is changed, if one is missing or has another shape than config.json says.
        """
        for name, shape in get_hf_shapes(self._config).items():
            given = tuple(tensors[name].shape) if name in tensors else "nothing"
            if given != shape:
                raise RunError(f"weights do not fit the model: {name} should be {shape}, is {given}")
        for name, piece in self.cut(tensors).items():
            self.parameters[name].copy_(piece)

    def cut(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's piece of each parameter, from whole tensors by Hugging Face name."""
        rank, size = self._group.rank(), self._group.size()
        return {slot.name: shard(join(slot, tensors, self._config), slot.cut, rank, size) for slot in self._slots}

    @torch.no_grad()
    def export(self, pieces: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
        """Collective over the tensor-parallel group: whole tensors by Hugging Face name on its first rank.

        `pieces` are this rank's, by parameter name. Copies; empty on the other ranks.
        """
        named: list[tuple[str, Tensor]] = []
        for slot in self._slots:
            gathered = self._gather(slot, pieces[slot.name].detach().contiguous())
            if gathered:
                named += split(slot, unshard(gathered, slot.cut).clone(), self._config)
        return named

    @torch.no_grad()
    def spoil(self) -> None:
        """Make every parameter NaN, so that weights which were never loaded cannot pass for weights."""
        for parameter in self.parameters.values():
            parameter.fill_(math.nan)

    def _gather(self, slot: Slot, piece: Tensor) -> list[Tensor]:
        is_leader = self._group.rank() == 0
        if self._group.size() == 1 or slot.cut is Cut.WHOLE:
            return [piece] if is_leader else []
        pieces = [torch.empty_like(piece) for _ in range(self._group.size())] if is_leader else []
        dist.gather(piece, pieces or None, dst=self._leader, group=self._group)
        return pieces
