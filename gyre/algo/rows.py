"""Rows as bytes, for the way from the front to a trainer.

Format, little-endian: the magic `GYR1`; a uint32 with the length of the header; the header, UTF-8 JSON,
{"rows": [{"rollout", "advantage", "num_targets", "tokens": T, "targets": E}, ...]}; then for each row the
raw arrays tokens, positions, visible_until (int32, T each), edge_source, edge_token (int32, E each),
behavior_logprobs (float32, E), versions (int32, E). The header is padded with blanks so that every array is
aligned to 4 bytes. JSON carries a float exactly (shortest repr). Arrays come back read-only.
"""

import json
import struct
from collections.abc import Sequence

import numpy as np

from gyre.types import TreeRow

_MAGIC = b"GYR1"
_PREFIX = struct.Struct("<4sI")
_TOKEN_FIELDS = ("tokens", "positions", "visible_until")
_EDGE_FIELDS = ("edge_source", "edge_token", "behavior_logprobs", "versions")


def encode_rows(rows: Sequence[TreeRow]) -> bytes:
    """The rows in the format above."""
    facts = [
        {
            "rollout": row.rollout,
            "advantage": row.advantage,
            "num_targets": row.num_targets,
            "tokens": len(row.tokens),
            "targets": len(row.edge_token),
        }
        for row in rows
    ]
    header = json.dumps({"rows": facts}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 4)
    parts = [_PREFIX.pack(_MAGIC, len(header)), header]
    for row in rows:
        for name, dtype, length in _layout(len(row.tokens), len(row.edge_token)):
            array = np.ascontiguousarray(getattr(row, name), dtype=dtype)
            assert array.shape == (length,), (row.rollout, name, array.shape, length)
            parts.append(array.tobytes())
    return b"".join(parts)


def decode_rows(data: bytes | memoryview) -> tuple[TreeRow, ...]:
    """The rows of `encode_rows`. Raises ValueError on bytes of another format or another length."""
    view = memoryview(data)
    if len(view) < _PREFIX.size:
        raise ValueError("rows are cut short")
    magic, header_bytes = _PREFIX.unpack_from(view)
    if magic != _MAGIC:
        raise ValueError(f"rows begin with {magic!r}, not {_MAGIC!r}")
    offset = _PREFIX.size + header_bytes
    facts = json.loads(bytes(view[_PREFIX.size : offset]))["rows"]
    rows = []
    for fact in facts:
        arrays = {}
        for name, dtype, length in _layout(fact["tokens"], fact["targets"]):
            arrays[name] = np.frombuffer(view, dtype=dtype, count=length, offset=offset)
            offset += 4 * length
        rows.append(
            TreeRow(rollout=fact["rollout"], advantage=fact["advantage"], num_targets=fact["num_targets"], **arrays)
        )
    if offset != len(view):
        raise ValueError(f"rows hold {len(view)} bytes, their header says {offset}")
    return tuple(rows)


def _layout(num_tokens: int, num_targets: int) -> list[tuple[str, str, int]]:
    """(field, dtype, length) of a row's arrays in the order of the format."""
    tokens = [(name, "<i4", num_tokens) for name in _TOKEN_FIELDS]
    edges = [(name, "<f4" if name == "behavior_logprobs" else "<i4", num_targets) for name in _EDGE_FIELDS]
    return tokens + edges
