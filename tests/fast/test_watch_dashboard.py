"""What the dashboard says, as text, at several widths and without colour."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from gyre.schedule.cells import CellState
from gyre.watch.dashboard import FIXED_ROWS, next_switch, plain_line, render
from gyre.watch.snapshot import RunSnapshot
from gyre.watch.text import bar, count, duration
from tests.fakes.run_snapshot import make_schedule, make_snapshot


def drawn(snapshot: RunSnapshot, width: int, *, height: int | None = None, colour: bool = False) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=colour, no_color=not colour, legacy_windows=False)
    console.print(render(snapshot, width, height))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [80, 100, 140])
def test_everything_is_there_and_no_line_is_wider_than_the_terminal(width: int) -> None:
    text = drawn(make_snapshot(), width)
    assert {len(line) for line in text.splitlines()} == {width}
    wanted = [
        "gyre quickstart", "waterlevel, seed 0", "training  step 12 of 40", "3:24 so far, 7:10 left", "▲ training",
        "● serving", "▽ draining", "satellite", "5/8", "10 of 16, next cell leaves at 8", "┃", "2 of 4 groups",
        "4 ready, 3 claimed, 2 done", "0.690", "before 0.210", "812 tokens/s, 123k in all", "6 moved live",
        "log-prob gap 3.2e-06, clipped 12%, staleness 0.40", "cell 0 → training in 0.9 s (6 s ago)",
        "! warning: rollout 3.1 could not be graded", "d 112 p 112 f 102", "10 running", "oldest 14 s",
    ]  # fmt: skip
    assert [words for words in wanted if words not in text] == []


def test_without_colour_there_is_no_escape_and_nothing_is_lost() -> None:
    plain, coloured = drawn(make_snapshot(), 100), drawn(make_snapshot(), 100, colour=True)
    assert "\x1b" not in plain and "\x1b" in coloured


def test_starting_shows_who_is_missing_and_no_figures_yet() -> None:
    lines = ("ranks 2/3, missing 2", "hands box1", "cell 0: serving")
    text = drawn(make_snapshot(phase="starting", start_lines=lines, eta_s=None), 80)
    assert all(line in text for line in lines)
    assert "waterlevel  " not in text


def test_an_evaluation_shows_its_own_progress() -> None:
    text = drawn(make_snapshot(phase="evaluating before", eval_done=3, eval_total=24), 100)
    assert "evaluating before  3 of 24 rollouts" in text


@pytest.mark.parametrize("width", [80, 100, 140])
def test_the_height_changes_with_cells_and_messages_alone(width: int) -> None:
    calm = make_snapshot(messages=())
    others = [
        replace(calm, switches=(), rewards=(), eval_before=None),
        replace(calm, eval_after=0.7, rewards=(0.5,) * 200),
        replace(calm, harness_errors=12, waiting_turns=123),
        replace(calm, rollout_states=dict.fromkeys(("running", "ended", "graded", "scored", "dropped"), 1000)),
    ]
    assert {len(drawn(one, width).splitlines()) for one in (calm, *others)} == {FIXED_ROWS + 4}
    assert "after 0.700" in drawn(others[1], width) and "12 harness errors" in drawn(others[2], width)


@pytest.mark.parametrize("num_cells", [1, 3, 7, 8, 12, 40])
@pytest.mark.parametrize("height", [24, 40])
def test_messages_stay_in_sight_however_many_cells_there_are(num_cells: int, height: int) -> None:
    messages = (*(f"warning: {number} " + "long " * 20 for number in range(3)), "error: rank 2 died")
    snapshot = make_snapshot((CellState.SERVING,) * num_cells, messages=messages)
    lines = drawn(snapshot, 80, height=height).splitlines()
    assert len(lines) <= height
    assert any("error: rank 2 died" in line for line in lines)
    hidden = [line for line in lines if "more cells" in line]
    shown = sum("satellite " in line or "core " in line for line in lines)
    assert shown == num_cells if not hidden else f"and {num_cells - shown} more cells" in hidden[0]


def test_a_closed_step_fits_80_columns() -> None:
    schedule = make_schedule()
    assert schedule.batch is not None
    closed = replace(schedule, batch=replace(schedule.batch, is_closed=True))
    assert "2 of 4 groups, closed; 2 micro-steps done" in drawn(make_snapshot(schedule=closed), 80)


def test_many_cells_are_counted_instead_of_listed() -> None:
    states = (CellState.TRAINING,) + (CellState.SERVING,) * 100
    text = drawn(make_snapshot(states), 80)
    assert "and 89 more cells: 89 serving" in text
    assert len(text.splitlines()) < 35


@pytest.mark.parametrize("state", list(CellState))
def test_every_state_of_a_cell_can_be_drawn(state: CellState) -> None:
    assert state.value in drawn(make_snapshot((state, state)), 80)


def test_markup_in_messages_and_names_is_only_text() -> None:
    text = drawn(make_snapshot(messages=("error: [/] [red]x",), name="[bold]run"), 80)
    assert "[/] [red]x" in text and "[bold]run" in text


def test_an_ended_run_can_be_drawn_at_any_width() -> None:
    for width in range(44, 200, 13):
        drawn(make_snapshot(rewards=(), eval_before=None, messages=(), switches=(), cells=()), width)


def test_the_switch_mark_is_the_capacity_without_the_last_cell() -> None:
    assert next_switch(make_schedule()) == 8
    assert next_switch(make_schedule((CellState.TRAINING,))) is None


def test_a_plain_line_tells_the_step_the_waterlevel_and_the_cells() -> None:
    assert plain_line(make_snapshot()) == (
        "3:24 training step=12/40 w=10/16 cells=0:training,1:serving,2:serving,3:draining running=10"
        " tokens/s=812 reward=0.690 groups=2/4"
    )
    starting = make_snapshot(phase="starting", elapsed_s=9.0, start_lines=("ranks 2/3, missing 2", "hands missing"))
    assert plain_line(starting) == "9 s starting: ranks 2/3, missing 2; hands missing"


def test_bars_durations_and_counts() -> None:
    assert [bar(value, 4, 6) for value in (-1, 0, 0.01, 2, 3.99, 4, 9)] == [
        "▕░░░░▏", "▕░░░░▏", "▕█░░░▏", "▕██░░▏", "▕███░▏", "▕████▏", "▕████▏",
    ]  # fmt: skip
    assert bar(1, 0, 4) == "▕░░▏"
    assert [duration(value) for value in (0, 59.9, 187, 7387, 273600)] == ["0 s", "59 s", "3:07", "2:03:07", "3 d 4 h"]
    assert [count(value) for value in (812, 1234, 12345, 123456, 4.56e6)] == ["812", "1.23k", "12.3k", "123k", "4.56M"]
