"""A snapshot as a picture: a pure function to a rich renderable, and one to a plain line.

Everything that colour says is also said by a word or a sign, so that the picture reads the same without colour.
Nothing here knows a clock or a terminal; the width is an argument. At most `MAX_CELLS` cells get a row each.
"""

from collections import Counter
from collections.abc import Sequence

from rich.box import ROUNDED
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from gyre.schedule.cells import CellState
from gyre.schedule.snapshot import CellSnapshot, ScheduleSnapshot
from gyre.store.summary import sparkline
from gyre.watch.snapshot import CellPicture, RunSnapshot
from gyre.watch.text import bar, count, duration

MAX_CELLS = 12
MAX_MESSAGES = 4
FIXED_ROWS = 13
"""All but cells and messages: frame 2, head 2, the table's header, a blank and 7 figures."""
LABEL_COLUMNS = 12
NOTHING = "-"
GAP_ALARM = 1e-2
"""A log-prob gap between engine and trainer (nats) that a person should look into."""

LOOKS: dict[CellState, tuple[str, str]] = {
    CellState.SERVING: ("●", "green"),
    CellState.LOADING: ("◐", "cyan"),
    CellState.DRAINING: ("▽", "yellow"),
    CellState.RELEASED: ("▽", "yellow"),
    CellState.JOINING: ("△", "yellow"),
    CellState.TRAINING: ("▲", "magenta"),
    CellState.PUBLISHING: ("◆", "blue"),
    CellState.LOST: ("✗", "bold red"),
}


def render(snapshot: RunSnapshot, width: int, height: int | None = None) -> RenderableType:
    """The whole dashboard for a terminal of `width` columns (useful from about 60).

    With `height` given, cells give way so that the messages stay in sight (useful from about 16 rows).
    """
    inner = max(40, width - 4)
    parts: list[RenderableType] = [_head(snapshot, inner), Text()]
    if snapshot.start_lines:
        parts.append(_start(snapshot))
    else:
        parts += [
            _cells(snapshot, inner, _room_for_cells(snapshot, inner, height)),
            Text(),
            _figures(snapshot, inner - LABEL_COLUMNS),
        ]
    if shown := _shown_messages(snapshot):
        parts += [Text(), *(_message(text) for text in shown)]
    return Panel(
        Group(*parts),
        box=ROUNDED,
        border_style="dim",
        padding=(0, 1),
        width=max(44, width),
        title=Text.assemble(("gyre", "bold"), f" {snapshot.name}"),
        title_align="left",
        subtitle=Text(f"{snapshot.policy}, seed {snapshot.seed}", style="dim"),
        subtitle_align="right",
    )


def plain_line(snapshot: RunSnapshot) -> str:
    """The run now, in one line of plain text."""
    schedule = snapshot.schedule
    if snapshot.start_lines:
        return f"{duration(snapshot.elapsed_s)} starting: {'; '.join(snapshot.start_lines)}"
    words = [duration(snapshot.elapsed_s), snapshot.phase]
    if snapshot.phase.startswith("evaluating"):
        words.append(f"{snapshot.eval_done}/{snapshot.eval_total}")
    words += [
        f"step={schedule.version}/{schedule.steps}",
        f"w={schedule.waterlevel}/{schedule.capacity}",
        "cells=" + ",".join(_short(cell) for cell in schedule.cells[:MAX_CELLS]),
        f"running={snapshot.rollout_states.get('running', 0)}",
        f"tokens/s={snapshot.tokens_per_s:.0f}",
    ]
    if snapshot.rewards:
        words.append(f"reward={snapshot.rewards[-1]:.3f}")
    if schedule.batch is not None:
        batch = schedule.batch
        words.append(f"groups={batch.groups_ready}/{batch.num_groups}")
    if snapshot.orders:
        words.append(f"({', '.join(snapshot.orders)})")
    return " ".join(words)


def next_switch(schedule: ScheduleSnapshot) -> int | None:
    """The waterlevel at or below which the next cell may leave rollout: C_R - C_e; None if none may."""
    in_rollout = [cell for cell in schedule.cells if cell.state in (CellState.SERVING, CellState.LOADING)]
    if not in_rollout:
        return None
    return max(0, schedule.capacity - in_rollout[-1].capacity)


def _short(cell: CellSnapshot) -> str:
    return f"{cell.index}:{cell.state.value}"


def _head(snapshot: RunSnapshot, inner: int) -> RenderableType:
    schedule = snapshot.schedule
    left = Text.assemble((snapshot.phase, "bold"))
    if snapshot.phase.startswith("evaluating"):
        done, total = snapshot.eval_done, snapshot.eval_total
        left.append(f"  {done} of {total} rollouts")
    else:
        done, total = schedule.version, schedule.steps
        left.append(f"  step {done} of {total}")
    times = f"{duration(snapshot.elapsed_s)} so far"
    if snapshot.eta_s is not None:
        times += f", {duration(snapshot.eta_s)} left"
    right = Text(times, style="dim")
    room = inner - left.cell_len - right.cell_len - 4
    middle = Text(bar(done, total, max(6, room)), style="green") if room >= 6 else Text()
    return _spread(left, middle, right)


def _spread(left: Text, middle: Text, right: Text) -> Table:
    grid = Table.grid(expand=True, padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column(justify="center", ratio=1, no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_row(left, middle, right)
    return grid


def _start(snapshot: RunSnapshot) -> RenderableType:
    lines = [Text.assemble(("· ", "dim"), line, style=_start_style(line)) for line in snapshot.start_lines]
    shown = lines[: MAX_CELLS + 2]
    if len(lines) > len(shown):
        shown.append(Text(f"· and {len(lines) - len(shown)} more", style="dim"))
    return Group(*shown)


def _start_style(line: str) -> str:
    if "missing" in line:
        return "yellow"
    return "green" if "serving" in line else ""


def _room_for_cells(snapshot: RunSnapshot, inner: int, height: int | None) -> int:
    """Rows of the table of cells, when all that stands around it takes its place first."""
    if height is None:
        return MAX_CELLS
    messages = _shown_messages(snapshot)
    taken = FIXED_ROWS + sum(1 + (len(text) + 2) // inner for text in messages) + bool(messages)
    room = height - taken
    if len(snapshot.schedule.cells) > room:
        room -= 1  # the line that counts the others
    return max(1, min(MAX_CELLS, room))


def _cells(snapshot: RunSnapshot, inner: int, max_cells: int) -> RenderableType:
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim", expand=False)
    is_wide = inner >= 90
    table.add_column("cell", justify="right", no_wrap=True)
    table.add_column("role", no_wrap=True)
    table.add_column("state", no_wrap=True, min_width=12)
    table.add_column("for", justify="right", no_wrap=True, min_width=5)
    table.add_column("version", justify="right", no_wrap=True)
    table.add_column("requests", justify="right", no_wrap=True)
    table.add_column("rollouts", no_wrap=True, min_width=13)
    if is_wide:
        table.add_column("doing", no_wrap=True, overflow="ellipsis", max_width=inner - 74)
    shown = snapshot.schedule.cells[:max_cells]
    for cell, picture in zip(shown, snapshot.cells, strict=False):
        row = _cell_row(cell, picture, snapshot.elapsed_s)
        table.add_row(*(row if is_wide else row[:-1]))
    hidden = snapshot.schedule.cells[max_cells:]
    if not hidden:
        return table
    counts = Counter(cell.state.value for cell in hidden)
    tail = ", ".join(f"{number} {state}" for state, number in counts.most_common())
    return Group(table, Text(f"and {len(hidden)} more cells: {tail}", style="dim"))


def _cell_row(cell: CellSnapshot, picture: CellPicture, now: float) -> Sequence[Text]:
    sign, style = LOOKS[cell.state]
    if cell.state in (CellState.SERVING, CellState.LOADING):
        routed = Text.assemble((bar(cell.routed, cell.capacity, 8), "green"), f" {cell.routed}/{cell.capacity}")
    else:
        routed = Text(NOTHING, style="dim")
    doing = Text(f"{picture.doing} {duration(picture.doing_s)}" if picture.doing else "", style="dim")
    return (
        Text(str(cell.index)),
        Text(cell.role.value, style="bold" if cell.index == 0 else ""),
        Text(f"{sign} {cell.state.value}", style=style),
        Text(duration(max(0.0, now - cell.since)), style="dim"),
        Text(str(picture.version) if picture.version >= 0 else NOTHING),
        Text(str(picture.requests) if picture.requests else NOTHING),
        routed,
        doing,
    )


def _figures(snapshot: RunSnapshot, room: int) -> RenderableType:
    grid = Table.grid(padding=(0, 0), expand=False)
    grid.add_column(width=LABEL_COLUMNS, no_wrap=True, style="dim")
    grid.add_column(overflow="ellipsis", no_wrap=True, max_width=room)  # a row is a line: the picture keeps its height
    grid.add_row("waterlevel", _waterlevel(snapshot.schedule, room))
    grid.add_row("rollouts", _rollouts(snapshot))
    grid.add_row("batch", _batch(snapshot, room))
    grid.add_row("reward", _reward(snapshot, room))
    grid.add_row("sampling", _sampling(snapshot))
    grid.add_row("training", _training(snapshot))
    grid.add_row("switches", _switches(snapshot, room))
    return grid


def _waterlevel(schedule: ScheduleSnapshot, room: int) -> Text:
    """w against C_R. `┃` marks where the next cell may leave."""
    mark = next_switch(schedule)
    label = f" {schedule.waterlevel} of {schedule.capacity}"
    tail = "" if mark is None else f", next cell leaves at {mark}"
    columns = max(10, min(48, room - len(label) - len(tail)))
    drawn = bar(schedule.waterlevel, schedule.capacity, columns)
    text = Text(drawn, style="cyan")
    if mark is not None and schedule.capacity:
        at = 1 + min(columns - 3, round(mark / schedule.capacity * (columns - 2)))
        text = Text.assemble((drawn[:at], "cyan"), ("┃", "bold yellow"), (drawn[at + 1 :], "cyan"))
    return Text.assemble(text, label, (tail, "dim"))


def _rollouts(snapshot: RunSnapshot) -> Text:
    schedule, states = snapshot.schedule, snapshot.rollout_states
    text = Text(f"d {schedule.dispatched} p {schedule.started} f {schedule.terminated}")
    text.append("  " + ", ".join(f"{number} {state}" for state, number in states.items() if number))
    if schedule.waiting:
        text.append(f", {schedule.waiting} waiting", style="yellow")
    if snapshot.longest_running_s:
        text.append(f", oldest {duration(snapshot.longest_running_s)}", style="dim")
    return text


def _batch(snapshot: RunSnapshot, room: int) -> Text:
    batch = snapshot.schedule.batch
    if batch is None:
        return Text("all steps trained" if snapshot.schedule.is_finished else NOTHING, style="dim")
    text = Text.assemble(
        (bar(batch.groups_ready, batch.num_groups, max(8, min(16, room // 6))), "magenta"),
        f" {batch.groups_ready} of {batch.num_groups} groups",
    )
    if batch.is_closed:
        text.append(", closed", style="yellow")
        return text.append(f"; {batch.micro_steps_done} micro-steps done")
    return text.append(
        f"; micro-steps {batch.micro_steps_ready} ready, {batch.micro_steps_claimed} claimed,"
        f" {batch.micro_steps_done} done"
    )


def _reward(snapshot: RunSnapshot, room: int) -> Text:
    evaluations = "".join(
        f"  {name} {value:.3f}"
        for name, value in (("before", snapshot.eval_before), ("after", snapshot.eval_after))
        if value is not None
    )
    if not snapshot.rewards:
        return Text.assemble(("no step yet", "dim"), evaluations)
    recent = snapshot.rewards[-8:]
    last = f" {snapshot.rewards[-1]:.3f}"
    mean = f" (last {len(recent)}: {sum(recent) / len(recent):.3f})"
    columns = max(8, min(60, room - len(last) - len(mean) - len(evaluations)))
    curve = sparkline(snapshot.rewards[-columns:])
    return Text.assemble((curve, "green"), (last, "bold"), (mean, "dim"), evaluations)


def _sampling(snapshot: RunSnapshot) -> Text:
    text = Text.assemble(
        (f"{snapshot.tokens_per_s:.0f}", "bold"), f" tokens/s, {count(snapshot.tokens_sampled)} in all; "
    )  # fmt: skip
    if snapshot.harness_errors:  # first, since a narrow terminal cuts the end off
        text.append(f"{snapshot.harness_errors} harness errors", style="bold red").append(", ")
    text.append(f"{snapshot.moved_live_requests} moved live")
    if snapshot.waiting_turns:
        text.append(f", {snapshot.waiting_turns} waiting", style="yellow")
    return text


def _training(snapshot: RunSnapshot) -> Text:
    gap_style = "bold red" if snapshot.max_logprob_gap > GAP_ALARM else ""
    return Text.assemble(
        "log-prob gap ", (f"{snapshot.max_logprob_gap:.1e}", gap_style), f", clipped {snapshot.clip_share:.0%},"
        f" staleness {snapshot.staleness_mean:.2f}",
    )  # fmt: skip


def _switches(snapshot: RunSnapshot, room: int) -> Text:
    words: list[str] = []
    for switch in reversed(snapshot.switches):
        ago = duration(max(0.0, snapshot.elapsed_s - switch.at_s))
        word = f"cell {switch.cell} → {switch.duty} in {switch.seconds:.1f} s ({ago} ago)"
        if len("  ".join([*words, word])) > room:
            break
        words.append(word)
    return Text("  ".join(words)) if words else Text(NOTHING, style="dim")


def _shown_messages(snapshot: RunSnapshot) -> tuple[str, ...]:
    return (*snapshot.messages[-MAX_MESSAGES:], *(f"ordered: {order}" for order in snapshot.orders))


def _message(text: str) -> Text:
    style = "bold red" if text.startswith("error") else "yellow"
    return Text.assemble(("! ", style), (text, style), overflow="fold")
