"""SGLang plug-in (entry point `sglang.srt.plugins`) that lets its deterministic mode run on a CPU. For 0.5.23.

SGLang calls `install` in the rank and in each process it spawns. The mode refuses a CPU for three reasons: the
attention backend is not on its lists, its batch-invariant matmuls and its hash are Triton kernels. The first is
answered by listing `torch_native`; the second is left out (CPU rows agree to about 1e-7 whatever the batch);
the third is written here in torch, bit for bit the same hash, so that a sampled token is a function of the
logits, the seed and the position alone. Where CUDA is present nothing is touched.
"""

import torch

_MASK = 0xFFFFFFFF
"""Hash arithmetic is modulo 2**32, carried out in int64."""


def install() -> None:
    """Entry point: patch this process. Harmless to call again."""
    if torch.cuda.is_available():
        return
    from sglang.srt import batch_invariant_ops
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers import sampler

    for listed, add in (
        (choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES, choices.add_deterministic_attention_backend_choices),
        (
            choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND,
            choices.add_radix_supported_deterministic_attention_backend_choices,
        ),
    ):
        if "torch_native" not in listed:
            add(["torch_native"])
    batch_invariant_ops.enable_batch_invariant_mode = _no_batch_invariant_kernels
    sampler.multinomial_with_seed = multinomial_with_seed


def _no_batch_invariant_kernels(enable_bmm: bool = True) -> None:
    """Replaces the switch to Triton matmuls."""


def multinomial_with_seed(logprobs: torch.Tensor, seed: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One draw a row by the Gumbel maximum, with noise hashed from (seed, position, column).

    `logprobs` is [B, V] (need not be normalised), `seed` and `positions` are [B]; returns indices [B, 1].
    """
    columns = torch.arange(logprobs.shape[1], dtype=torch.int64, device=logprobs.device)
    hashed = murmur3(seed.to(torch.int64)[:, None], positions.to(torch.int64)[:, None], columns[None, :])
    uniform = hashed.to(torch.float64) / _MASK
    # Both ends are bent inwards: log(0) is -inf, and 1 would give +inf noise that beats a -inf log-prob.
    exponential = -torch.log(uniform).clamp(min=torch.finfo(torch.float64).min, max=-(2.0**-32))
    gumbel = -torch.log(exponential)
    return torch.argmax(gumbel + logprobs.to(torch.float64), dim=1, keepdim=True)


def murmur3(seed: torch.Tensor, position: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    """MurmurHash3 (x86, 32 bit; public domain, Austin Appleby) of four words: seed low, seed high, position, column.

    int64 tensors that broadcast together; returns int64 in [0, 2**32).
    """
    state = torch.zeros_like(seed)
    for word in (seed & _MASK, (seed >> 32) & _MASK, position & _MASK, column & _MASK):
        state = _mix(state, word)
    state = state ^ 16  # The length of the four words in bytes.
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & _MASK
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & _MASK
    return state ^ (state >> 16)


def _mix(state: torch.Tensor, word: torch.Tensor) -> torch.Tensor:
    word = _rotate((word * 0xCC9E2D51) & _MASK, 15)
    word = (word * 0x1B873593) & _MASK
    return (_rotate(state ^ word, 13) * 5 + 0xE6546B64) & _MASK


def _rotate(word: torch.Tensor, bits: int) -> torch.Tensor:
    return ((word << bits) | (word >> (32 - bits))) & _MASK
