"""The shape of a row, read back from its intervals: runs of tokens, their parents, the place of every target.

A row holds its tree as `positions` and `visible_until` alone. A run is a maximal stretch of consecutive tokens on
one path whose tokens are seen by the same later tokens; a fork ends it. Roots have the parent -1.
"""

from dataclasses import dataclass, replace

import numpy as np

from gyre.types import Int32, TreeRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Forest:
    """Runs in row order: run i is the tokens [starts[i], ends[i]); `parents` are runs, -1 for a root."""

    starts: Int32
    ends: Int32
    parents: Int32

    def leaves(self) -> Int32:
        """The runs without children, in order."""
        return np.setdiff1d(np.arange(len(self.starts), dtype=np.int32), self.parents)


def read_forest(row: TreeRow) -> Forest:
    """The runs of a row (at least one token)."""
    until, length = np.asarray(row.visible_until), len(row.tokens)
    begins = np.ones(length, bool)
    # A token goes on with the run before it if it sees the token before it and is seen as far as that one is.
    begins[1:] = (until[1:] != until[:-1]) | (until[:-1] <= np.arange(1, length))
    starts = np.flatnonzero(begins).astype(np.int32)
    ends = np.append(starts[1:], length).astype(np.int32)
    parents = np.full(len(starts), -1, np.int32)
    open_runs: list[int] = []
    for run, start in enumerate(starts):
        while open_runs and until[starts[open_runs[-1]]] <= start:
            open_runs.pop()
        if open_runs:
            parents[run] = open_runs[-1]
        open_runs.append(run)
    return Forest(starts=starts, ends=ends, parents=parents)


def target_places(row: TreeRow) -> Int32:
    """The row index of each target's token, shape (E,), ascending.

    A target is told by its source and its token. Siblings that begin with the same token are told apart by the next
    target, which starts inside the right one; where it does not, they are the same event and the first is taken.
    """
    forest = read_forest(row)
    children: dict[int, list[int]] = {}
    for run, parent in enumerate(forest.parents):
        children.setdefault(int(forest.ends[parent]) - 1 if parent >= 0 else -1, []).append(int(forest.starts[run]))
    places, last = np.empty(len(row.edge_source), np.int32), -1
    for edge, (source, token) in enumerate(zip(row.edge_source.tolist(), row.edge_token.tolist(), strict=True)):
        options = [c for c in children.get(source, [source + 1]) if c > last and row.tokens[c] == token]
        assert options, f"{row.rollout}: target {edge} is not in its row"
        after = int(row.edge_source[edge + 1]) if edge + 1 < len(row.edge_source) else -1
        last = after if after in options else options[0]
        places[edge] = last
    return places


def target_paths(row: TreeRow) -> Int32:
    """The path each target belongs to, shape (E,): the first leaf, in row order, whose path holds its token."""
    forest = read_forest(row)
    run_of_target = np.searchsorted(forest.starts, target_places(row), side="right") - 1
    leaf_of_run = np.full(len(forest.starts), -1, np.int32)
    for order, leaf in enumerate(forest.leaves()):
        run = int(leaf)
        while run >= 0 and leaf_of_run[run] < 0:
            leaf_of_run[run] = order
            run = int(forest.parents[run])
    return leaf_of_run[run_of_target]


def flatten(row: TreeRow) -> list[TreeRow]:
    """Every path of a row as a row of its own, nothing shared: what tree training saves, for comparisons.

    Each target stays with the first path that holds it; paths without targets are left out.
    """
    forest, paths = read_forest(row), target_paths(row)
    index, rows = np.arange(len(row.tokens)), []
    for order, leaf in enumerate(forest.leaves()):
        end = int(forest.ends[leaf])
        path = index[(index < end) & (row.visible_until > end - 1)]
        own = paths == order
        if not own.any():
            continue
        length = len(path)
        rows.append(
            replace(
                row,
                rollout=f"{row.rollout}/{order}",
                num_targets=int(own.sum()),
                tokens=row.tokens[path],
                positions=np.arange(length, dtype=np.int32),
                visible_until=np.full(length, length, np.int32),
                edge_source=np.searchsorted(path, row.edge_source[own]).astype(np.int32),
                edge_token=row.edge_token[own],
                behavior_logprobs=row.behavior_logprobs[own],
                versions=row.versions[own],
            )
        )
    return rows
