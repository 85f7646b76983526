"""SGLang's weight and memory operations as coroutines of its loop, with every result checked.

Outside begin/end, SGLang refuses an update by returning (False, why) without raising. Tensors travel in
buckets, so that the copy in flight stays small beside the model.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from gyre.errors import EngineError
from gyre.serve.request import SglangEngine

log = logging.getLogger(__name__)

BUCKET_BYTES = 512 << 20
TIED_NAME = "lm_head.weight"


async def replace_weights(engine: SglangEngine, tensors: list[tuple[str, Tensor]], version: int) -> None:
    """Replace the weights by `tensors`; earlier prefixes are forgotten. Raises EngineError."""
    from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput, EndWeightUpdateReqInput

    if not tensors:
        raise EngineError(f"version {version} has no tensors")
    manager = engine.tokenizer_manager
    _require(await manager.begin_weight_update(BeginWeightUpdateReqInput(), None), "beginning a weight update")
    try:
        for bucket in buckets(tensors, BUCKET_BYTES):
            await _send(engine, bucket, version)
    except BaseException:
        # The session is closed so that a later load can open one; the caller leaves the engine unversioned.
        closed = await manager.end_weight_update(EndWeightUpdateReqInput(), None)
        log.warning("engine version=%d update failed, session closed=%s", version, closed)
        raise
    _require(await manager.end_weight_update(EndWeightUpdateReqInput(), None), "ending a weight update")


async def _send(engine: SglangEngine, bucket: list[tuple[str, Tensor]], version: int) -> None:
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

    update = UpdateWeightsFromTensorReqInput(
        serialized_named_tensors=engine._serialize_tensors_per_rank(bucket, None),
        flush_cache=True,
        weight_version=str(version),
    )
    result = await engine.tokenizer_manager.update_weights_from_tensor(update, None)
    _require(result, f"updating {len(bucket)} tensors from {bucket[0][0]}")


def read_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors in a model folder's safetensors files, by name; only headers are read.

    An output layer that is tied to the embedding is left out: it is the embedding. Raises EngineError.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    if not shapes:
        raise EngineError(f"{folder} holds no safetensors")
    if json.loads((folder / "config.json").read_text()).get("tie_word_embeddings", False):
        shapes.pop(TIED_NAME, None)
    return shapes


def require_whole(tensors: list[tuple[str, Tensor]], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise EngineError unless these are all the model's tensors.

    SGLang's scheduler dies of a wrong shape, and it skips a name that it does not know.
    """
    given = {name: tuple(tensor.shape) for name, tensor in tensors if name in shapes or name != TIED_NAME}
    absent = sorted(shapes.keys() - given.keys())
    unknown = sorted(given.keys() - shapes.keys())
    if absent or unknown:
        raise EngineError(f"the weights are not the model's: missing {absent[:3]}, unknown {unknown[:3]}")
    for name, shape in given.items():
        if shape != shapes[name]:
            raise EngineError(f"{name} has shape {shape}, the model wants {shapes[name]}")


def buckets(tensors: list[tuple[str, Tensor]], limit_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """`tensors` in order, in runs of at most `limit_bytes` (a larger tensor is a run of its own)."""
    bucket: list[tuple[str, Tensor]] = []
    filled = 0
    for name, tensor in tensors:
        if bucket and filled + tensor.nbytes > limit_bytes:
            yield bucket
            bucket, filled = [], 0
        bucket.append((name, tensor.detach().contiguous()))
        filled += tensor.nbytes
    if bucket:
        yield bucket


async def release_memory(engine: SglangEngine) -> None:
    """Give weights and KV memory back. The scheduler must be idle."""
    from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

    await engine.tokenizer_manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=None), None)


async def resume_memory(engine: SglangEngine) -> None:
    """Take the memory again."""
    from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

    await engine.tokenizer_manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=None), None)


def _require(result: object, act: str) -> None:
    """SGLang answers (success, message), sometimes with more behind."""
    if not (isinstance(result, tuple) and result and result[0] is True):
        message = result[1] if isinstance(result, tuple) and len(result) > 1 else result
        raise EngineError(f"{act}: {message}")
