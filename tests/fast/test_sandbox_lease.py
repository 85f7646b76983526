"""Leases name processes for certain, and only what dead owners left is reaped."""

import os
import subprocess
import time
from pathlib import Path

from gyre.owner import start_of
from gyre.sandbox.lease import Lease, Process, reap_stale, this_process, write_lease


def test_a_pid_that_was_given_again_is_another_process() -> None:
    me = this_process()
    assert me.is_alive() and not Process(pid=me.pid, start=me.start + 1).is_alive()
    assert start_of(2**22 + 1) == 0


def test_only_what_dead_owners_left_or_has_expired_is_reaped(tmp_path: Path) -> None:
    dead = Process(pid=os.getpid(), start=1)
    left = subprocess.Popen(["sleep", "100"])
    inside = Process(pid=left.pid, start=start_of(left.pid))
    later = time.time() + 100
    write_lease(tmp_path / "gyre-a" / "1", Lease(owner=this_process(), expires=later))
    write_lease(tmp_path / "gyre-a" / "2", Lease(owner=dead, expires=later, inside=inside))
    write_lease(tmp_path / "gyre-b" / "3", Lease(owner=this_process(), expires=time.time() - 1))
    assert reap_stale(tmp_path) == 2
    assert left.wait(10) == -9
    assert sorted(path.name for path in tmp_path.glob("gyre-*/*")) == ["1"]
    assert not (tmp_path / "gyre-b").exists()
