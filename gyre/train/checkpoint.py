"""A trainer checkpoint: weights and Adam's moments as whole tensors by Hugging Face name, and a manifest.

The manifest is written last and holds the size and SHA-256 of every file; the folder appears by a rename. What
is incomplete, altered or of another format is a StoreError. Because moments are stored under the names of the
weights, a checkpoint does not depend on the layout that wrote it, and its weights are a plain model file.
megatron's dist_checkpointing is not used: its save and load are collectives over the world, while only the core
saves and the other cells serve meanwhile.
"""

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from gyre.errors import StoreError
from gyre.train.folder import WEIGHTS_NAME, replace_folder

_FORMAT = 1
_MANIFEST = "manifest.json"
_MOMENTS = {"exp_avg": "adam_exp_avg.safetensors", "exp_avg_sq": "adam_exp_avg_sq.safetensors"}
_FILES = (WEIGHTS_NAME, *_MOMENTS.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """What a checkpoint holds. `step` counts steps of the run, `adam_step` those that moved the weights."""

    step: int
    adam_step: int
    weights: Mapping[str, Tensor]
    exp_avg: Mapping[str, Tensor]
    exp_avg_sq: Mapping[str, Tensor]


def write_checkpoint(folder: Path, state: TrainerState) -> None:
    """Write `state` as `folder`, whole or not at all; what had that name is replaced."""
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    for name, tensors in zip(_FILES, (state.weights, state.exp_avg, state.exp_avg_sq), strict=True):
        save_file({key: tensor.cpu().contiguous() for key, tensor in tensors.items()}, part / name, {"format": "pt"})
    manifest = {
        "format": _FORMAT,
        "step": state.step,
        "adam_step": state.adam_step,
        "files": {name: _describe(part / name) for name in _FILES},
    }
    (part / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    replace_folder(part, folder)


def read_checkpoint(folder: Path) -> TrainerState:
    """The state in `folder`, verified. Raises StoreError that names the file at fault."""
    manifest = _read_manifest(folder)
    for name in _FILES:
        wanted = manifest["files"].get(name)
        try:
            given = _describe(folder / name)
        except OSError as error:
            raise StoreError(f"checkpoint {folder} is incomplete: {name} cannot be read") from error
        if given != wanted:
            raise StoreError(f"checkpoint {folder} is damaged: {name} is not the file its manifest describes")
    return TrainerState(
        step=manifest["step"],
        adam_step=manifest["adam_step"],
        weights=load_file(folder / WEIGHTS_NAME),
        exp_avg=load_file(folder / _MOMENTS["exp_avg"]),
        exp_avg_sq=load_file(folder / _MOMENTS["exp_avg_sq"]),
    )


def _read_manifest(folder: Path) -> dict:
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise StoreError(f"checkpoint {folder} is incomplete: {_MANIFEST} cannot be read") from error
    if manifest.get("format") != _FORMAT:
        raise StoreError(f"checkpoint {folder} has format {manifest.get('format')}, this version reads {_FORMAT}")
    return manifest


def _describe(path: Path) -> dict[str, object]:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}
