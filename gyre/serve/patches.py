"""The one forced patch of SGLang 0.5.23, applied in its scheduler process before it starts.

With seeds, SGLang draws by hashing (seed, position, column). Where a batch holds a greedy or a top-k request it
first sorts every row by probability, so the column is a rank instead of a token, and a request's draw comes to
depend on what else is in the batch. `sample_in_token_order` filters by rank but draws by token.
"""

from typing import Any

import torch


def run_scheduler(*arguments: Any) -> Any:
    """Entry point of the spawned scheduler process, in place of SGLang's own."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    install()
    return run_scheduler_process(*arguments)


def install() -> None:
    """Patch this process."""
    from sglang.srt.layers import sampler

    sampler.top_k_top_p_min_p_sampling_from_probs_torch = sample_in_token_order


def sample_in_token_order(
    probs: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    need_min_p_sampling: bool,
    sampling_seed: torch.Tensor | None,
    positions: torch.Tensor,
    *,
    return_filtered_probs: bool = False,
    max_top_k: int | None = None,
) -> torch.Tensor:
    """SGLang's sampler for batches with a filter; see its signature. `probs` is [B, V]; returns ids [B], int32.

    Raises NotImplementedError for what gyre never asks for: no seeds, min-p, the filtered probabilities.
    """
    from sglang.srt.layers import sampler

    if sampling_seed is None:
        # Without deterministic mode there is no draw to keep: the filtered rows are sampled as they come.
        return torch.multinomial(_filter(probs, top_ks, top_ps), num_samples=1).view(-1).to(torch.int32)
    if need_min_p_sampling or return_filtered_probs:
        raise NotImplementedError("seeded sampling with min-p or with its filtered probabilities")
    drawn = sampler.multinomial_with_seed(torch.log(_filter(probs, top_ks, top_ps)), sampling_seed, positions)
    return drawn.view(-1).to(torch.int32)


def _filter(probs: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor) -> torch.Tensor:
    """`probs` with everything outside top-k and top-p at zero, in token order."""
    ordered, tokens = probs.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(probs.shape[-1], device=probs.device)
    before = ordered.cumsum(dim=-1) - ordered
    # Rounding lets a cumulative sum pass 1, so top_p 1 is kept whole explicitly.
    in_nucleus = (before <= top_ps[:, None]) | (top_ps[:, None] >= 1.0)
    is_kept = (ranks < top_ks[:, None]) & in_nucleus
    kept = torch.zeros_like(is_kept).scatter(-1, tokens, is_kept)
    return probs.masked_fill(~kept, 0.0)
