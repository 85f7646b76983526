"""Stands in for `sgl_kernel`, SGLang's compiled kernels, of which no CPU wheel is on PyPI.

SGLang 0.5.23 imports this package on every device and calls one of its functions on a CPU whatever the
attention backend; that one is written here in plain torch. All other names import but raise when called. No
`torch.ops.sgl_kernel` operator is registered, so SGLang finds no AMX support and takes its own torch paths.
"""

import importlib.machinery
import sys
import types
from collections.abc import Callable
from typing import NoReturn

import torch

__version__ = "0.0.0+cpu"


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int | None = None,
) -> None:
    """Write each request's new KV slots into its row of the request-to-token table, in place.

    Request i gets the next `end_offset[i] - start_offset[i]` entries of `out_cache_loc`, at columns
    [start_offset[i], end_offset[i]) of row `req_pool_indices[i]`.
    """
    taken = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        slots = out_cache_loc[taken : taken + end - start]
        req_to_token[row, start:end] = slots.to(req_to_token.dtype)
        taken += end - start


def _absent(name: str) -> Callable[..., NoReturn]:
    def kernel(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"{name} is a compiled kernel; there is none on this CPU-only machine")

    kernel.__name__ = name.rpartition(".")[2]
    return kernel


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)
    return _absent(f"sgl_kernel.{name}")


class _AbsentModule(types.ModuleType):
    """A submodule whose every function is absent."""

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _absent(f"{self.__name__}.{name}")


kvcacheio = _AbsentModule("sgl_kernel.kvcacheio")
kvcacheio.__spec__ = importlib.machinery.ModuleSpec(kvcacheio.__name__, None)
sys.modules[kvcacheio.__name__] = kvcacheio
