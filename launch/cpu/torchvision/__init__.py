"""Stands in for `torchvision`, whose PyPI wheel is linked against CUDA and breaks beside a CPU build of torch.

SGLang 0.5.23 imports it for its image models. Text models never call it, so names import and raise when used.
There is no dist-info beside this folder on purpose: transformers then takes torchvision for absent.
"""

import importlib.machinery
import sys
import types
from enum import IntEnum
from typing import NoReturn

__version__ = "0.0.0"

_SUBMODULES = ("io", "ops", "utils", "transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional")


def _refuse(name: str) -> NoReturn:
    raise RuntimeError(f"{name} is not available: this CPU installation serves text models only")


class _TextOnly(types.ModuleType):
    """A submodule: capitalised names are classes that cannot be made, others functions that cannot be called."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)

    def __getattr__(self, attribute: str) -> object:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        full_name = f"{self.__name__}.{attribute}"

        def absent(*args: object, **kwargs: object) -> NoReturn:
            _refuse(full_name)

        return type(attribute, (), {"__init__": absent}) if attribute[0].isupper() else absent


class InterpolationMode(IntEnum):
    """Read at import time by image processors, as default arguments."""

    NEAREST = 0
    BILINEAR = 1
    BICUBIC = 2
    LANCZOS = 3
    NEAREST_EXACT = 4
    BOX = 5
    HAMMING = 6


for _name in _SUBMODULES:
    _module = _TextOnly(f"torchvision.{_name}")
    sys.modules[_module.__name__] = _module
    _parent, _, _child = _module.__name__.rpartition(".")
    setattr(sys.modules[_parent], _child, _module)
for _name in ("transforms", "transforms.functional"):
    sys.modules[f"torchvision.{_name}"].InterpolationMode = InterpolationMode
