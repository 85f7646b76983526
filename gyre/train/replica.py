"""A cell's Megatron data-parallel replica: forward, weighted backward, reduction to the core, Adam.

Gradients are sums of absolute weights (what a rollout knows of itself is in them; only the batch's factor is left
for the core), so neither the number of cells nor who computed what changes the sum. Weights are frozen while
gradients accumulate. Only the core keeps an optimizer; a satellite's weights are NaN until `load_hf`, so that
none is ever used by mistake. One call at a time; every rank of a cell makes the same calls in the same order.

Shapes: E targets of a micro-batch.
"""

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer
from megatron.core.optimizer import ChainedOptimizer, get_megatron_optimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from numpy.typing import NDArray
from torch import Tensor

from gyre.algo.forest import target_paths
from gyre.algo.objective import ObjectiveSettings, Targets, TokenWeights, weigh
from gyre.config.choices import Objective
from gyre.errors import RunError
from gyre.fabric.groups import DataGroups
from gyre.train import checkpoint, patches
from gyre.train.batch import join, make_micro_batch, split_by_row
from gyre.train.capabilities import check_layout
from gyre.train.figures import ApplyStats, MicroStepStats, make_stats
from gyre.train.folder import has_weights, read_hf_tensors
from gyre.train.model import TreeGPT, build_model, get_parameters
from gyre.train.model_config import ModelConfig, read_model_config
from gyre.train.reference import Reference
from gyre.train.segments import SegmentedPass
from gyre.train.settings import OptimizerSettings, make_optimizer_config
from gyre.train.shards import Shards
from gyre.train.stage import Passed, Stage
from gyre.train.weights import make_random_tensors
from gyre.types import Float32, Layout, TreeRow


class Replica:
    """One rank's part of its cell's replica."""

    def __init__(
        self,
        config: ModelConfig,
        layout: Layout,
        groups: DataGroups,
        megatron_groups: ProcessGroupCollection,
        ddp: DistributedDataParallel,
        optimizer: ChainedOptimizer | None,
        settings: OptimizerSettings,
        segment_tokens: int,
    ) -> None:
        """Use `build`."""
        self._segment_tokens = segment_tokens
        self._reference: Reference | None = None
        self.groups = groups
        self._optimizer = optimizer
        self._megatron_groups = megatron_groups
        self._ddp = ddp
        self._stage = Stage(cast(TreeGPT, ddp.module), megatron_groups)
        self._buffers: list[_ParamAndGradBuffer] = ddp.buffers  # pyright: ignore[reportAttributeAccessIssue]
        self._clip_grad = settings.clip_grad
        parameters = get_parameters(config, layout, ddp.module, megatron_groups)
        self._shards = Shards(config, parameters, megatron_groups.tp, megatron_groups.pp)
        self._device = patches.get_device()

    @staticmethod
    def build(
        model_path: Path,
        layout: Layout,
        groups: DataGroups,
        optimizer: OptimizerSettings,
        *,
        is_core: bool,
        segment_tokens: int = 0,
        has_reference: bool = False,
        threads: int = 1,
        seed: int = 0,
    ) -> "Replica":
        """Collective over the world: every rank calls it once, with the same arguments but `groups` and `is_core`.

        The core loads the folder's weights, or random ones made from `seed` if the folder holds only config.json;
        with `has_reference` every cell keeps them as the frozen reference. Batches of more than `segment_tokens`
        are trained in segments (0: never).
        Raises ConfigError for a model or layout that is not built, StoreError for unreadable weights.
        """
        torch.set_num_threads(threads)
        patches.install()
        config = read_model_config(model_path)
        check_layout(config, layout)
        megatron_groups = _make_megatron_groups(layout, groups)
        model = build_model(config, layout, megatron_groups).to(patches.get_device())
        ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False)
        ddp = DistributedDataParallel(model.config, ddp_config, model, pg_collection=megatron_groups)
        # Gathers the parameter groups of the whole world, so satellites build it too; they drop it here, before
        # Adam allocates any state (it does so at its first step).
        adam = get_megatron_optimizer(
            make_optimizer_config(optimizer), [ddp], use_gloo_process_groups=False, pg_collection=megatron_groups
        )
        assert isinstance(adam, ChainedOptimizer)
        replica = Replica(
            config, layout, groups, megatron_groups, ddp, adam if is_core else None, optimizer, segment_tokens
        )
        if is_core or has_reference:
            is_trained = has_weights(model_path)
            first = read_hf_tensors(model_path) if is_trained else make_random_tensors(config, seed)
            replica.load_hf(first)
            if has_reference:
                replica._reference = Reference(replica._shards.parameters, replica._shards.cut(first))
        if not is_core:
            replica._shards.spoil()
        replica.begin_step()
        return replica

    # --- weights ----------------------------------------------------------------------------------

    def load_hf(self, tensors: Mapping[str, Tensor]) -> None:
        """Collective over the cell: take this rank's shards of whole tensors by Hugging Face name.

        Raises RunError if a tensor is missing or has another shape than config.json says.
        """
        self._shards.load(tensors)

    def export_hf(self) -> list[tuple[str, Tensor]]:
        """Collective over the cell: whole tensors by Hugging Face name on the leader; empty on its other ranks.

        The tensors are copies: a later step does not change them.
        """
        return self._shards.export(self._shards.parameters)

    def export_gradients(self) -> list[tuple[str, Tensor]]:
        """Collective over the cell: the gradient sums by Hugging Face name on the leader; empty on other ranks.

        For comparisons. Before `apply`, with tensor parallelism, the sums of the heads' norms are partial.
        """
        sums = {name: p.main_grad for name, p in self._shards.parameters.items()}  # pyright: ignore
        return self._shards.export(sums)

    # --- a step -----------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Zero the gradients. Also how a satellite joins: after `load_hf`, before its first micro-step."""
        for parameter in self._shards.parameters.values():
            # apply() lends each parameter's sum to Adam as its grad; autograd must not add to it there.
            parameter.grad = None
        self._ddp.zero_grad_buffer()

    def micro_step(
        self, rows: Sequence[TreeRow], objective: ObjectiveSettings, policy_version: int | None = None
    ) -> MicroStepStats:
        """Collective over the cell: add the objective's gradient on `rows` (before the batch's factor) to the sums.

        Each row must hold all targets of its rollout, since ratios and means are the rollout's. Gap figures are over
        the targets sampled under `policy_version` (all if None).
        """
        start = time.monotonic()
        for row in rows:
            assert len(row.edge_source) == row.num_targets, (row.rollout, len(row.edge_source), row.num_targets)
        rows = [row for row in rows if row.num_targets]
        if not rows:
            return MicroStepStats(ratios={}, seconds=time.monotonic() - start)
        passed = self._forward(rows, want_entropy=True)
        values_E = passed.values_E
        chosen = self._weigh(rows, values_E, objective)
        self.backward(passed, np.concatenate([choice.weights for choice in chosen]))
        seconds = time.monotonic() - start
        return make_stats(rows, values_E, chosen, policy_version, entropy=passed.entropy, seconds=seconds)

    @torch.no_grad()
    def logprobs(self, rows: Sequence[TreeRow]) -> list[Float32]:
        """Collective over the cell: each row's log-probs at its targets, without gradient."""
        with_targets = [row for row in rows if len(row.edge_source)]
        if not with_targets:
            return [np.zeros(0, np.float32) for _ in rows]
        values_E = self._forward(with_targets, want_entropy=False).values_E.astype(np.float32)
        values = iter(split_by_row(values_E, with_targets))
        return [next(values) if len(row.edge_source) else np.zeros(0, np.float32) for row in rows]

    def forward_targets(self, rows: Sequence[TreeRow]) -> Passed | SegmentedPass:
        """Collective over the cell: a forward pass of `rows` (with at least one target) for `backward`."""
        return self._forward(rows, want_entropy=False)

    def backward(self, passed: Passed | SegmentedPass, weights_E: NDArray[np.floating]) -> None:
        """Collective over the cell: add the gradient of sum(weights * logprobs) to the sums. Once for each pass."""
        weight_E = torch.from_numpy(np.ascontiguousarray(weights_E, dtype=np.float64)).to(self._device)
        if self.groups.cell.size() > 1:
            # One clip decision a cell: ranks may differ in the last bit and a ratio may lie on the edge.
            dist.broadcast(weight_E, group=self.groups.cell, group_src=0)
        if isinstance(passed, SegmentedPass):
            passed.backward(weight_E)
        else:
            self._stage.backward(passed, weight_E)

    def reduce(self, members: int) -> None:
        """Collective over the prefix group of cells [0, members): sum the gradients into the core.

        A satellite's sums are undefined afterwards; its next step begins with `begin_step`. Raises RunError if a
        member is gone or does not come within the group's time-out.
        """
        if members == 1:
            assert dist.get_rank() == self.groups.core_peer_rank, "this cell is no member"
            return
        group = self.groups.prefix[members]
        try:
            for buffer in self._buffers:
                dist.reduce(buffer.grad_data, self.groups.core_peer_rank, group=group)
        except RuntimeError as error:
            raise RunError(f"the gradients of cells 0 to {members - 1} could not be reduced: {error}") from error

    def apply(self, divisor: int) -> ApplyStats:
        """Collective over the core cell: divide the sums by `divisor`, clip, step Adam, zero the sums.

        The divisor is `batch_divisor` of the whole batch. If it is 0, or the gradient exactly zero, nothing moves,
        Adam's moments included. Raises RunError if the gradient is not finite; the weights are untouched then.
        """
        assert self._optimizer is not None, "only the core applies a step"
        start = time.monotonic()
        if divisor == 0:
            self.begin_step()
            return ApplyStats(grad_norm=0.0, is_applied=False, seconds=time.monotonic() - start)
        finalize_model_grads([self._ddp], None, pg_collection=self._megatron_groups)
        self._ddp.scale_gradients(1.0 / divisor)
        self._optimizer.prepare_grads()
        grad_norm = float(self._optimizer.get_grad_norm())
        if not math.isfinite(grad_norm):
            self.begin_step()
            raise RunError(f"the gradient of the step (divisor {divisor}) is not finite: norm {grad_norm}")
        if grad_norm > 0.0:
            if 0.0 < self._clip_grad < grad_norm:
                self._ddp.scale_gradients(self._clip_grad / (grad_norm + 1e-6))
            self._optimizer.step_with_ready_grads()
        self.begin_step()
        return ApplyStats(grad_norm=grad_norm, is_applied=grad_norm > 0.0, seconds=time.monotonic() - start)

    def set_learning_rate(self, learning_rate: float) -> None:
        """The learning rate of the steps to come (core only)."""
        for group in self._get_adam().param_groups:
            group["lr"] = learning_rate

    # --- checkpoints ------------------------------------------------------------------------------

    def save_checkpoint(self, folder: Path, step: int) -> None:
        """Collective over the core cell: write weights and Adam's state after `step` steps into `folder`."""
        adam = self._get_adam()
        state = checkpoint.TrainerState(
            step=step,
            adam_step=max((int(entry["step"]) for entry in adam.state.values()), default=0),
            weights=dict(self.export_hf()),
            exp_avg=dict(self._shards.export(self._get_moments("exp_avg"))),
            exp_avg_sq=dict(self._shards.export(self._get_moments("exp_avg_sq"))),
        )
        if self.groups.rank_in_cell == 0:
            checkpoint.write_checkpoint(folder, state)
        dist.barrier(self.groups.cell)

    def load_checkpoint(self, folder: Path) -> int:
        """Collective over the core cell: take over weights and Adam's state; returns the step. Raises StoreError.

        The layout may differ from the one that saved. The learning rate stays that of the settings.
        """
        state = checkpoint.read_checkpoint(folder)
        self.load_hf(state.weights)
        adam = self._get_adam()
        adam.state.clear()
        if state.adam_step:
            exp_avg, exp_avg_sq = self._shards.cut(state.exp_avg), self._shards.cut(state.exp_avg_sq)
            for name, parameter in self._shards.parameters.items():
                adam.state[parameter] = {
                    # One step tensor each: Adam counts it up in place.
                    "step": torch.tensor(float(state.adam_step)),
                    "exp_avg": torch.empty_like(parameter).copy_(exp_avg[name]),
                    "exp_avg_sq": torch.empty_like(parameter).copy_(exp_avg_sq[name]),
                }
        self.begin_step()
        return state.step

    # --- inside -----------------------------------------------------------------------------------

    def _weigh(
        self, rows: Sequence[TreeRow], values_E: NDArray[np.floating], objective: ObjectiveSettings
    ) -> list[TokenWeights]:
        """Each row's weights. The weights are those of the step's start, so proximal log-probs are the log-probs."""
        references: list[Float32 | None] = [None] * len(rows)
        if objective.kl_coefficient:
            assert self._reference is not None, "a KL term needs a replica built with a reference"
            with self._reference.in_place():
                references = list(self.logprobs(rows))
        return [
            weigh(
                Targets(
                    logprobs=values,
                    behavior=row.behavior_logprobs,
                    advantage=row.advantage,
                    versions=row.versions,
                    path=target_paths(row) if objective.objective is Objective.GSPO_PATH else None,
                    reference=reference,
                ),
                objective,
            )
            for row, values, reference in zip(rows, split_by_row(values_E, rows), references, strict=True)
        ]

    def _forward(self, rows: Sequence[TreeRow], *, want_entropy: bool) -> Passed | SegmentedPass:
        if self._segment_tokens and sum(len(row.tokens) for row in rows) > self._segment_tokens:
            joined = join(rows)
            return SegmentedPass(self._stage, joined, self._segment_tokens, self._device, want_entropy=want_entropy)
        return self._stage.forward(make_micro_batch(rows, self._device), want_entropy=want_entropy)

    def _get_adam(self) -> torch.optim.Optimizer:
        assert self._optimizer is not None, "only the core keeps an optimizer"
        (only,) = self._optimizer.chained_optimizers
        return only.optimizer

    def _get_moments(self, name: str) -> dict[str, Tensor]:
        state = self._get_adam().state
        return {
            key: state[parameter][name] if parameter in state else torch.zeros_like(parameter)
            for key, parameter in self._shards.parameters.items()
        }


def _make_megatron_groups(layout: Layout, groups: DataGroups) -> ProcessGroupCollection:
    """Megatron's groups inside the cell; for its data-parallel groups the rank is alone until cells reduce."""
    # Data parallelism outermost makes cells contiguous blocks, so the tensor-parallel groups are the cell's.
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        order="tp-cp-ep-pp-dp",
        create_gloo_process_groups=False,
    )
    names = ["tp", "pp", "mp", "cp", "tp_cp", "ep", "expt_tp", "tp_ep", "tp_ep_pp", "embd", "pos_embd"]
    ours = ProcessGroupCollection.use_mpu_process_groups(names)
    in_cell = dist.get_process_group_ranks(groups.cell)
    assert dist.get_process_group_ranks(ours.mp) == in_cell, f"cells must be contiguous ranks, this one is {in_cell}"
    ours.dp = ours.dp_cp = ours.expt_dp = ours.intra_dp_cp = ours.intra_expt_dp = groups.self_
    ours.tp_dp_cp = ours.tp
    # Gradient statistics are those of the whole cell: with the rank alone, a TP cell would clip wrongly, silently.
    ours.intra_dist_opt = groups.cell
    return ours
