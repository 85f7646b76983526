"""Trees share contexts, keep samples apart, choose paths by role, and lay out rows that equal flattened paths."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.tree.node import PathRole
from gyre.tree.sample import layout_row, select_paths
from gyre.tree.tree import Tree, versions_of
from gyre.types import FinishReason, Sample, VersionSpan


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def sample(tokens: list[int], version: int = 0, first_logprob: float = -1.0) -> Sample:
    return Sample(
        tokens=ids(*tokens),
        logprobs=(first_logprob - np.arange(len(tokens)) / 64).astype(np.float32),
        spans=(VersionSpan(start=0, end=len(tokens), version=version),),
        finish=FinishReason.STOP,
    )


def test_identical_contexts_share_a_node_and_identical_samples_do_not() -> None:
    tree = Tree()
    context = tree.add_context(None, ids(1, 2, 3))
    assert tree.add_context(None, ids(1, 2, 3)) == context
    first, second = (tree.add_sampled(context, sample([7, 8])) for _ in range(2))
    assert first != second
    assert tree.children(context) == (first, second)
    assert (tree.num_tokens, tree.num_sampled, tree.shared_tokens) == (7, 4, 3)


def test_a_context_that_diverges_splits_a_node_and_every_path_stays_what_it_was() -> None:
    tree = Tree()
    long = tree.add_context(None, ids(1, 2, 3, 4))
    turn = tree.add_sampled(long, sample([9]))
    other = tree.add_context(None, ids(1, 2, 5))
    short = tree.add_context(None, ids(1, 2))
    assert tree.path(turn).tolist() == [1, 2, 3, 4, 9]
    assert tree.path(long).tolist() == [1, 2, 3, 4]
    assert tree.path(other).tolist() == [1, 2, 5]
    assert tree.path(short).tolist() == [1, 2]
    assert tree.num_tokens == 6
    assert tree.leaves() == (turn, other) and tree.num_leaves == 2


def test_context_never_runs_along_a_sampled_turn() -> None:
    tree = Tree()
    root = tree.add_context(None, ids(1))
    tree.add_sampled(root, sample([2, 3]))
    written = tree.add_context(root, ids(2, 3))
    assert not tree.node(written).sampled and len(tree.children(root)) == 2


def test_the_tree_keeps_copies_that_nobody_can_change() -> None:
    tokens = ids(1, 2)
    tree = Tree()
    node = tree.add_context(None, tokens)
    tokens[0] = 99
    assert tree.path(node).tolist() == [1, 2]
    with pytest.raises(ValueError):
        tree.node(node).tokens[0] = 5


def test_versions_follow_the_spans_and_gaps_are_refused() -> None:
    spans = (VersionSpan(start=0, end=2, version=4), VersionSpan(start=2, end=3, version=5))
    whole = Sample(tokens=ids(1, 2, 3), logprobs=np.zeros(3, np.float32), spans=spans, finish=FinishReason.STOP)
    assert versions_of(whole).tolist() == [4, 4, 5]
    gap = Sample(tokens=ids(1, 2, 3), logprobs=np.zeros(3, np.float32), spans=spans[:1], finish=FinishReason.STOP)
    with pytest.raises(AssertionError, match="spans cover 2 of 3"):
        versions_of(gap)


def test_higher_roles_are_exhausted_before_lower_ones() -> None:
    tree = Tree()
    root = tree.add_context(None, ids(1))
    main = [tree.add_sampled(root, sample([2])) for _ in range(2)]
    helper = tree.add_sampled(root, sample([3] * 500), PathRole.SUB_AGENT)
    chosen = select_paths(tree, max_paths=3, seed=1)
    assert set(chosen.leaves[:2]) == set(main) and chosen.leaves[2] == helper
    reversed_order = select_paths(tree, max_paths=1, priority=(PathRole.SUB_AGENT, PathRole.MAIN), seed=1)
    assert reversed_order.leaves == (helper,)


def test_leaves_are_drawn_in_proportion_to_their_untrained_tokens() -> None:
    tree = Tree()
    root = tree.add_context(None, ids(1))
    short = tree.add_sampled(root, sample([2] * 10))
    tree.add_sampled(root, sample([3] * 30))
    drawn = [select_paths(tree, max_paths=1, seed=seed).leaves[0] for seed in range(2000)]
    assert 0.2 < drawn.count(short) / len(drawn) < 0.3


def test_a_tree_without_a_sampled_turn_has_no_row() -> None:
    tree = Tree()
    tree.add_context(None, ids(1, 2))
    selection = select_paths(tree, max_paths=5, seed=0)
    assert selection.leaves == () and layout_row(tree, selection, rollout="0.0", advantage=1.0) is None


def test_the_first_token_of_a_root_is_never_a_target() -> None:
    tree = Tree()
    tree.add_sampled(None, sample([5, 6]))
    row = layout_row(tree, select_paths(tree, max_paths=1, seed=0), rollout="0.0", advantage=1.0)
    assert row is not None and row.edge_token.tolist() == [6] and row.edge_source.tolist() == [0]


def test_a_forking_token_has_one_edge_for_each_sampled_child() -> None:
    tree = Tree()
    root = tree.add_context(None, ids(1, 2))
    for first in (3, 4):
        tree.add_sampled(root, sample([first]))
    row = layout_row(tree, select_paths(tree, max_paths=5, seed=0), rollout="0.0", advantage=1.0)
    assert row is not None
    assert row.edge_source.tolist() == [1, 1] and row.edge_token.tolist() == [3, 4]


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    """A tree of a few contexts and turns over a small alphabet, so that contexts often agree in part."""
    tree, ends, event = Tree(), [None], 0
    for _ in range(draw(st.integers(1, 14))):
        parent = draw(st.sampled_from(ends))
        tokens = draw(st.lists(st.integers(0, 2), min_size=1, max_size=4))
        role = draw(st.sampled_from([PathRole.MAIN, PathRole.MAIN, PathRole.SUB_AGENT]))
        if draw(st.booleans()):
            event += 1
            tokens = tokens[: draw(st.integers(0, 4))]
            ends.append(tree.add_sampled(parent, sample(tokens, version=event, first_logprob=-event), role))
        else:
            ends.append(tree.add_context(parent, ids(*tokens), role))
    return tree


def flatten(tree: Tree, leaves: tuple[int, ...]) -> dict[tuple, tuple]:
    """Slow reference: (node, offset) -> (ids of the path up to and with it, logprob, version, is a target)."""
    found = {}
    for leaf in leaves:
        steps, at = [], leaf
        while at is not None:
            steps.insert(0, tree.node(at))
            at = tree.node(at).parent
        seen: list[int] = []
        for node in steps:
            for offset, token in enumerate(node.tokens.tolist()):
                is_target = node.sampled and bool(seen)
                seen.append(token)
                facts = (node.behavior_logprobs[offset], node.versions[offset]) if node.sampled else (None, None)
                found[(node.id, offset)] = (tuple(seen), *facts, is_target)
    return found


@settings(max_examples=30, deadline=None)
@given(tree=trees(), seed=st.integers(0, 3), max_paths=st.integers(1, 6))
def test_a_row_equals_the_flattened_paths_with_each_sampled_token_once(tree: Tree, seed: int, max_paths: int) -> None:
    selection = select_paths(tree, max_paths=max_paths, seed=seed)
    assert selection == select_paths(tree, max_paths=max_paths, seed=seed)
    assert len(selection.leaves) <= max_paths
    wanted = flatten(tree, selection.leaves)
    row = layout_row(tree, selection, rollout="3.1", advantage=0.5)
    targets = [facts for facts in wanted.values() if facts[3]]
    if row is None:
        assert not targets
        return
    assert len(row.tokens) == len(wanted)
    index = np.arange(len(row.tokens))
    contexts = []
    for query in index:
        visible = index[(index <= query) & (query < row.visible_until)]
        assert row.positions[visible].tolist() == list(range(len(visible)))
        contexts.append(tuple(row.tokens[visible].tolist()))
    assert sorted(contexts) == sorted(facts[0] for facts in wanted.values())
    edges = zip(row.edge_source, row.edge_token, row.behavior_logprobs, row.versions, strict=True)
    trained = sorted(((*contexts[source], token), logprob, version) for source, token, logprob, version in edges)
    assert trained == sorted((facts[0], facts[1], facts[2]) for facts in targets)
    assert row.num_targets == len(row.edge_token) == len(targets)


@settings(max_examples=20, deadline=None)
@given(tree=trees())
def test_shared_tokens_are_what_flattening_would_repeat(tree: Tree) -> None:
    flat = sum(len(tree.path(leaf)) for leaf in tree.leaves())
    assert tree.shared_tokens == flat - sum(len(node.tokens) for node in tree.nodes())
    assert tree.num_leaves == len(tree.leaves())
