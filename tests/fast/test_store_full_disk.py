"""A disk that is really full: the kernel refuses the write, the run is told, and what was written stays readable."""

import subprocess
import sys
from pathlib import Path

import pytest

from gyre.store import records
from gyre.store.store import RunStore, read_records, turns_of
from gyre.store.summary import summarize
from tests.fakes.run_records import began, turn

ROOT = Path(__file__).parents[2]
LIMIT_BYTES = 96 * 1024
"""Room for the index and its journal, not for all that the child wants to record."""

# The limit is the process's own, so the folder's other files keep their size; past it the kernel answers EFBIG
# (Python ignores SIGXFSZ from its start on).
CHILD = """
import pathlib, resource, sys
from gyre.errors import StoreError
from gyre.store.store import RunStore
from tests.fakes.run_records import began, turn

store = RunStore.open(pathlib.Path(sys.argv[1]), config_text="", lock_wait_s=0.0)
store.record(began())
store.sync()
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
written = 0
try:
    for number in range(10_000):
        store.record(turn("0.0", number, tokens=256))
        written += 1
except StoreError as error:
    print(written, error)
else:
    sys.exit("the disk never was full")
"""


@pytest.fixture(scope="module", name="full")
def _full(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, str]:
    folder = tmp_path_factory.mktemp("full")
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(folder), str(LIMIT_BYTES)],
        capture_output=True, text=True, timeout=60, check=False, cwd=ROOT,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr
    written, _, told = child.stdout.partition(" ")
    return folder, int(written), told


def test_a_full_disk_is_a_store_error_that_names_the_log(full: tuple[Path, int, str]) -> None:
    folder, written, told = full
    assert written > 0
    assert f"{folder / 'tokens.log'}" in told
    assert (folder / "tokens.log").stat().st_size <= LIMIT_BYTES


def test_what_was_recorded_before_it_is_read_and_the_run_goes_on(full: tuple[Path, int, str]) -> None:
    folder, written, _ = full
    turns = [turn("0.0", number, tokens=256) for number in range(written)]
    assert list(read_records(folder / "tokens.log")) == turns
    assert summarize(folder).turns == written
    store = RunStore.open(folder, config_text="", lock_wait_s=0.0)
    store.record(turn("0.0", written, tokens=256))
    store.record(records.RunEnded(reason="finished", wall_s=1.0))
    store.close()
    assert next(read_records(folder / "events.log")) == began()
    assert turns_of(folder, "0.0") == [*turns, turn("0.0", written, tokens=256)]
