"""Exact training of forests that do not fit: segments in DFS order, with the keys and values of one path carried.

A segment is a run of consecutive tokens. What its tokens see before it lies on the path of its first token alone
(an ancestor of any of them that precedes the segment is an ancestor of the first), so segments form a tree of
their own, whose order is a depth-first order. Forward, without gradient: each segment keeps the keys and values
that later ones see, and a segment's are dropped once nothing of its subtree is left. Backward, in reverse order:
a segment is run again with gradient from its path's keys and values; what flows into these is added to the
segments they come from, and is the segment's own output gradient when its turn comes.

Memory holds one segment's activations and one path's keys, values and their gradients, whatever the forest's size.
A segment is computed twice forward and once backward; one that has children and does not lie on the last path, once
more, because its keys were dropped in between.

Shapes: S carried tokens, E targets.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gyre.train.attention import Carry
from gyre.train.batch import Joined, MicroBatch, take
from gyre.train.stage import Float64, Passed, Stage

Index = NDArray[np.integer]
KeysValues = dict[int, tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Tokens [start, end), the segment of the token before them on their path (-1: none), tokens that are kept."""

    start: int
    end: int
    parent: int
    kept: Index
    targets: Index


def plan_segments(joined: Joined, segment_tokens: int) -> list[Segment]:
    """Cut a forest into segments of `segment_tokens` (the last may be shorter)."""
    length, until = len(joined.tokens), joined.until
    segments: list[Segment] = []
    for start in range(0, length, segment_tokens):
        end = min(start + segment_tokens, length)
        tokens = np.arange(start, end)
        ancestors = np.flatnonzero(until[:start] > start)
        segments.append(
            Segment(
                start=start,
                end=end,
                parent=int(ancestors[-1]) // segment_tokens if len(ancestors) else -1,
                kept=tokens[until[start:end] > end],
                targets=np.flatnonzero((joined.source >= start) & (joined.source < end)),
            )
        )
    return segments


class SegmentedPass:
    """One forest's passes. `values_E` and `entropy` are there at once; `backward` may be called once."""

    def __init__(
        self, stage: Stage, joined: Joined, segment_tokens: int, device: torch.device, *, want_entropy: bool
    ) -> None:
        """Collective over the cell: the forward pass without gradient."""
        self._stage, self._joined, self._device = stage, joined, device
        self._segments = plan_segments(joined, segment_tokens)
        self._kept: dict[int, KeysValues] = {}
        self._slopes: dict[int, KeysValues] = {}
        self.values_E: Float64 = np.empty(len(joined.source), np.float64)
        entropy_sum = 0.0
        for index, segment in enumerate(self._segments):
            passed = self._fill(index, want_entropy=want_entropy)
            self.values_E[segment.targets] = passed.values_E
            entropy_sum += passed.entropy * len(segment.targets)
            if index + 1 < len(self._segments):
                path = self._path(index + 1)
                self._kept = {place: kept for place, kept in self._kept.items() if place in path}
        self.entropy = entropy_sum / max(len(self.values_E), 1)

    def backward(self, weights_E: Tensor) -> None:
        """Collective over the cell: add the gradient of sum(weights * logprobs)."""
        for index in reversed(range(len(self._segments))):
            for place in self._path(index):
                if place not in self._kept:
                    self._fill(place)
            self._run_back(index, weights_E)
            self._kept.pop(index, None)
            self._slopes.pop(index, None)

    def _path(self, index: int) -> list[int]:
        """The segments on the path to segment `index`, the first first; without itself."""
        path = []
        while (index := self._segments[index].parent) >= 0:
            path.append(index)
        return path[::-1]

    @torch.no_grad()
    def _fill(self, index: int, *, want_entropy: bool = False) -> Passed:
        """Run a segment without gradient and keep what later ones see of it."""
        batch, carry, _ = self._open(index)
        passed = self._stage.forward(batch, want_entropy=want_entropy)
        self._kept[index] = {layer: self._pick(index, kv) for layer, kv in carry.made.items()}
        return passed

    def _pick(self, index: int, kv: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        segment = self._segments[index]
        where = torch.from_numpy(segment.kept - segment.start).to(self._device)
        return kv[0].index_select(0, where), kv[1].index_select(0, where)

    def _open(self, index: int) -> tuple[MicroBatch, Carry, list[tuple[int, Tensor]]]:
        """A segment's batch, its carry, and which of each path segment's kept tokens it sees."""
        segment = self._segments[index]
        seen: list[tuple[int, Tensor]] = []
        carried: list[Index] = []
        for place in self._path(index):
            is_seen = self._joined.until[self._segments[place].kept] > segment.start
            seen.append((place, torch.from_numpy(np.flatnonzero(is_seen)).to(self._device)))
            carried.append(self._segments[place].kept[is_seen])
        carry = Carry()
        if seen:
            for layer in self._kept[seen[0][0]]:
                keys = torch.cat([self._kept[place][layer][0].index_select(0, where) for place, where in seen])
                values = torch.cat([self._kept[place][layer][1].index_select(0, where) for place, where in seen])
                carry.given[layer] = (keys, values)
        batch = take(
            self._joined,
            segment.start,
            segment.end,
            segment.targets,
            self._device,
            carried=np.concatenate(carried) if carried else None,
            carry=carry,
        )
        return batch, carry, seen

    def _run_back(self, index: int, weights_E: Tensor) -> None:
        segment = self._segments[index]
        batch, carry, seen = self._open(index)
        for keys, values in carry.given.values():
            keys.requires_grad_()
            values.requires_grad_()
        passed = self._stage.forward(batch)
        roots: list[Tensor] = []
        gradients: list[Tensor] = []
        for layer, slopes in self._slopes.get(index, {}).items():
            roots += self._pick(index, carry.made[layer])
            gradients += slopes
        where = torch.from_numpy(segment.targets).to(self._device)
        self._stage.backward(passed, weights_E[where], roots, gradients)
        for layer, given in carry.given.items():
            self._pass_down(layer, given, seen)

    def _pass_down(self, layer: int, given: tuple[Tensor, Tensor], seen: list[tuple[int, Tensor]]) -> None:
        """Add the gradient of carried keys and values to the segments they come from."""
        sizes = [len(where) for _, where in seen]
        for side, tensor in enumerate(given):
            if tensor.grad is None:
                continue
            for (place, where), part in zip(seen, tensor.grad.split(sizes), strict=True):
                sums = self._slopes.setdefault(place, {})
                if layer not in sums:
                    keys, values = self._kept[place][layer]
                    sums[layer] = (torch.zeros_like(keys), torch.zeros_like(values))
                sums[layer][side].index_add_(0, where, part)
