"""Watching a run from elsewhere and telling it things: through files in its folder alone."""

import io
import os
from pathlib import Path

import pytest

from gyre.config.choices import Dashboard
from gyre.errors import DeadlineError, StoreError
from gyre.store.orders import Order, await_taken, give_order, take_orders
from gyre.store.store import RunStore
from gyre.watch.attach import _Viewer, attach
from gyre.watch.live import LIVE, LiveFile, read_snapshot, write_snapshot
from gyre.watch.screen import LinePainter
from tests.fakes.run_records import whole_run
from tests.fakes.run_snapshot import make_snapshot


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Path:
    """The folder of a run that has ended."""
    store = RunStore.open(tmp_path / "run", config_text="")
    for record in whole_run():
        store.record(record)
    store.close()
    return tmp_path / "run"


def watched(folder: Path, *, is_once: bool = False) -> str:
    out = io.StringIO()
    assert attach(folder, dashboard=Dashboard.LINES, is_once=is_once, stream=out) == 0
    return out.getvalue()


def test_a_picture_comes_back_from_its_file_as_it_was(tmp_path: Path) -> None:
    snapshot = make_snapshot(orders=("dispatch is paused",))
    write_snapshot(tmp_path, snapshot)
    assert read_snapshot(tmp_path) == snapshot


def test_a_picture_of_another_version_is_an_error_that_says_so(tmp_path: Path) -> None:
    assert read_snapshot(tmp_path) is None
    (tmp_path / LIVE).write_text('{"name": "x"}')
    with pytest.raises(StoreError, match="not a picture of this version"):
        read_snapshot(tmp_path)


def test_an_ended_run_shows_its_last_picture_and_its_summary(folder: Path) -> None:
    write_snapshot(folder, make_snapshot(phase="ended", ended="finished"))
    text = watched(folder)
    assert "ended step=12/40" in text and "run toy: finished after 20 s" in text


def test_a_run_without_any_picture_shows_its_summary(folder: Path) -> None:
    assert "run toy: finished" in watched(folder)


def test_one_picture_of_a_living_run_leaves_it_alone(folder: Path) -> None:
    write_snapshot(folder, make_snapshot())
    assert "step=12/40" in watched(folder, is_once=True)
    assert not (folder / "orders").exists()


def test_watching_what_is_no_run_names_the_folder(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="holds no run"):
        watched(tmp_path)


def test_keys_become_orders_and_q_leaves(folder: Path) -> None:
    write_snapshot(folder, make_snapshot())
    reader, writer = os.pipe()
    os.write(writer, b"pxsq")
    os.close(writer)
    _Viewer(folder, LinePainter(io.StringIO()), reader).show(is_once=False)
    os.close(reader)
    assert take_orders(folder) == [Order.PAUSE, Order.STOP]


def test_a_run_takes_orders_and_leaves_its_last_picture(tmp_path: Path) -> None:
    give_order(tmp_path, Order.STOP_NOW)
    live = LiveFile(tmp_path, every_s=60.0)
    live.update(make_snapshot())  # what was ordered in an earlier life is dropped here
    given = [give_order(tmp_path, order) for order in (Order.PAUSE, Order.CHECKPOINT)]
    live.finish(make_snapshot(ended="finished"))
    assert [order for order in live.orders() if order is not Order.STOP_NOW] == [Order.PAUSE, Order.CHECKPOINT]
    for path in given:
        await_taken(path, wait_s=0.0)
    last = read_snapshot(tmp_path)
    assert last is not None and last.ended == "finished"


def test_an_order_that_nobody_takes_is_withdrawn(tmp_path: Path) -> None:
    path = give_order(tmp_path, Order.PAUSE)
    with pytest.raises(DeadlineError, match="a living run"):
        await_taken(path, wait_s=0.0)
    assert take_orders(tmp_path) == []


def test_a_folder_that_cannot_be_written_never_fails_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    live = LiveFile(tmp_path / "gone", every_s=60.0)
    live.update(make_snapshot())
    live.finish(make_snapshot())
    assert "the live picture waits" in caplog.text
