"""One self-contained HTML page about a run: curves, cells, where the time went, rollouts, trees, errors.

A pure function of the run's history and summary; everything that comes from a run is escaped. It loads nothing from
anywhere, so it can be mailed; it also works for a run that is going on, and then says so.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from gyre.schedule.cells import CellState
from gyre.store import records
from gyre.store.store import write_whole
from gyre.store.summary import Summary, summarize
from gyre.watch.charts import Line, Span, line_chart, share_bars, span_chart
from gyre.watch.history import At, History, RolloutPast, step_of
from gyre.watch.page import SCRIPT, STYLE
from gyre.watch.text import count, duration
from gyre.watch.tree_page import tree_of

Read = Callable[[Sequence[int]], list[str]]

MAX_SLOWEST = 20
MAX_TREES = 8
MAX_TROUBLES = 200
MAX_SPANS = 6000
"""Phases beyond this are of the run's end only: a page of a long run stays a few megabytes."""


def write_report(folder: Path, history: History, out: Path, *, read: Read) -> None:
    """Write the page to `out`. `read` gives one text a token id. Raises StoreError."""
    write_whole(out, render_report(history, summarize(folder), read=read).encode())


def render_report(history: History, summary: Summary, *, read: Read) -> str:
    """The page."""
    state = summary.ended or "not ended: going on, or cut off"
    body = "".join(
        (
            f"<header><h1>{escape(summary.name)}</h1><p class='sub'>policy {escape(summary.policy)}, seed "
            f"{summary.seed} · {escape(state)} · {duration(summary.wall_s)} · {len(history.lives)} "
            f"{'life' if len(history.lives) == 1 else 'lives'}</p></header>",
            _tiles(summary),
            f"<h2>Training</h2><div class='two'>{_curves(history, summary)}</div>",
            f"<h2>Cells</h2>{_cells(history)}{_levels(history)}",
            f"<h2>Where the time went</h2>{_time_of_cells(history)}{_time_of_rollouts(history)}",
            f"<h2>Slowest rollouts</h2>{_slowest(history)}",
            f"<h2>Trees</h2>{_trees(history, read)}",
            f"<h2>Errors and warnings</h2>{_troubles(history)}",
        )
    )
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width,initial-scale=1'>"
        f"<link rel='icon' href='data:,'><title>{escape(summary.name)} · gyre</title><style>{STYLE}</style></head>"
        f"<body>{body}<script>{SCRIPT}</script></body></html>\n"
    )


def _tiles(summary: Summary) -> str:
    tiles = [
        (f"{summary.steps}", "steps"),
        (_score(summary.eval_before), "held-out before"),
        (_score(summary.eval_after), "held-out after"),
        (f"{summary.rollouts}", f"rollouts, {summary.rollouts_dropped} dropped"),
        (count(summary.tokens_sampled), f"tokens sampled, {summary.tokens_per_s:.0f}/s"),
        (count(summary.tokens_trained), f"tokens trained, {summary.retokenised_tokens} retokenised"),
        (f"{summary.max_logprob_gap:.1e}", "largest log-prob gap"),
        (f"{summary.mean_switch_to_training_s:.2f} s", f"{summary.switches_to_training} switches to training"),
        (f"{summary.mean_switch_to_rollout_s:.2f} s", f"{summary.switches_to_rollout} switches to rollout"),
        (f"{summary.moved_live_requests}", "requests moved live"),
        (f"{summary.harness_errors}", "harness errors"),
    ]
    inside = "".join(
        f"<div class='tile'><b>{escape(value)}</b><span>{escape(name)}</span></div>" for value, name in tiles
    )
    return f"<div class='tiles'>{inside}</div>"


def _score(value: float) -> str:
    return f"{value:.3f}" if value >= 0 else "-"


def _curves(history: History, summary: Summary) -> str:
    steps = [step_of(at) for at in history.steps]
    work: dict[int, list[records.MicroStepTrained]] = defaultdict(list)
    for at in history.micro_steps:
        if isinstance(at.record, records.MicroStepTrained):
            work[at.record.step].append(at.record)
    last = max((step.step + 1 for step in steps), default=0)
    reward = [Line(name="reward of the batch", points=[(s.step + 1, s.reward_mean) for s in steps], look="green")]
    held_out = [(x, y) for x, y in ((0, summary.eval_before), (last, summary.eval_after)) if y >= 0]
    if held_out:
        reward.append(Line(name="held-out", points=held_out, look="blue"))
    loss = [(step + 1, sum(one.loss for one in ones)) for step, ones in sorted(work.items())]
    entropy = [(step + 1, _weighted(ones, [one.entropy for one in ones])) for step, ones in sorted(work.items())]
    gap = [(step + 1, max(one.max_logprob_gap for one in ones)) for step, ones in sorted(work.items())]
    charts = [
        line_chart("Reward", reward, x_name="step", low=0.0),
        line_chart("Loss", [Line(name="summed over micro-steps", points=loss, look="magenta")], x_name="step"),
        line_chart(
            "Gradient norm",
            [Line(name="before clipping", points=[(s.step + 1, s.grad_norm) for s in steps], look="amber")],
            x_name="step", low=0.0,
        ),
        line_chart("Entropy", [Line(name="mean of targets", points=entropy, look="blue")], x_name="step", low=0.0),
        line_chart(
            "Log-prob gap", [Line(name="engine against trainer, largest", points=gap, look="red")],
            x_name="step", low=0.0,
        ),
        line_chart(
            "Staleness",
            [Line(name="versions, mean", points=[(s.step + 1, s.staleness_mean) for s in steps], look="amber")],
            x_name="step", low=0.0,
        ),
    ]  # fmt: skip
    return "".join(charts)


def _weighted(ones: Sequence[records.MicroStepTrained], values: Sequence[float]) -> float:
    total = sum(one.num_targets for one in ones) or 1
    return sum(value * one.num_targets for one, value in zip(ones, values, strict=True)) / total


def _cells(history: History) -> str:
    cells = sorted({phase.cell for phase in history.phases})
    spans = [
        Span(
            row=cells.index(phase.cell), begin=phase.begin, end=history.closed(phase), look=phase.state.value,
            name=f"cell {phase.cell} {phase.state.value}, {history.closed(phase) - phase.begin:.2f} s",
        )
        for phase in history.phases[-MAX_SPANS:]
    ]  # fmt: skip
    looks = [state.value for state in CellState if any(span.look == state.value for span in spans)]
    return span_chart("What each cell did", [f"cell {cell}" for cell in cells], spans, end=history.end, legend=looks)


def _levels(history: History) -> str:
    level = [(time, float(waterlevel)) for time, waterlevel, _ in history.levels]
    serving = [(time, float(cells)) for time, _, cells in history.levels]
    return line_chart(
        "Waterlevel", [Line(name="unfinished rollouts", points=level, look="blue", is_step=True)], x_name="s", low=0.0
    ) + line_chart(
        "Cells in rollout", [Line(name="cells", points=serving, look="green", is_step=True)], x_name="s", low=0.0
    )


def _time_of_cells(history: History) -> str:
    sums: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for phase in history.phases:
        sums[phase.cell][phase.state.value] += history.closed(phase) - phase.begin
    rows = [
        (f"cell {cell}", [(state.value, parts.get(state.value, 0.0)) for state in CellState])
        for cell, parts in sorted(sums.items())
    ]
    looks = [state.value for state in CellState if any(parts.get(state.value) for parts in sums.values())]
    return f"<figure><figcaption>Cells {_keys(looks)}</figcaption>{share_bars(rows)}</figure>"


def _keys(looks: Sequence[str]) -> str:
    return "<span class='keys'>" + "".join(f"<span class='key {one}'>{one}</span>" for one in looks) + "</span>"


def _time_of_rollouts(history: History) -> str:
    looks = ("queue", "calls", "waiting", "tools", "grading")
    rows = []
    for purpose in ("train", "eval"):
        sums: dict[str, float] = dict.fromkeys(looks, 0.0)
        for one in history.rollouts:
            if one.purpose == purpose:
                for look, seconds in _parts_of(one, history.end).items():
                    sums[look] += seconds
        if any(sums.values()):
            rows.append((purpose, list(sums.items())))
    return f"<figure><figcaption>Rollouts, summed {_keys(looks)}</figcaption>{share_bars(rows)}</figure>"


def _parts_of(one: RolloutPast, now: float) -> dict[str, float]:
    """Seconds of a rollout by what it did; calls that overlap may count more than its harness ran."""
    running, ended = one.entered("running"), one.entered("ended")
    end = one.end if one.end is not None else now
    waited = sum(turn.record.waited_s for turn in one.turns)
    calls = sum(turn.record.seconds for turn in one.turns) - waited
    ran = 0.0 if running is None else (ended if ended is not None else end) - running
    return {
        "queue": (running if running is not None else end) - one.begin,
        "calls": max(0.0, calls),
        "waiting": waited,
        "tools": max(0.0, ran - calls - waited),
        "grading": 0.0 if ended is None else end - ended,
    }


def _slowest(history: History) -> str:
    ages = [((one.end if one.end is not None else history.end) - one.begin, one) for one in history.rollouts]
    ages.sort(key=lambda pair: -pair[0])
    heads = ("rollout", "task", "state", "seconds", "queue", "calls", "tools", "turns", "tokens", "moved", "reward")
    head = "".join(f"<th class='{'n' if place > 2 else ''}'>{name}</th>" for place, name in enumerate(heads))
    rows = []
    for seconds, one in ages[:MAX_SLOWEST]:
        parts = _parts_of(one, history.end)
        tokens = sum(len(turn.record.output_tokens) // 4 for turn in one.turns)
        reward = "-" if one.reward is None else f"{one.reward:.2f}"
        texts = [one.rollout, one.task, one.states[-1][0]]
        numbers = [f"{seconds:.1f}", *(f"{parts[name]:.1f}" for name in ("queue", "calls", "tools"))]
        numbers += [str(len(one.turns)), str(tokens), str(len(one.moves)), reward]
        cells = [f"<td>{escape(text)}</td>" for text in texts] + [f"<td class='n'>{text}</td>" for text in numbers]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    table = f"<table class='sorted'><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f"<div class='scroll'>{table}</div>"


def _trees(history: History, read: Read) -> str:
    chosen = _chosen([one for one in history.rollouts if one.turns])
    if not chosen:
        return "<p class='none'>no turn yet</p>"
    find = "<p><label>find <input id='find' placeholder='rollout or task'></label> tokens are shaded by log-prob: "
    keys = (
        "<span class='t p1'>below -1</span> <span class='t p2'>below -3</span> <span class='t p3'>below -6</span></p>"
    )
    return find + keys + "".join(tree_of(one, why, read) for why, one in chosen)


def _chosen(rollouts: Sequence[RolloutPast]) -> list[tuple[str, RolloutPast]]:
    """A few rollouts worth reading, each once, with the reason."""
    scored = [one for one in rollouts if one.reward is not None and one.purpose == "train"]
    picks: list[tuple[str, RolloutPast]] = []
    if scored:
        picks.append(("last with the best reward", max(scored, key=lambda one: (one.reward or 0.0, one.begin))))
        picks.append(("last with the worst reward", min(scored, key=lambda one: (one.reward or 0.0, -one.begin))))
        picks.append(("first", scored[0]))
        picks.append(("last", scored[-1]))
    if rollouts:
        picks.append(("most turns", max(rollouts, key=lambda one: len(one.turns))))
        picks.append(("slowest", max(rollouts, key=lambda one: (one.end or one.begin) - one.begin)))
    picks += [("moved live", one) for one in rollouts if one.moves][-1:]
    picks += [("could not be graded", one) for one in rollouts if one.error][-1:]
    seen: set[int] = set()
    return [pick for pick in picks if not (id(pick[1]) in seen or seen.add(id(pick[1])))][:MAX_TREES]


def _troubles(history: History) -> str:
    if not history.troubles:
        return "<p class='none'>none</p>"
    rows = []
    for at in history.troubles[-MAX_TROUBLES:]:
        level, text = _words(at)
        rows.append(
            f"<tr><td class='n'>{at.time:.1f} s</td><td class='{escape(level)}'>{escape(level)}</td>"
            f"<td class='wide'>{escape(text)}</td></tr>"
        )
    hidden = len(history.troubles) - len(rows)
    more = f"<p class='sub'>and {hidden} earlier ones</p>" if hidden else ""
    return f"<div class='scroll'><table><tbody>{''.join(rows)}</tbody></table></div>{more}"


def _words(at: At) -> tuple[str, str]:
    match at.record:
        case records.Trouble(level=level, text=text):
            return level, text
        case records.HarnessError(rollout=rollout, detail=detail):
            return "error", f"rollout {rollout}: {detail}"
        case records.OrderTaken(order=order):
            return "ordered", order
    return "", type(at.record).__name__
