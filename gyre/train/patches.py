"""Runs megatron-core 0.16.1 without a GPU. `install()` does nothing where CUDA is available.

megatron-core passes `torch.cuda.current_device()` and the literal "cuda" as devices and waits on CUDA streams.
Inside megatron's own modules the name `torch` is rebound to a view of torch that answers those with the CPU;
torch itself stays untouched, because an inference engine may live in the same process. `get_device()` is where
tensors belong on this machine. Not covered: CUDA random-number trackers (no dropout, own initialisation) and
whatever megatron module is imported only after `install()`.
"""

import contextlib
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch

_CPU = torch.device("cpu")
_FACTORIES = ("zeros", "ones", "empty", "full", "tensor", "arange", "empty_like", "zeros_like")


class _NoStream(contextlib.nullcontext):
    """A CUDA stream or event that orders nothing: CPU kernels are synchronous already."""

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()

    def wait_stream(self, _stream: object) -> None:
        """Nothing to wait for."""

    def wait_event(self, _event: object) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


class _View(types.ModuleType):
    """A module that answers some names itself and every other name from `behind`."""

    def __init__(self, behind: types.ModuleType, own: Mapping[str, object]) -> None:
        super().__init__(behind.__name__)
        self.__dict__.update(own)
        self.__dict__["_behind"] = behind

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_behind"], name)


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def build(*args: object, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = _CPU
        return factory(*args, **kwargs)

    return build


def _torch_without_cuda() -> _View:
    cuda = _View(
        torch.cuda,
        {
            "current_device": lambda: _CPU,
            "synchronize": lambda *_: None,
            "empty_cache": lambda: None,
            "Stream": _NoStream,
            "Event": _NoStream,
            "current_stream": lambda *_: _NoStream(),
            "default_stream": lambda *_: _NoStream(),
            "stream": lambda *_: _NoStream(),
        },
    )
    return _View(torch, {"cuda": cuda} | {name: _on_cpu(getattr(torch, name)) for name in _FACTORIES})


def install() -> bool:
    """Rebind `torch` in every megatron module imported so far. True if the CPU adapter is in force."""
    if torch.cuda.is_available():
        return False
    view = _torch_without_cuda()
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            module.torch = view  # type: ignore[attr-defined]
    return True


def get_device() -> torch.device:
    """The device of parameters, gradients and micro-batches of this rank."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else _CPU
