"""The report page: everything in one file, well formed, nothing of a run taken for markup."""

import html.parser
import re
from pathlib import Path

import pytest

from gyre.store import records
from gyre.store.summary import summarize
from gyre.watch.charts import Line, line_chart
from gyre.watch.history import read_history
from gyre.watch.report import render_report
from tests.fakes.run_records import began, story, whole_run
from tests.fast.test_timeline import stored

VOID = {"meta", "link", "input", "rect", "line", "polyline", "circle"}


class Nesting(html.parser.HTMLParser):
    """Fails on an element that is not closed where it was opened."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


def page(folder: Path, story_: list[records.Record]) -> str:
    stored(folder, story_)
    return render_report(read_history(folder), summarize(folder), read=lambda ids: [f"<{token}>" for token in ids])


@pytest.mark.parametrize("length", [1, 12, 20, None])
def test_a_page_is_well_formed_at_every_stage_of_a_run(tmp_path: Path, length: int | None) -> None:
    nesting = Nesting()
    nesting.feed(page(tmp_path / "run", story()[:length]))
    assert nesting.open == []


def test_a_page_loads_nothing_from_anywhere(tmp_path: Path) -> None:
    text = page(tmp_path / "run", story())
    assert re.findall(r"(?:src|href)=['\"](?!data:,)", text) == [] and "http" not in text and "@import" not in text


def test_texts_of_a_run_are_escaped(tmp_path: Path) -> None:
    text = page(tmp_path / "run", story())
    assert "&lt;b&gt;something&lt;/b&gt; odd" in text and "<b>something" not in text
    assert "&lt;3&gt;" in text and "<3>" not in text


def test_it_tells_the_runs_figures_rollouts_and_trees(tmp_path: Path) -> None:
    text = page(tmp_path / "run", story())
    for wanted in ("toy", "finished", "Waterlevel", "cell 0 training", "last with the best reward"):
        assert wanted in text
    assert "turn 0, begins a path: 4 tokens, version 0" in text


def test_a_run_that_goes_on_says_so(tmp_path: Path) -> None:
    assert "not ended" in page(tmp_path / "run", [began()])


def test_records_without_times_still_give_a_page(tmp_path: Path) -> None:
    assert "0.750" in page(tmp_path / "run", whole_run())


def test_a_chart_leaves_out_what_is_no_number_and_stays_small() -> None:
    chart = line_chart("x", [Line(name="a", points=[(0, float("nan")), (1, 2.0)], look="red")], x_name="s")
    assert "nan" not in chart and "<circle" in chart
    many = [(float(x), float(x)) for x in range(100_000)]
    assert len(line_chart("x", [Line(name="a", points=many, look="red")], x_name="s")) < 50_000
    assert "nothing yet" in line_chart("x", [], x_name="s")
