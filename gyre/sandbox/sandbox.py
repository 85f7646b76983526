"""A running sandbox, and the pool that starts them.

Everything goes through the keeper: commands run inside with captured files in memory (never pipes, so a
process that stays behind cannot hold a caller), copies are made by tar inside, never from the host, where a
planted link could lead out. A sandbox belongs to one task at a time; `close` may be called twice.
"""

import itertools
import logging
import os
import shutil
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

from gyre.errors import DeadlineError, SandboxError
from gyre.owner import start_of
from gyre.sandbox.lease import Lease, Process, drop_lease, run_root, this_process, write_etc, write_lease
from gyre.sandbox.link import KeeperLink
from gyre.sandbox.spec import AGENT, ROOT, ExecResult, SandboxSpec, abilities, base_env, bwrap_argv

log = logging.getLogger(__name__)

FIRST_UID = 700_000
NUM_UIDS = 100_000
KEEPER_S = 10.0
OUTPUT_BYTES = 1 << 20
LEASE_S = 24 * 3600.0


class Sandboxes:
    """Starts the sandboxes of one owner process. Create it inside the running event loop."""

    def __init__(self, *, run: str, root: Path | None = None) -> None:
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            raise SandboxError("bwrap was not found; install the package bubblewrap")
        self._bwrap, self._owner = bwrap, this_process()
        self._folder = run_root(root or Path(tempfile.gettempdir()), run)
        self.keeper = KeeperLink()
        self._numbers = itertools.count()
        self._open: set[Sandbox] = set()

    def abilities(self) -> dict[str, str]:
        """Which driver is in force for what."""
        return abilities(bwrap=self._bwrap, rootless=self.keeper.rootless)

    async def start(self, spec: SandboxSpec) -> "Sandbox":
        """A ready sandbox. Raises SandboxError or DeadlineError, and leaves nothing behind then."""
        number = next(self._numbers)
        name = f"{os.getpid()}-{number}"
        # A uid of its own makes the limit on processes one of this sandbox; owners start at different places.
        uid = 1000 if self.keeper.rootless else FIRST_UID + (os.getpid() * 997 + number) % NUM_UIDS
        folder = self._folder / name
        lease = Lease(owner=self._owner, expires=time.time() + LEASE_S)
        write_lease(folder, lease)
        try:
            argv = bwrap_argv(self._bwrap, spec, etc=write_etc(folder, uid=uid), uid=uid, rootless=self.keeper.rootless)
            reply, fds = await self.keeper.ask(
                "start", name, wait_s=spec.ready_s + KEEPER_S, argv=argv, ready_s=spec.ready_s
            )
        except BaseException:
            self.keeper.order("stop", name)
            drop_lease(folder)
            raise
        inside = Process(pid=reply["pid"], start=start_of(reply["pid"]))
        write_lease(folder, Lease(owner=lease.owner, expires=lease.expires, inside=inside))
        sandbox = Sandbox(self, name=name, spec=spec, uid=uid, pidfd=fds[0], pid=reply["pid"], folder=folder)
        self._open.add(sandbox)
        try:  # bubblewrap makes it as root; git, for one, refuses a work tree of another user.
            await sandbox.folder(spec.workdir, user=AGENT)
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    def forget(self, sandbox: "Sandbox") -> None:
        """A closed sandbox is no longer this pool's."""
        self._open.discard(sandbox)

    async def close(self, deadline_s: float = 5.0) -> None:
        """End every sandbox and the keeper, and remove what they had on disk."""
        await self.keeper.close(deadline_s)
        for sandbox in tuple(self._open):
            sandbox.abandon()


class Sandbox:
    """One sandbox. `pid` and `pidfd` are of its process 1, seen from the host; `uid` is its user's."""

    def __init__(
        self, pool: Sandboxes, *, name: str, spec: SandboxSpec, uid: int, pidfd: int, pid: int, folder: Path
    ) -> None:
        self._pool, self._keeper, self._folder = pool, pool.keeper, folder
        self.name, self.spec, self.uid, self.pidfd, self.pid = name, spec, uid, pidfd, pid

    @property
    def rootless(self) -> bool:
        """Whether it has a user namespace of its own."""
        return self._keeper.rootless

    def rlimits(self) -> dict[str, int]:
        """What binds a process of the user. Without root all sandboxes share one real uid: no limit on processes."""
        limits = self.spec.limits.rlimits()
        if self.rootless:
            del limits["processes"]
        return limits

    async def _ask(self, op: str, *, wait_s: float = KEEPER_S, **fields: Any) -> tuple[dict[str, Any], list[int]]:
        if self.pidfd < 0:
            raise SandboxError(f"sandbox {self.name}: {op}: it is closed")
        return await self._keeper.ask(op, self.name, wait_s=wait_s, **fields)

    async def listen(self, port: int) -> socket.socket:
        """A listening TCP socket at 127.0.0.1:`port` of the sandbox's own network, served from outside."""
        _, fds = await self._ask("listen", port=port)
        listener = socket.socket(fileno=fds[0])
        listener.setblocking(False)
        return listener

    async def folder(self, path: str, *, user: str, mode: int = 0o755, empty: bool = True) -> None:
        """Make `path` (emptied), owned by the sandbox's user or by root. Writable places are tmpfs only."""
        uid = self.uid if user == AGENT or self.rootless else 0
        made = {"path": path, "uid": uid, "gid": uid, "mode": mode, "empty": empty}
        await self._ask("folders", folders=[made])

    async def exec(
        self,
        argv: list[str],
        *,
        deadline_s: float,
        env: dict[str, str] | None = None,
        cwd: str | None = None,
        stdin: bytes = b"",
        user: str = AGENT,
        output_bytes: int = OUTPUT_BYTES,
        rlimits: dict[str, int] | None = None,
    ) -> ExecResult:
        """Run a program inside. `env` is added to the clean environment. DeadlineError after `deadline_s`.

        Output beyond `output_bytes` is cut. At the deadline its process group is killed; what left the group
        is killed by `reap`.
        """
        files = [os.memfd_create(name) for name in ("stdin", "stdout", "stderr")]
        try:
            if stdin:
                _write_all(files[0], stdin)
            reply, _ = await self._ask(
                "run",
                wait_s=deadline_s + KEEPER_S,
                fds=tuple(files),
                argv=argv,
                env=base_env(self.spec) | (env or {}),
                cwd=cwd or self.spec.workdir,
                uid=0 if user == ROOT else self.uid,
                gid=0 if user == ROOT else self.uid,
                limits=self.rlimits() if rlimits is None else rlimits,
                deadline_s=deadline_s,
            )
            if reply["late"]:
                raise DeadlineError(f"{argv[0]} in a sandbox", seconds=deadline_s)
            stdout, stderr = (os.pread(fd, output_bytes, 0) for fd in files[1:])
            return ExecResult(rc=reply["rc"], stdout=stdout, stderr=stderr)
        finally:
            for fd in files:
                os.close(fd)

    async def push(self, archive: bytes, folder: str, *, user: str = AGENT, deadline_s: float = 60.0) -> None:
        """Unpack a tar archive into an existing folder, as the user who will own the files."""
        argv = ["/usr/bin/tar", "-x", "-p", "--no-overwrite-dir", "-C", folder]
        argv += ["--no-same-owner"] if user == ROOT else []
        done = await self.exec(argv, deadline_s=deadline_s, stdin=archive, user=user, cwd="/", env={"HOME": "/"})
        if done.rc != 0:
            raise SandboxError(f"sandbox {self.name}: unpacking into {folder}: {_words(done)}")

    async def pull(self, folder: str, *, max_bytes: int, deadline_s: float = 60.0) -> bytes:
        """A tar archive of the folder's content, holes kept. SandboxError when it is above `max_bytes`.

        Call `reap` before: a file that changes while it is read is an error.
        """
        argv = ["/usr/bin/tar", "-c", "-S", "--numeric-owner", "--warning=no-file-ignored", "-C", folder, "."]
        limits = {"file_bytes": max_bytes, "cpu_s": self.spec.limits.cpu_s}
        done = await self.exec(argv, deadline_s=deadline_s, user=ROOT, cwd="/", output_bytes=max_bytes, rlimits=limits)
        if done.rc != 0:
            raise SandboxError(f"sandbox {self.name}: packing {folder} (at most {max_bytes} bytes): {_words(done)}")
        return done.stdout

    async def read(self, path: str, *, max_bytes: int) -> bytes | None:
        """The content of a regular file, None where there is none. SandboxError for links, others, too large ones."""
        target = os.memfd_create("read")
        try:
            reply, _ = await self._ask("read", fds=(target,), path=path, max_bytes=max_bytes)
            if reply["size"] == -1:
                return None
            if not 0 <= reply["size"] <= max_bytes:
                raise SandboxError(f"sandbox {self.name}: {path} is no regular file of at most {max_bytes} bytes")
            return os.pread(target, max_bytes, 0)
        finally:
            os.close(target)

    async def reap(self, deadline_s: float = 5.0) -> None:
        """Kill everything inside but process 1; returns when nothing is left."""
        await self._ask("reap", wait_s=deadline_s + KEEPER_S, within_s=deadline_s)

    async def close(self, deadline_s: float = 10.0) -> None:
        """Kill everything inside and remove its folder."""
        if self.pidfd < 0:
            return
        try:
            await self._ask("stop", wait_s=deadline_s)
        except SandboxError as error:
            log.info("sandbox=%s close=%s", self.name, error)  # Its keeper is gone, and it with it.
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Forget a sandbox that is dead, or that its keeper kills: descriptors, lease, folder."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
        self._pool.forget(self)
        drop_lease(self._folder)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)


def _words(result: ExecResult) -> str:
    return f"rc={result.rc} {result.stderr[-500:].decode(errors='replace').strip()}"
