"""Weights on the way from the trainer to engines and replicas: exposed by version, pulled, verified.

The fingerprint of a set of named tensors covers names, dtypes, shapes and bytes, in any order: the trainer's
exporter, a reader and an engine that hold the same weights agree on it. A shelf keeps its last two versions, so
that a reader of the one before the newest is not cut.
"""

import logging
import time
from collections.abc import Iterable, Sequence

import msgspec
import torch
import xxhash
from torch import Tensor

from gyre.errors import TransportError
from gyre.fabric.shm import ShmTransport
from gyre.fabric.transport import Region, Transport

log = logging.getLogger(__name__)

KEPT_VERSIONS = 2
ALIGN_BYTES = 64


class _Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of a manifest: where its bytes lie in the region."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class _Manifest(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    fingerprint: str
    region: bytes
    size: int
    tensors: tuple[_Entry, ...]


def fingerprint_of(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Hex digest (xxh3, 128 bits) of named tensors; their order does not matter, a name may occur once."""
    digests: dict[str, bytes] = {}
    for name, tensor in tensors:
        assert name not in digests, name
        digest = xxhash.xxh3_128(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(_bytes_of(tensor))
        digests[name] = digest.digest()
    return xxhash.xxh3_128_hexdigest(b"".join(digests[name] for name in sorted(digests)))


def _bytes_of(tensor: Tensor) -> memoryview:
    """A tensor's bytes in row-major order; a view where it lies so in host memory already."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


class WeightShelf:
    """The owner's side: at most two versions, each a region of its own. Not thread-safe."""

    def __init__(self, run: str, transport: Transport | None = None) -> None:
        self._transport = transport or ShmTransport(run)
        self._regions: dict[int, Region] = {}

    def expose(self, version: int, tensors: Sequence[tuple[str, Tensor]]) -> bytes:
        """Copy the tensors out as `version`; returns the description for `pull_weights`.

        The version before the last is released. Raises TransportError when there is no room.
        """
        assert version not in self._regions, f"version {version} is exposed already"
        entries: list[_Entry] = []
        buffers: list[memoryview] = []
        end = 0
        for name, tensor in tensors:
            padding = -end % ALIGN_BYTES
            buffers += [memoryview(bytes(padding))] if padding else []
            data = _bytes_of(tensor)
            dtype = str(tensor.dtype).removeprefix("torch.")
            start = end + padding
            entries.append(_Entry(name=name, dtype=dtype, shape=tuple(tensor.shape), offset=start, nbytes=data.nbytes))
            buffers.append(data)
            end = start + data.nbytes
        # Released first, so that no more than two versions ever lie in memory.
        for old in sorted(self._regions)[: -(KEPT_VERSIONS - 1)]:
            self._transport.release(self._regions.pop(old))
        region = self._transport.register(buffers)
        self._regions[version] = region
        manifest = _Manifest(
            version=version,
            fingerprint=fingerprint_of(tensors),
            region=self._transport.describe(region),
            size=end,
            tensors=tuple(entries),
        )
        return msgspec.msgpack.encode(manifest)

    def acknowledged(self, version: int) -> int:
        """How many readers hold `version` whole."""
        return self._transport.acknowledged(self._regions[version]) if version in self._regions else 0

    def close(self) -> None:
        """Release everything."""
        self._regions.clear()
        self._transport.close()


def pull_weights(description: bytes, deadline: float, transport: Transport | None = None) -> list[tuple[str, Tensor]]:
    """The named tensors behind a description, in host memory, verified and acknowledged.

    Raises TransportError when they are gone, released, not those described, or not here by `deadline`.
    """
    began = time.monotonic()
    try:
        manifest = msgspec.msgpack.decode(description, type=_Manifest)
    except msgspec.DecodeError as error:
        raise TransportError(f"not a description of weights: {error}") from error
    source = transport or ShmTransport("reader")
    flat = torch.empty(manifest.size, dtype=torch.uint8)
    source.pull(manifest.region, flat.numpy().data, None, deadline)
    tensors = [(entry.name, _tensor_at(flat, entry)) for entry in manifest.tensors]
    found = fingerprint_of(tensors)
    if found != manifest.fingerprint:
        raise TransportError(f"version {manifest.version} arrived as {found}, wanted {manifest.fingerprint}")
    source.acknowledge(manifest.region)
    log.debug("weights version=%d bytes=%d seconds=%.3f", manifest.version, manifest.size, time.monotonic() - began)
    return tensors


def _tensor_at(flat: Tensor, entry: _Entry) -> Tensor:
    data = flat[entry.offset : entry.offset + entry.nbytes]
    return data.view(getattr(torch, entry.dtype)).reshape(entry.shape)
