"""The keeper: a small single-threaded process that starts sandboxes and enters them for its owner.

It exists because forking the owner would be slow, because bubblewrap's death signal is tied to the thread
that spawned it, and because nothing may outlive the owner: when the owner's socket closes, for whatever
reason, the keeper kills every sandbox and ends. Requests and replies are one JSON packet each, with file
descriptors attached; a reply carries the `id` of its request. It decides nothing and keeps no policy.

Operations: start, run, listen, folders, read, reap, kill, stop. Run as `python -S -m gyre.sandbox.keeper FD ROOTLESS`.
"""

import array
import heapq
import json
import os
import select
import signal
import socket
import stat
import sys
import time
from typing import Any, NoReturn

from gyre.sandbox import enter

PACKET = 1 << 17
END_WAIT_S = 5.0
OWN_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ)
"""What this process (or Python) ignores or handles; children get the defaults back."""


class Box:
    """One sandbox: bubblewrap's pid, and the pid and pidfd of process 1 inside once it is ready."""

    def __init__(self, bwrap_pid: int, stdin: int, info: int, ready: int, errors: int) -> None:
        self.bwrap_pid, self.stdin, self.info, self.ready, self.errors = bwrap_pid, stdin, info, ready, errors
        self.pid, self.pidfd = 0, -1
        self.info_bytes = b""
        self.start_id = 0
        self.stop_ids: list[int] = []

    def kill(self) -> None:
        """Kill everything in it, at once."""
        try:
            if self.pidfd >= 0:
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            else:
                os.kill(self.bwrap_pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


class Keeper:
    """The event loop: the owner's socket, ready pipes, ended children, deadlines."""

    def __init__(self, sock: socket.socket, *, rootless: bool) -> None:
        self._sock, self._rootless = sock, rootless
        self._pid_ns = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        self._boxes: dict[str, Box] = {}
        self._by_ready: dict[int, str] = {}
        self._jobs: dict[int, dict[str, Any]] = {}  # pid -> its request
        self._deadlines: list[tuple[float, int, int, str]] = []  # (when, request id, pid, box)
        self._wake, wake_in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_in, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._poll = select.poll()
        self._poll.register(self._sock, select.POLLIN)
        self._poll.register(self._wake, select.POLLIN)

    def serve(self) -> None:
        """Until the owner is gone; then kill all sandboxes."""
        while True:
            for fd, _ in self._poll.poll(self._wait_ms()):
                if fd == self._sock.fileno():
                    if not self._receive():
                        return self._end()
                elif fd == self._wake:
                    os.read(self._wake, 4096)
                elif fd in self._by_ready:
                    self._became_ready(self._by_ready[fd])
            self._reap_children()
            self._expire()

    def _wait_ms(self) -> int:
        if not self._deadlines:
            return 2000
        return max(0, min(2000, int((self._deadlines[0][0] - time.monotonic()) * 1000) + 1))

    def _reply(self, request_id: int, fds: tuple[int, ...] = (), **fields: Any) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self._sock.sendmsg([json.dumps({"id": request_id, **fields}).encode()], rights)
        except OSError:
            pass  # The owner is gone: the next receive says so.

    def _receive(self) -> bool:
        try:
            data, fds, _, _ = socket.recv_fds(self._sock, PACKET, 4)
        except ConnectionResetError:
            return False  # The owner died with replies unread.
        if not data:
            return False
        request = json.loads(data)
        request["fds"] = fds
        try:
            self._handle(request)
        except OSError as error:
            self._reply(request["id"], error=str(error))
        finally:
            for fd in fds:
                os.close(fd)
        return True

    def _handle(self, request: dict[str, Any]) -> None:
        op, box = request["op"], self._boxes.get(request["box"])
        if op == "start":
            self._start(request)
        elif op == "kill":
            self._kill_job(request["target"])
        elif box is None:
            told = {} if op == "stop" else {"error": "the sandbox is gone"}
            self._reply(request["id"], (), **told)
        elif op == "stop":
            box.stop_ids.append(request["id"])
            box.kill()
        else:
            self._enter(request, box)

    # --- starting and stopping ------------------------------------------------------------------

    def _start(self, request: dict[str, Any]) -> None:
        stdin_out, stdin_in = os.pipe2(os.O_CLOEXEC)
        info_out, info_in = os.pipe2(os.O_CLOEXEC)
        ready_out, ready_in = os.pipe2(os.O_CLOEXEC)
        errors = os.memfd_create("bwrap-errors")
        pid = os.fork()
        if pid == 0:
            self._exec_bwrap(request["argv"], stdin_out, ready_in, errors, info_in)
        for fd in (stdin_out, info_in, ready_in):
            os.close(fd)
        os.set_blocking(info_out, False)
        box = Box(pid, stdin_in, info_out, ready_out, errors)
        box.start_id = request["id"]
        self._boxes[request["box"]] = box
        self._by_ready[ready_out] = request["box"]
        self._poll.register(ready_out, select.POLLIN)
        heapq.heappush(self._deadlines, (time.monotonic() + request["ready_s"], request["id"], 0, request["box"]))

    def _exec_bwrap(self, argv: list[str], stdin: int, stdout: int, stderr: int, info: int) -> NoReturn:
        try:
            enter.die_with_parent()
            signal.set_wakeup_fd(-1)
            for number in OWN_SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            os.setsid()
            for fd, target in ((stdin, 0), (stdout, 1), (stderr, 2)):
                os.dup2(fd, target)
            os.set_inheritable(info, True)
            os.execv(argv[0], [argv[0], "--info-fd", str(info), *argv[1:]])
        except OSError as error:
            os.write(2, str(error).encode())
        os._exit(127)

    def _became_ready(self, name: str) -> None:
        box = self._boxes[name]
        self._poll.unregister(box.ready)
        del self._by_ready[box.ready]
        line = os.read(box.ready, 16)
        try:
            box.info_bytes += os.read(box.info, 4096)
        except BlockingIOError:
            pass
        if line[:1] != b"R":
            box.kill()
            return  # Ended before it was ready: told when bubblewrap is reaped.
        box.pid = json.loads(box.info_bytes)["child-pid"]
        box.pidfd = os.pidfd_open(box.pid)
        self._reply(box.start_id, (box.pidfd,), pid=box.pid)
        box.start_id = 0

    def _box_ended(self, name: str) -> None:
        box = self._boxes.pop(name)
        if box.ready in self._by_ready:
            self._poll.unregister(box.ready)
            del self._by_ready[box.ready]
        if box.start_id:
            os.lseek(box.errors, 0, os.SEEK_SET)
            words = os.read(box.errors, 2000).decode(errors="replace").strip()
            self._reply(box.start_id, error=f"bubblewrap ended before the sandbox was ready: {words}")
        for fd in (box.stdin, box.info, box.ready, box.errors, box.pidfd):
            if fd >= 0:
                os.close(fd)
        for request_id in box.stop_ids:
            self._reply(request_id)

    # --- work inside ----------------------------------------------------------------------------

    def _enter(self, request: dict[str, Any], box: Box) -> None:
        if box.pidfd < 0:
            self._reply(request["id"], error="the sandbox is not ready")
            return
        pid = enter.fork_inside(box.pidfd, self._pid_ns, rootless=self._rootless)
        if pid == 0:
            self._inside(request)
        self._jobs[pid] = request
        if request.get("deadline_s"):
            when = time.monotonic() + request["deadline_s"]
            heapq.heappush(self._deadlines, (when, request["id"], pid, request["box"]))

    def _inside(self, request: dict[str, Any]) -> NoReturn:
        """The child: one job, then the end. A native job replies for itself."""
        signal.set_wakeup_fd(-1)
        for number in OWN_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        try:
            match request["op"]:
                case "run":
                    self._exec(request)
                case "listen":
                    self._listen(request)
                case "folders":
                    _make_folders(request["folders"])
                    self._reply(request["id"])
                case "read":
                    size = _copy_file(request["path"], request["fds"][0], request["max_bytes"])
                    self._reply(request["id"], size=size)
                case "reap":
                    _kill_all(request["within_s"], outside=os.fstat(self._pid_ns).st_ino)
                    self._reply(request["id"])
        except (OSError, AssertionError) as error:
            self._reply(request["id"], error=str(error))
        finally:
            os._exit(0)

    def _exec(self, request: dict[str, Any]) -> NoReturn:
        """Become the program. What fails before it is told as rc 127 on its stderr, as a shell does."""
        try:
            os.setsid()
            for fd, target in zip(request["fds"], (0, 1, 2), strict=True):
                os.dup2(fd, target)
            os.chdir(request["cwd"])
            enter.set_limits(request["limits"])
            enter.become(request["uid"], request["gid"])
            os.execvpe(request["argv"][0], request["argv"], request["env"])
        except OSError as error:
            os.write(2, f"{request['argv'][0]}: {error}\n".encode())
        os._exit(127)

    def _listen(self, request: dict[str, Any]) -> None:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", request["port"]))
        listener.listen(128)
        self._reply(request["id"], (listener.fileno(),))

    def _kill_job(self, request_id: int) -> None:
        for pid, request in self._jobs.items():
            if request["id"] == request_id:
                self._kill_group(pid)

    def _kill_group(self, pid: int) -> None:
        for kill in (os.killpg, os.kill):
            try:
                kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass

    def _reap_children(self) -> None:
        bwraps = {box.bwrap_pid: name for name, box in self._boxes.items()}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in bwraps:
                self._box_ended(bwraps[pid])
            elif request := self._jobs.pop(pid, None):
                code = os.waitstatus_to_exitcode(status)
                if request["op"] == "run":
                    self._reply(request["id"], rc=code, late=bool(request.get("late")))
                elif code != 0:
                    self._reply(request["id"], error=f"{request['op']} inside the sandbox ended with {code}")

    def _expire(self) -> None:
        now = time.monotonic()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, request_id, pid, name = heapq.heappop(self._deadlines)
            if pid and pid in self._jobs and self._jobs[pid]["id"] == request_id:
                self._jobs[pid]["late"] = True
                self._kill_group(pid)
            elif not pid and (box := self._boxes.get(name)) and box.start_id == request_id:
                box.kill()

    def _end(self) -> None:
        self._poll.unregister(self._sock)
        for box in self._boxes.values():
            box.kill()
        end = time.monotonic() + END_WAIT_S
        while self._boxes and time.monotonic() < end:
            self._poll.poll(50)
            self._reap_children()


def _make_folders(folders: list[dict[str, Any]]) -> None:
    """Make each folder (or empty it), with its owner and mode. Links are never followed."""
    for folder in folders:
        path = folder["path"]
        os.makedirs(path, exist_ok=True)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        if folder["empty"]:
            _empty(fd)
        os.fchown(fd, folder["uid"], folder["gid"])
        os.fchmod(fd, folder["mode"])
        os.close(fd)


def _empty(fd: int) -> None:
    for name in os.listdir(fd):
        if stat.S_ISDIR(os.lstat(name, dir_fd=fd).st_mode):
            inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
            _empty(inner)
            os.close(inner)
            os.rmdir(name, dir_fd=fd)
        else:
            os.unlink(name, dir_fd=fd)


def _copy_file(path: str, target: int, max_bytes: int) -> int:
    """Copy a regular file to `target`, at most `max_bytes`; its size, or -1 where there is no such regular file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return -1
    except OSError:
        return -2
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        return -2
    data = os.read(fd, max_bytes + 1)
    os.write(target, data[:max_bytes])
    return len(data)


def _kill_all(within_s: float, *, outside: int) -> None:
    """Kill every process of this pid namespace but process 1 and this one, until none is left."""
    assert os.stat("/proc/self/ns/pid").st_ino != outside, "not inside a sandbox"
    end = time.monotonic() + within_s
    while True:
        try:
            os.kill(-1, signal.SIGKILL)
        except ProcessLookupError:
            return
        if not any(name.isdigit() and int(name) not in (1, os.getpid()) for name in os.listdir("/proc")):
            return
        if time.monotonic() > end:
            raise TimeoutError(f"processes are left after {within_s:g} s")
        time.sleep(0.001)


def main() -> None:
    """Serve the owner on the inherited socket."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sock = socket.socket(fileno=int(sys.argv[1]))
    sock.set_inheritable(False)
    Keeper(sock, rootless=sys.argv[2] == "1").serve()


if __name__ == "__main__":
    main()
