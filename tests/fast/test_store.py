"""The run folder: one owner, an index that is made anew from the logs, a journal that replays."""

import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

import pytest

from gyre.errors import StoreError
from gyre.schedule import events
from gyre.schedule.policy import SchedulerSettings
from gyre.schedule.scheduler import Scheduler
from gyre.store import records
from gyre.store.log import LogWriter
from gyre.store.store import INDEX, RunStore, existing, journal, read_records, rebuild_index, turns_of
from tests.fakes.run_records import began, step, turn, whole_run
from tests.fakes.scheduling_world import SchedulingWorld


@contextmanager
def opened(folder: Path) -> Iterator[RunStore]:
    store = RunStore.open(folder, config_text="[run]\n", lock_wait_s=0.0)
    try:
        yield store
    finally:
        store.close()


def filled(folder: Path) -> None:
    with opened(folder) as store:
        for record in whole_run():
            store.record(record)
        store.sync()


def dump(folder: Path) -> list[str]:
    database = sqlite3.connect(folder / INDEX)
    try:
        return list(database.iterdump())
    finally:
        database.close()


def test_records_are_read_back_as_written(tmp_path: Path) -> None:
    filled(tmp_path)
    back = [*read_records(tmp_path / "events.log"), *read_records(tmp_path / "tokens.log")]
    key = lambda record: isinstance(record, records.TurnDone)  # noqa: E731
    assert back == sorted(whole_run(), key=key)
    assert (tmp_path / "config.toml").read_text() == "[run]\n"


def test_turns_are_the_same_with_and_without_the_index(tmp_path: Path) -> None:
    filled(tmp_path)
    with_index = turns_of(tmp_path, "1.0")
    (tmp_path / INDEX).unlink()
    assert turns_of(tmp_path, "1.0") == with_index == [turn("1.0", number) for number in range(3)]


def test_turns_of_parallel_branches_are_sorted_and_a_second_life_replaces_the_first(tmp_path: Path) -> None:
    second = [turn("7.0", 1, node=1), turn("7.0", 0, node=3)]
    with opened(tmp_path) as store:
        for record in [*(turn("7.0", number) for number in range(4)), *second]:
            store.record(record)
    with_index = turns_of(tmp_path, "7.0")
    (tmp_path / INDEX).unlink()
    assert turns_of(tmp_path, "7.0") == with_index == second[::-1]


@pytest.mark.parametrize("harm", ["missing", "behind", "noise"])
def test_an_index_that_does_not_cover_the_logs_is_made_anew(tmp_path: Path, harm: str) -> None:
    filled(tmp_path)
    good = dump(tmp_path)
    if harm == "missing":
        (tmp_path / INDEX).unlink()
    elif harm == "noise":
        (tmp_path / INDEX).write_bytes(b"not a database" * 100)
    else:
        log = LogWriter(tmp_path / "tokens.log")
        log.append(records.encode(turn("1.1", 3)))
        log.close()
    with opened(tmp_path):
        pass
    if harm == "behind":
        assert turns_of(tmp_path, "1.1")[-1] == turn("1.1", 3)
    else:
        assert dump(tmp_path) == good
    rebuild_index(tmp_path)
    assert harm == "behind" or dump(tmp_path) == good


def test_a_reader_that_holds_the_index_does_not_stop_the_run(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        store.record(began())
        store.sync()
        reader = sqlite3.connect(tmp_path / INDEX, isolation_level=None)
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM turns").fetchall()
        store.record(turn("0.0", 0))
        store.sync()
        reader.close()
    assert turns_of(tmp_path, "0.0") == [turn("0.0", 0)]


def test_a_living_run_is_named_and_a_dead_one_gives_its_folder_up(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from gyre.store.store import RunStore\n"
        "store = RunStore.open(pathlib.Path(sys.argv[1]), config_text='')\n"
        "print('owned', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"owned\n"
        with pytest.raises(StoreError, match=f"{tmp_path} belongs to a living run .pid {other.pid}.; stop it first"):
            RunStore.open(tmp_path, config_text="", lock_wait_s=0.0)
        found = existing(tmp_path)
        assert found is not None and found.owner_pid == other.pid
        other.kill()
        other.wait(10)
    with opened(tmp_path):
        pass


def test_what_is_there_is_told(tmp_path: Path) -> None:
    assert existing(tmp_path) is None
    with opened(tmp_path) as store:
        for record in [began(), *step(0, reward=0.1, time=1.0), *step(1, reward=0.1, time=2.0)]:
            store.record(record)
    (tmp_path / "checkpoints" / "step-000001").mkdir()
    found = existing(tmp_path)
    assert found is not None
    assert found.describe() == "2 steps trained, last checkpoint step-000001, not ended in order"
    with opened(tmp_path) as store:
        store.record(began(resumed_version=1))
        store.record(records.RunEnded(reason="stopped by SIGINT", wall_s=3.0))
    found = existing(tmp_path)
    assert found is not None
    assert found.describe() == "1 steps trained, last checkpoint step-000001, ended: stopped by SIGINT"


def test_a_record_of_another_schema_is_named(tmp_path: Path) -> None:
    log = LogWriter(tmp_path / "events.log")
    log.append(b"\x81\xa4type\xa3New")
    log.close()
    with pytest.raises(StoreError, match=r"events\.log at byte 0: not a record of this version"):
        existing(tmp_path)


def test_a_damaged_log_gives_the_folder_free_again(tmp_path: Path) -> None:
    filled(tmp_path)
    data = bytearray((tmp_path / "events.log").read_bytes())
    data[20] ^= 1
    (tmp_path / "events.log").write_bytes(data)
    for _ in range(2):
        with pytest.raises(StoreError, match="damaged at byte 0"):
            RunStore.open(tmp_path, config_text="", lock_wait_s=0.0)


def test_a_killed_process_loses_nothing_that_was_recorded(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        store = RunStore.open(tmp_path, config_text="")
        for record in whole_run():
            store.record(record)
        os.kill(os.getpid(), 9)
    os.waitpid(pid, 0)
    assert len(list(read_records(tmp_path / "events.log"))) == len(whole_run()) - 12
    with opened(tmp_path):
        pass
    assert turns_of(tmp_path, "0.1") == [turn("0.1", number) for number in range(3)]


def test_the_journal_replays_to_the_same_commands(tmp_path: Path) -> None:
    settings = SchedulerSettings(num_cells=3, cell_capacity=4, steps=3, groups_per_batch=2, rollouts_per_group=2)
    world = SchedulingWorld(settings, seed=5, evaluations=3)
    world.run()
    with opened(tmp_path) as store:
        for event, now, commands in world.journal:
            store.record(records.schedule_event(now, event))
            for command in commands:
                store.record(records.schedule_command(now, command))
    replayed = Scheduler(settings)
    for recorded, commands in journal(tmp_path):
        event = records.from_fields(recorded.kind, recorded.values, get_args(events.Event))
        again = [records.schedule_command(recorded.now, one) for one in replayed.handle(event, recorded.now)]
        assert again == commands
    assert replayed.snapshot() == world.scheduler.snapshot()
