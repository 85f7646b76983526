"""The trajectory tree of one rollout: every context it showed the policy and every turn the policy sampled.

Contexts share what they have in common: a context under a parent runs along existing context nodes as far
as their tokens agree, and a node is split where they part. Sampled turns are events: each keeps its own
node, even beside an equal one. A node id means "the path that ends here" and stays valid when a node is
split, because the lower part keeps the id. The tree only grows.
"""

from dataclasses import replace

import numpy as np

from gyre.tree.node import Node, PathRole, frozen_float32, frozen_int32
from gyre.types import Float32, Int32, Sample

_NO_INTS: Int32 = frozen_int32(np.empty(0, dtype=np.int32))
_NO_FLOATS: Float32 = frozen_float32(np.empty(0, dtype=np.float32))


class Tree:
    """Nodes by id, with roots and children in the order of their arrival."""

    def __init__(self) -> None:
        self._nodes: list[Node] = []
        self._children: dict[int | None, list[int]] = {None: []}
        self._num_leaves = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def node(self, node_id: int) -> Node:
        """The node as it is now (a later split may shorten a context node from the left)."""
        return self._nodes[node_id]

    def nodes(self) -> tuple[Node, ...]:
        """All nodes by id. A parent's id may be higher than its child's."""
        return tuple(self._nodes)

    def children(self, node_id: int | None) -> tuple[int, ...]:
        """Child ids in the order of arrival; the roots for None."""
        return tuple(self._children[node_id])

    def add_context(self, parent: int | None, tokens: Int32, role: PathRole = PathRole.MAIN) -> int:
        """Attach tokens that the policy did not sample and return the node in which their path ends.

        What agrees with contexts already under `parent` is shared. Empty `tokens` return `parent` itself,
        which then may not be None.
        """
        tokens = frozen_int32(tokens)
        if len(tokens) == 0:
            assert parent is not None, "an empty context cannot begin a tree"
            return parent
        at, done = parent, 0
        while done < len(tokens):
            child, common = self._agreeing_child(at, tokens[done:])
            if child is None:
                return self._append(at, tokens[done:], role, None)
            at = child if common == len(self._nodes[child].tokens) else self._split(child, common)
            done += common
        assert at is not None
        return at

    def add_sampled(self, parent: int | None, sample: Sample, role: PathRole = PathRole.MAIN) -> int:
        """Attach one sampled turn as a node of its own. `sample.spans` must cover the tokens without gap."""
        return self._append(parent, sample.tokens, role, sample)

    def path(self, node_id: int | None) -> Int32:
        """The token ids from the root to the end of `node_id`, shape (depth + length,); empty for None."""
        parts = [self._nodes[step].tokens for step in self.path_nodes(node_id)]
        return np.concatenate(parts) if parts else _NO_INTS

    def path_nodes(self, node_id: int | None) -> tuple[int, ...]:
        """The node ids from the root to `node_id`."""
        steps: list[int] = []
        while node_id is not None:
            steps.append(node_id)
            node_id = self._nodes[node_id].parent
        return tuple(reversed(steps))

    def path_length(self, node_id: int | None) -> int:
        """Tokens from the root to the end of `node_id`."""
        if node_id is None:
            return 0
        return self._nodes[node_id].depth + len(self._nodes[node_id].tokens)

    def leaves(self) -> tuple[int, ...]:
        """Ids of the nodes without children, ascending."""
        return tuple(node.id for node in self._nodes if not self._children[node.id])

    @property
    def num_leaves(self) -> int:
        """How many root-to-leaf paths there are."""
        return self._num_leaves

    @property
    def num_tokens(self) -> int:
        """Tokens that the tree holds, each once."""
        return sum(len(node.tokens) for node in self._nodes)

    @property
    def num_sampled(self) -> int:
        """Sampled tokens that the tree holds, each once."""
        return sum(len(node.tokens) for node in self._nodes if node.sampled)

    @property
    def shared_tokens(self) -> int:
        """Tokens saved against writing out every root-to-leaf path by itself."""
        return sum(self.path_length(leaf) for leaf in self.leaves()) - self.num_tokens

    def _agreeing_child(self, parent: int | None, tokens: Int32) -> tuple[int | None, int]:
        """The context child of `parent` that begins as `tokens` does, and for how many tokens."""
        for child in self._children[parent]:
            node = self._nodes[child]
            if not node.sampled and node.tokens[0] == tokens[0]:
                return child, common_prefix(node.tokens, tokens)
        return None, 0

    def _split(self, node_id: int, at: int) -> int:
        """Cut a context node after `at` tokens; the new upper part is returned, the lower part keeps the id."""
        lower = self._nodes[node_id]
        upper = replace(lower, id=len(self._nodes), tokens=frozen_int32(lower.tokens[:at]))
        siblings = self._children[lower.parent]
        siblings[siblings.index(node_id)] = upper.id
        self._nodes.append(upper)
        self._children[upper.id] = [node_id]
        self._nodes[node_id] = replace(
            lower, parent=upper.id, depth=lower.depth + at, tokens=frozen_int32(lower.tokens[at:])
        )
        return upper.id

    def _append(self, parent: int | None, tokens: Int32, role: PathRole, sample: Sample | None) -> int:
        node = Node(
            id=len(self._nodes),
            parent=parent,
            depth=self.path_length(parent),
            tokens=frozen_int32(tokens),
            sampled=sample is not None,
            behavior_logprobs=_NO_FLOATS if sample is None else frozen_float32(sample.logprobs),
            versions=_NO_INTS if sample is None else frozen_int32(versions_of(sample)),
            role=role,
        )
        if parent is None or self._children[parent]:
            self._num_leaves += 1
        self._nodes.append(node)
        self._children[node.id] = []
        self._children[parent].append(node.id)
        return node.id


def common_prefix(left: Int32, right: Int32) -> int:
    """How many leading tokens two id arrays share."""
    length = min(len(left), len(right))
    different = np.flatnonzero(left[:length] != right[:length])
    return int(different[0]) if len(different) else length


def versions_of(sample: Sample) -> Int32:
    """The policy version of each sampled token, shape (n,), from spans that must cover it without gap or overlap."""
    versions = np.empty(len(sample.tokens), dtype=np.int32)
    covered = 0
    for span in sample.spans:
        assert span.start == covered <= span.end, f"spans leave a gap or overlap: {sample.spans}"
        versions[span.start : span.end] = span.version
        covered = span.end
    assert covered == len(sample.tokens), f"spans cover {covered} of {len(sample.tokens)} tokens"
    return versions
