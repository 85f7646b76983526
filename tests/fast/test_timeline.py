"""A run's trace: what Perfetto asks of it, and that nothing of the run is missing."""

from collections import defaultdict
from pathlib import Path

import msgspec
import pytest

from gyre.store import records
from gyre.store.store import RunStore
from gyre.watch.history import read_history
from gyre.watch.timeline import GROUPS, trace_events, write_timeline
from tests.fakes.run_records import story, whole_run


def stored(folder: Path, *lives: list[records.Record]) -> Path:
    for life in lives:
        store = RunStore.open(folder, config_text="")
        for record in life:
            if isinstance(record, records.RunBegan):
                record = msgspec.structs.replace(record, tokens_bytes=store.tokens_bytes)
            store.record(record)
        store.close()
    return folder


@pytest.fixture(name="events")
def _events(tmp_path: Path) -> list[dict]:
    out = tmp_path / "trace.json"
    count = write_timeline(stored(tmp_path / "run", story()), out)
    events = msgspec.json.decode(out.read_bytes())["traceEvents"]
    assert len(events) == count
    return events


def test_every_event_has_what_the_format_asks_for(events: list[dict]) -> None:
    for event in events:
        assert event["ph"] in "MXCi" and event["pid"] in GROUPS
        assert isinstance(event["ts"], int) and event["ts"] >= 0 and isinstance(event["tid"], int) and event["name"]
        if event["ph"] == "X":
            assert isinstance(event["dur"], int) and event["dur"] >= 0
        if event["ph"] == "C":
            assert all(isinstance(value, (int, float)) for value in event["args"].values())


def test_slices_of_a_track_nest(events: list[dict]) -> None:
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"], event["name"]))
    for slices in tracks.values():
        open_until: list[int] = []
        for begin, end, name in sorted(slices, key=lambda one: (one[0], -one[1])):
            while open_until and open_until[-1] <= begin:
                open_until.pop()
            assert not open_until or end <= open_until[-1], name
            open_until.append(end)


def test_cells_rollouts_calls_tools_and_steps_are_all_there(events: list[dict]) -> None:
    names = {event["name"] for event in events if event["ph"] != "M"}
    wanted = {
        "serving", "draining", "training", "publishing", "loading", "micro-step 0/0", "step 0", "engine loads",
        "rollout 0.0", "queue and start", "model call 0", "tools", "grading", "waits for a cell",
        "moved: cell 1 to 0", "waterlevel", "cells in rollout",
    }  # fmt: skip
    assert wanted - names == set()


def test_calls_that_overlap_lie_on_lanes_of_their_own(events: list[dict]) -> None:
    tracks = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert "0.1 lane 2" in tracks


def test_a_resumed_run_stands_behind_its_first_life(tmp_path: Path) -> None:
    second = [msgspec.structs.replace(record, started_at=100.0, resumed_version=1)
              if isinstance(record, records.RunBegan) else record for record in story()]  # fmt: skip
    history = read_history(stored(tmp_path / "run", story()[:-1], second))
    assert [at.time for at in history.lives] == [0.0, 100.0]
    again = [one for one in history.rollouts if one.rollout == "0.0"]
    assert [len(one.turns) for one in again] == [1, 1]
    assert again[0].turns[0].end < 100 < again[1].turns[0].begin
    assert trace_events(history)


def test_records_without_times_still_give_a_trace(tmp_path: Path) -> None:
    assert trace_events(read_history(stored(tmp_path / "run", whole_run())))
