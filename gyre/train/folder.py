"""Reads and writes Hugging Face model folders: config.json, safetensors, tokenizer files.

A folder appears whole or not at all: it is written under a temporary name and renamed. Tensors keep the dtype
they are given. Only the plain names of dense models are used; no pickle is ever read.
"""

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from gyre.errors import StoreError

WEIGHTS_NAME = "model.safetensors"


def has_weights(folder: Path) -> bool:
    """Whether `folder` holds any safetensors file."""
    return any(folder.glob("*.safetensors"))


def read_hf_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the folder's safetensors files, by Hugging Face name. Raises StoreError."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise StoreError(f"{folder} holds no safetensors file")
    tensors: dict[str, Tensor] = {}
    for path in files:
        try:
            tensors.update(load_file(path))
        except (OSError, SafetensorError) as error:
            raise StoreError(f"{path} is not a whole safetensors file: {error}") from error
    return tensors


def write_hf_folder(
    folder: Path,
    config: Mapping[str, object],
    tensors: Mapping[str, Tensor],
    tokenizer_files: Iterable[Path] = (),
) -> None:
    """Write a model folder that the engine and the trainer both read, replacing `folder` if it is there.

    `config` is the content of config.json, `tensors` are whole and by Hugging Face name, `tokenizer_files` are
    copied as they are.
    """
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    (part / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, part / WEIGHTS_NAME, {"format": "pt"})
    for path in tokenizer_files:
        shutil.copyfile(path, part / path.name)
    replace_folder(part, folder)


def replace_folder(part: Path, folder: Path) -> None:
    """Make the finished `part` durable and give it the name `folder`; what had that name is removed."""
    for path in (*part.iterdir(), part):
        _sync(path)
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    part.rename(folder)
    _sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
