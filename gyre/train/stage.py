"""One rank's stage of the model: forward and backward of a micro-batch, hidden states handed along the pipeline.

With one stage this is a plain forward and backward. With several, hidden states go to the next stage and their
gradients come back, one micro-batch at a time: exact, but stages do not overlap. The log-probs of the last stage
are made known to the whole cell, so that every rank weighs them alike.

Shapes: B rows, T tokens, H hidden, E targets.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from numpy.typing import NDArray
from torch import Tensor

from gyre.train.batch import MicroBatch
from gyre.train.logprobs import compute_logprobs, compute_mean_entropy
from gyre.train.model import TreeGPT

Float64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """A forward pass of this stage. `logprobs_E` is on the last stage and None where there are no targets.

    `values_E` (float64) and `entropy` are known to every rank of the cell.
    """

    received_TBH: Tensor | None
    hidden_TBH: Tensor
    logprobs_E: Tensor | None
    values_E: Float64
    entropy: float


class Stage:
    """The stage that this rank holds."""

    def __init__(self, model: TreeGPT, groups: ProcessGroupCollection) -> None:
        self._model, self._pp, self._tp = model, groups.pp, groups.tp
        self._ranks = dist.get_process_group_ranks(groups.pp)
        self._place = groups.pp.rank()
        self.is_first, self.is_last = self._place == 0, self._place == len(self._ranks) - 1

    def forward(self, batch: MicroBatch, *, want_entropy: bool = False) -> Passed:
        """Collective over the cell."""
        received = self._receive_hidden(batch)
        hidden_TBH = self._model(batch.tokens_BT, batch.positions_BT, batch.visible, received)
        logprobs_E, entropy = None, 0.0
        num_targets = len(batch.token_E)
        if not self.is_last:
            self._send(hidden_TBH.detach(), self._place + 1)
        elif num_targets:
            logits_EV = self._model.read_logits(hidden_TBH[batch.source_E, batch.source_row_E])
            # Before the log-probs: they overwrite the logits.
            entropy = compute_mean_entropy(logits_EV.detach(), self._tp) if want_entropy else 0.0
            logprobs_E = compute_logprobs(logits_EV, batch.token_E)
        values_E = torch.empty(num_targets + 1, dtype=torch.float64, device=batch.token_E.device)
        if logprobs_E is not None:
            values_E[:-1], values_E[-1] = logprobs_E.detach(), entropy
        if len(self._ranks) > 1 and num_targets:
            dist.broadcast(values_E, self._ranks[-1], group=self._pp)
        return Passed(
            received_TBH=received,
            hidden_TBH=hidden_TBH,
            logprobs_E=logprobs_E,
            values_E=values_E[:-1].cpu().numpy(),
            entropy=float(values_E[-1]) if num_targets else 0.0,
        )

    def backward(
        self, passed: Passed, weights_E: Tensor, roots: Sequence[Tensor] = (), gradients: Sequence[Tensor] = ()
    ) -> None:
        """Collective over the cell: add the gradient of sum(weights * logprobs) and of `roots` with `gradients`."""
        outputs: list[Tensor] = list(roots)
        slopes: list[Tensor | None] = list(gradients)
        if not self.is_last:
            outputs.append(passed.hidden_TBH)
            slopes.append(self._receive(passed.hidden_TBH, self._place + 1))
        elif passed.logprobs_E is not None:
            outputs.append((weights_E.to(passed.logprobs_E) * passed.logprobs_E).sum())
            slopes.append(None)
        if outputs:
            torch.autograd.backward(outputs, slopes)
        if passed.received_TBH is not None:
            gradient = passed.received_TBH.grad
            self._send(torch.zeros_like(passed.received_TBH) if gradient is None else gradient, self._place - 1)

    def _receive_hidden(self, batch: MicroBatch) -> Tensor | None:
        if self.is_first:
            return None
        rows, tokens = batch.tokens_BT.shape
        like = torch.empty(
            (tokens, rows, self._model.config.hidden_size), dtype=self._model.dtype, device=batch.tokens_BT.device
        )
        hidden_TBH = self._receive(like, self._place - 1)
        return hidden_TBH.requires_grad_(torch.is_grad_enabled())

    def _send(self, tensor: Tensor, place: int) -> None:
        dist.send(tensor.contiguous(), self._ranks[place], group=self._pp)

    def _receive(self, like: Tensor, place: int) -> Tensor:
        tensor = torch.empty_like(like, memory_format=torch.contiguous_format)
        dist.recv(tensor, self._ranks[place], group=self._pp)
        return tensor
