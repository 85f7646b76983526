"""Log-probabilities and entropy of a vocabulary that tensor parallelism has cut.

Shapes: E targets, V vocabulary of this rank.
"""

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from torch import Tensor


def compute_logprobs(logits_EV: Tensor, token_E: Tensor) -> Tensor:
    """log softmax(logits)[token] for each target, [E], with gradient. Collective over the tensor-parallel group.

    Megatron works in place, in fp32: `logits_EV` is not usable afterwards. Wider logits of one rank keep their width.
    """
    if logits_EV.dtype == torch.float64:
        assert logits_EV.shape[1] > int(token_E.max()), "fp64 is for one rank"
        return logits_EV.log_softmax(-1).gather(1, token_E[:, None])[:, 0]
    return -vocab_parallel_cross_entropy(logits_EV[:, None], token_E[:, None])[:, 0]


@torch.no_grad()
def compute_mean_entropy(logits_EV: Tensor, group: dist.ProcessGroup) -> float:
    """Mean over targets of the entropy in nats, ln Z - sum(p z). Collective over the tensor-parallel group."""
    logits_EV = logits_EV.float()
    peak_E = logits_EV.amax(dim=-1)
    if group.size() > 1:
        dist.all_reduce(peak_E, op=dist.ReduceOp.MAX, group=group)
    shifted_EV = logits_EV - peak_E[:, None]
    weights_EV = shifted_EV.exp()
    sums_2E = torch.stack([weights_EV.sum(dim=-1), (weights_EV * shifted_EV).sum(dim=-1)])
    if group.size() > 1:
        dist.all_reduce(sums_2E, group=group)
    return float((sums_2E[0].log() - sums_2E[1] / sums_2E[0]).mean())
