"""Choose which paths of a tree are trained, and lay them out as one row.

Selection is bounded and by role: from the highest class that still has untrained tokens a leaf is drawn in
proportion to them, its whole root path is marked, and so on up to `max_paths`. It is a function of the tree
and the seed. The row keeps every token once, in depth-first order; targets live on edges, because a token
after which the tree forks has several next tokens. Only sampled tokens are targets, each exactly once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from gyre.tree.node import PathRole
from gyre.tree.tree import Tree
from gyre.types import RolloutId, TreeRow

DEFAULT_PRIORITY = (PathRole.MAIN, PathRole.SUB_AGENT, PathRole.MAIN_SUMMARY, PathRole.SUB_AGENT_SUMMARY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The drawn leaves, in the order of the draws, and every node on their root paths."""

    leaves: tuple[int, ...]
    nodes: frozenset[int]


def select_paths(
    tree: Tree, *, max_paths: int, priority: Sequence[PathRole | str] = DEFAULT_PRIORITY, seed: int
) -> Selection:
    """Draw at most `max_paths` leaves by role priority.

    `priority` orders the roles, highest first; a role that it leaves out is never trained, an unknown one
    raises ValueError. The same tree and seed give the same selection.
    """
    assert max_paths >= 1, max_paths
    random = Random(seed)
    roles = [PathRole(role) for role in priority]
    leaves = tree.leaves()
    paths = {leaf: tree.path_nodes(leaf) for leaf in leaves}
    marked: set[int] = set()
    chosen: list[int] = []
    while len(chosen) < max_paths:
        untrained = {
            leaf: sum(tree.node(step).num_targets for step in paths[leaf] if step not in marked) for leaf in leaves
        }
        leaf = _draw(tree, untrained, roles, random)
        if leaf is None:
            break
        chosen.append(leaf)
        marked.update(paths[leaf])
    return Selection(leaves=tuple(chosen), nodes=frozenset(marked))


def _draw(tree: Tree, untrained: dict[int, int], priority: Sequence[PathRole], random: Random) -> int | None:
    """One leaf of the highest class with anything untrained, in proportion to its untrained tokens."""
    for role in priority:
        weights = {leaf: count for leaf, count in untrained.items() if count and tree.node(leaf).role == role}
        if not weights:
            continue
        ticket = random.randrange(sum(weights.values()))
        for leaf, count in weights.items():
            if ticket < count:
                return leaf
            ticket -= count
    return None


def layout_row(tree: Tree, selection: Selection, *, rollout: RolloutId, advantage: float) -> TreeRow | None:
    """The selected nodes as one row of T tokens and E targets; None when nothing in them can be trained.

    Token arrays have shape (T,), edge arrays (E,). The first token of a sampled node is predicted from the
    last token before it on its path; a token that nothing precedes is never a target.
    """
    order, end_of = _depth_first(tree, selection)
    starts: dict[int, int] = {}
    last_index: dict[int | None, int] = {None: -1}
    source_parts, target_parts, logprob_parts, version_parts = [], [], [], []
    size = 0
    for node_id in order:
        node = tree.node(node_id)
        starts[node_id] = size
        before = last_index[node.parent]
        size += len(node.tokens)
        last_index[node_id] = size - 1 if len(node.tokens) else before
        if node.num_targets == 0:
            continue
        skipped = len(node.tokens) - node.num_targets
        sources = np.arange(starts[node_id] - 1, size - 1, dtype=np.int32)
        sources[0] = before
        source_parts.append(sources[skipped:])
        target_parts.append(node.tokens[skipped:])
        logprob_parts.append(node.behavior_logprobs[skipped:])
        version_parts.append(node.versions[skipped:])
    if not source_parts:
        return None
    lengths = {node_id: len(tree.node(node_id).tokens) for node_id in order}
    sources = np.concatenate(source_parts)
    return TreeRow(
        rollout=rollout,
        advantage=float(advantage),
        num_targets=len(sources),
        tokens=np.concatenate([tree.node(node_id).tokens for node_id in order]),
        positions=np.concatenate(
            [np.arange(tree.node(n).depth, tree.node(n).depth + lengths[n], dtype=np.int32) for n in order]
        ),
        visible_until=np.concatenate(
            [np.full(lengths[n], starts[end_of[n]] + lengths[end_of[n]], np.int32) for n in order]
        ),
        edge_source=sources,
        edge_token=np.concatenate(target_parts),
        behavior_logprobs=np.concatenate(logprob_parts),
        versions=np.concatenate(version_parts),
    )


def _depth_first(tree: Tree, selection: Selection) -> tuple[list[int], dict[int, int]]:
    """The selected nodes in depth-first order, and for each the last node of its selected subtree."""
    order: list[int] = []
    stack = [node for node in reversed(tree.children(None)) if node in selection.nodes]
    while stack:
        node = stack.pop()
        order.append(node)
        stack.extend(child for child in reversed(tree.children(node)) if child in selection.nodes)
    end_of: dict[int, int] = {}
    for node in reversed(order):
        end_of.setdefault(node, node)
        parent = tree.node(node).parent
        if parent is not None:
            end_of.setdefault(parent, end_of[node])
    return order, end_of
