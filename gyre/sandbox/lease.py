"""Leases: every sandbox has a folder that says who owns it, so that what an owner left behind can be found.

A lease is `<root>/gyre-<run>/<sandbox>/` with lease.json: the owner's and process 1's pid with their start
times (a pid alone may have been given to another process), and the time after which nobody may keep it.
The workspace is not here: it is memory of the sandbox. Reaping kills by exactly these pids.
"""

import json
import os
import shutil
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from gyre.owner import start_of

LEASE_FILE = "lease.json"
STRAYS_S = 2.0
STAGING = ".staging"
"""Ends the name of a folder that is being made; the name holds its owner, since no lease may be there yet."""
ETC = "root:x:0:0:root:/root:/bin/sh\nagent:x:{uid}:{uid}:agent:/tmp:/bin/sh\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process for certain: `start` is its start time in clock ticks since boot."""

    pid: int
    start: int

    def is_alive(self) -> bool:
        """Whether this very process lives (a zombie does not)."""
        return start_of(self.pid) == self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """`expires` is seconds since the epoch; `inside` is process 1 of the sandbox, once known."""

    owner: Process
    expires: float
    inside: Process | None = None


def this_process() -> Process:
    """The calling process."""
    return Process(pid=os.getpid(), start=start_of(os.getpid()))


def run_root(root: Path, run: str) -> Path:
    """The folder of a run's leases."""
    return root / f"gyre-{run}"


def write_lease(folder: Path, lease: Lease) -> None:
    """Create or replace the lease of one sandbox. Its folder appears together with the lease, never without."""
    if folder.exists():
        _write_whole(folder, lease)
        return
    staging = folder.parent / f".{folder.name}.{lease.owner.pid}.{lease.owner.start}{STAGING}"
    staging.mkdir(parents=True)
    _write_whole(staging, lease)
    staging.rename(folder)


def _write_whole(folder: Path, lease: Lease) -> None:
    fresh = folder / (LEASE_FILE + ".new")
    fresh.write_text(json.dumps(asdict(lease)))
    fresh.rename(folder / LEASE_FILE)


def write_etc(folder: Path, *, uid: int) -> Path:
    """passwd, group and hosts for a sandbox whose user has `uid`; returns their folder."""
    (folder / "passwd").write_text(ETC.format(uid=uid))
    (folder / "group").write_text(f"root:x:0:\nagent:x:{uid}:\n")
    (folder / "hosts").write_text("127.0.0.1 localhost sandbox\n")
    return folder


def drop_lease(folder: Path) -> None:
    """Remove a sandbox's folder, and the run's when it was the last."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.parent.rmdir()
    except OSError:
        pass  # Others are still there.


def reap_stale(root: Path) -> int:
    """Kill and remove what dead owners left under `root` (any run), and what has expired. Returns how many."""
    reaped = 0
    for path in root.glob(f"gyre-*/*/{LEASE_FILE}"):
        try:
            fields = json.loads(path.read_text())
            owner, inside = Process(**fields["owner"]), fields["inside"] and Process(**fields["inside"])
            expires = float(fields["expires"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            continue  # Removed meanwhile, or not ours.
        if owner.is_alive() and time.time() < expires:
            continue
        if inside and inside.is_alive():
            _kill(inside)
        _kill_strays(path.parent)
        drop_lease(path.parent)
        reaped += 1
    return reaped + _reap_unfinished(root)


def _reap_unfinished(root: Path) -> int:
    """Remove what owners left that died while making a sandbox's folder, and run folders with nothing in them."""
    reaped = 0
    for path in root.glob(f"gyre-*/.*{STAGING}"):
        pid, start = path.name.removesuffix(STAGING).split(".")[-2:]
        if not Process(pid=int(pid), start=int(start)).is_alive():
            drop_lease(path)
            reaped += 1
    for folder in root.glob("gyre-*"):
        try:
            folder.rmdir()
        except OSError:
            pass  # In use, or no folder.
    return reaped


def _kill_strays(folder: Path) -> None:
    """Kill what was started for this lease and is not in it: a process 1 that waits for ever to be let go.

    bubblewrap's child has no parent-death signal yet while it waits for its parent, so a parent killed just then
    leaves it behind. Its command line names the lease's folder. Looked for until none was found three times, since
    the one that starts it may be dying only now.
    """
    wanted, quiet, end = f"{folder}/".encode(), 0, time.monotonic() + STRAYS_S
    while quiet < 3 and time.monotonic() < end:
        quiet += 1
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            pid = int(path.parent.name)
            try:
                is_stray = pid != os.getpid() and path.read_bytes().startswith(b"/") and wanted in path.read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if is_stray and (start := start_of(pid)):
                _kill(Process(pid=pid, start=start))
                quiet = 0
        time.sleep(0.02)


def _kill(process: Process) -> None:
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    try:
        if process.is_alive():  # Still the same one, and the pidfd now holds it.
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except ProcessLookupError:
        pass
    finally:
        os.close(pidfd)
