"""Runs, targets and paths read back from a row, and rows without their older targets."""

import numpy as np
import pytest

from gyre.algo.forest import read_forest, target_paths, target_places
from gyre.algo.staleness import keep_newest
from gyre.tree.sample import layout_row, select_paths
from gyre.tree.tree import Tree
from gyre.types import FinishReason, Int32, Sample, TreeRow, VersionSpan


def draw_tree(seed: int, num_turns: int = 7) -> tuple[Tree, TreeRow]:
    """Short turns over few tokens, so that siblings often begin alike."""
    rng = np.random.default_rng(seed)
    tree, nodes = Tree(), list[int | None]([None])

    def tokens() -> Int32:
        return rng.integers(0, 3, int(rng.integers(1, 4))).astype(np.int32)

    for turn in range(num_turns):
        place = nodes[int(rng.integers(len(nodes)))]
        at = tree.add_context(place, tokens()) if rng.random() < 0.6 or place is None else place
        sampled = tokens()
        spans = (VersionSpan(start=0, end=len(sampled), version=turn // 3),)
        zeros = np.zeros(len(sampled), np.float32)
        nodes.append(
            tree.add_sampled(at, Sample(tokens=sampled, logprobs=zeros, spans=spans, finish=FinishReason.STOP))
        )
    row = layout_row(tree, select_paths(tree, max_paths=num_turns, seed=0), rollout="0.0", advantage=1.0)
    assert row is not None
    return tree, row


@pytest.mark.parametrize("seed", range(30))
def test_runs_cover_the_row_and_parents_are_the_nearest_visible_run(seed: int) -> None:
    _, row = draw_tree(seed)
    forest = read_forest(row)
    assert forest.starts[0] == 0 and forest.ends[-1] == len(row.tokens)
    assert forest.starts[1:].tolist() == forest.ends[:-1].tolist()
    for start, end, parent in zip(forest.starts, forest.ends, forest.parents, strict=True):
        seen = [k for k in range(start) if row.visible_until[k] > start]
        assert (seen[-1] if seen else -1) == (forest.ends[parent] - 1 if parent >= 0 else -1)
        assert row.positions[start:end].tolist() == list(range(len(seen), len(seen) + end - start))


@pytest.mark.parametrize("seed", range(30))
def test_each_target_is_found_in_its_row_with_its_source_before_it(seed: int) -> None:
    _, row = draw_tree(seed)
    places = target_places(row)
    assert (np.diff(places) > 0).all() and row.tokens[places].tolist() == row.edge_token.tolist()
    for place, source in zip(places, row.edge_source, strict=True):
        assert row.visible_until[source] > place and row.positions[place] == row.positions[source] + 1


@pytest.mark.parametrize("seed", range(30))
def test_the_paths_of_targets_are_the_first_leaves_that_hold_them(seed: int) -> None:
    _, row = draw_tree(seed)
    forest = read_forest(row)
    ends = [int(forest.ends[leaf]) - 1 for leaf in forest.leaves()]
    holders = [
        next(order for order, end in enumerate(ends) if place <= end < row.visible_until[place])
        for place in target_places(row)
    ]
    assert target_paths(row).tolist() == holders


def test_only_the_newest_targets_stay_and_the_tokens_all_do() -> None:
    _, row = draw_tree(4)
    kept = keep_newest(row)
    assert set(kept.versions) == {row.versions.max()} and kept.num_targets == (row.versions == row.versions.max()).sum()
    assert kept.tokens is row.tokens and len(kept.edge_source) == len(kept.behavior_logprobs) == kept.num_targets
    assert keep_newest(kept) is kept
