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
    """The parameters of one rank, by slot. `tp` and `pp` are its groups; the cell's first rank exports."""

    def __init__(
        self,
        config: ModelConfig,
        parameters: Mapping[str, nn.Parameter],
        tp: dist.ProcessGroup,
        pp: dist.ProcessGroup,
    ) -> None:
        self.parameters = dict(parameters)
        self._config, self._group, self._pp = config, tp, pp
        self._shapes = get_hf_shapes(config)
        self._slots = get_slots(config, pp.size())
        self._own = [slot for slot in self._slots if slot.stage == pp.rank()]
        self._leader = dist.get_process_group_ranks(tp)[0]
        self._stages = dist.get_process_group_ranks(pp)
        assert {slot.name for slot in self._own} == set(self.parameters), sorted(self.parameters)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take this rank's part of whole tensors by Hugging Face name.

        Raises RunError, before anything is changed, if one is missing or has another shape than config.json says.
        """
        for name, shape in self._shapes.items():
            given = tuple(tensors[name].shape) if name in tensors else "nothing"
            if given != shape:
                raise RunError(f"weights do not fit the model: {name} should be {shape}, is {given}")
        for name, piece in self.cut(tensors).items():
            self.parameters[name].copy_(piece)

    def cut(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's piece of each parameter, from whole tensors by Hugging Face name."""
        rank, size = self._group.rank(), self._group.size()
        return {slot.name: shard(join(slot, tensors, self._config), slot.cut, rank, size) for slot in self._own}

    @torch.no_grad()
    def export(self, pieces: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
        """Collective over the cell: whole tensors by Hugging Face name on its first rank.

        `pieces` are this rank's, by parameter name. Copies; empty on the other ranks.
        """
        named: list[tuple[str, Tensor]] = []
        like = next(iter(self.parameters.values()))
        is_first = self._pp.rank() == 0
        for slot in self._slots:
            if slot.is_copy:
                continue
            gathered: list[Tensor] = []
            if slot.stage == self._pp.rank():
                gathered = self._gather(slot, pieces[slot.name].detach().contiguous())
            whole = split(slot, unshard(gathered, slot.cut).clone(), self._config) if gathered else []
            if slot.stage and self._group.rank() == 0:
                whole = self._bring(slot, whole, like)
            named += whole if is_first else []
        return named

    def _bring(self, slot: Slot, whole: list[tuple[str, Tensor]], like: Tensor) -> list[tuple[str, Tensor]]:
        """From the slot's stage to the first, between the first tensor-parallel ranks of both."""
        if self._pp.rank() == slot.stage:
            for _, tensor in whole:
                dist.send(tensor.to(like.dtype), self._stages[0], group=self._pp)
        elif self._pp.rank() == 0:
            whole = [(name, torch.empty(self._shapes[name], dtype=like.dtype, device=like.device))
                     for name in slot.hf_names]  # fmt: skip
            for _, tensor in whole:
                dist.recv(tensor, self._stages[slot.stage], group=self._pp)
        return whole

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
