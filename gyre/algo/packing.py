"""Pack rows into micro-steps: in order, whole, nothing lost.

A micro-step is closed when the next row would take it over either bound. A row that alone is above the
token bound gets a micro-step of its own. Since weights are absolute, the packing never changes a gradient.
"""

from collections.abc import Sequence

from gyre.types import TreeRow


def pack(rows: Sequence[TreeRow], max_rollouts: int, max_tokens: int) -> list[tuple[TreeRow, ...]]:
    """Consecutive runs of `rows` with at most `max_rollouts` rows and `max_tokens` tokens each."""
    assert max_rollouts >= 1 and max_tokens >= 1, (max_rollouts, max_tokens)
    packed: list[tuple[TreeRow, ...]] = []
    open_rows: list[TreeRow] = []
    open_tokens = 0
    for row in rows:
        if open_rows and (len(open_rows) == max_rollouts or open_tokens + len(row.tokens) > max_tokens):
            packed.append(tuple(open_rows))
            open_rows, open_tokens = [], 0
        open_rows.append(row)
        open_tokens += len(row.tokens)
    if open_rows:
        packed.append(tuple(open_rows))
    return packed
