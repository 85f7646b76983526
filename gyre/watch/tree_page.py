"""One rollout's tree as HTML: each turn with the context that was new to it and its tokens, shaded by log-prob."""

from collections.abc import Callable, Sequence
from html import escape

import numpy as np

from gyre.watch.history import RolloutPast, TurnPast

MAX_TOKENS = 1500
"""Of a context or an answer; the middle of a longer one is left out."""
SHADES = ((-6.0, "p3"), (-3.0, "p2"), (-1.0, "p1"))

Read = Callable[[Sequence[int]], list[str]]


def tree_of(one: RolloutPast, why: str, read: Read) -> str:
    """A closed `details` element: the reason it was chosen, then turn by turn."""
    reward = "not graded" if one.reward is None else f"reward {one.reward:.2f}"
    head = f"{one.rollout} · {one.task} · {reward} · {len(one.turns)} turns"
    turns = {turn.record.node: turn.record.turn for turn in one.turns}
    inside = "".join(_turn(turn, turns, read) for turn in one.turns)
    find = escape(f"{one.rollout} {one.task}".lower(), quote=True)
    return (
        f"<details class='tree' data-find='{find}'><summary><b>{escape(why)}</b>: {escape(head)}</summary>"
        f"{inside}</details>"
    )


def _turn(turn: TurnPast, turns: dict[int, int], read: Read) -> str:
    record = turn.record
    context = np.frombuffer(record.context_tokens, "<i4").tolist()
    output = np.frombuffer(record.output_tokens, "<i4").tolist()
    logprobs = np.frombuffer(record.logprobs, "<f4").tolist()
    after = turns.get(record.parent_node) if record.parent_node is not None else None
    place = "begins a path" if after is None else f"after turn {after}"
    versions = ", ".join(str(version) for version in sorted({version for _, _, version in record.spans}))
    facts = f"turn {record.turn}, {place}: {len(output)} tokens, version {versions}, {record.seconds:.2f} s"
    facts += f", moved {record.moved} times" if record.moved else ""
    shown = _cut(read(context))
    context_html = (
        f"<div class='node'><h4>{len(context)} new context tokens</h4>{_text(shown)}</div>" if context else ""
    )
    tokens = "".join(_token(text, logprob) for text, logprob in zip(_cut(read(output)), _cut(logprobs), strict=True))
    answer = f"<div class='node sampled'><h4>{escape(facts)}</h4><div class='tokens'>{tokens}</div></div>"
    return context_html + answer


def _text(pieces: Sequence[str]) -> str:
    return f"<div class='tokens'>{escape(''.join(pieces))}</div>"


def _token(text: str, logprob: float) -> str:
    shade = next((look for limit, look in SHADES if logprob < limit), "")
    return f"<span class='t {shade}' title='{logprob:.3f}'>{escape(text)}</span>"


def _cut(values: Sequence) -> list:
    """The beginning and the end of a long sequence."""
    if len(values) <= MAX_TOKENS:
        return list(values)
    half = MAX_TOKENS // 2
    return [*values[:half], *values[-half:]]
