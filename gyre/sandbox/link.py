"""The owner's end of the keeper: requests with file descriptors, each awaited with a deadline.

One keeper serves all sandboxes of a process. Requests may overlap; replies are told apart by id. When the
keeper dies every waiting request fails with SandboxError, and so does every later one.
"""

import array
import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from gyre.errors import DeadlineError, SandboxError

log = logging.getLogger(__name__)

PACKET = 1 << 17
SOURCE = Path(__file__).resolve().parents[2]


class KeeperLink:
    """Starts the keeper process and speaks with it from one event loop."""

    def __init__(self) -> None:
        self.rootless = os.geteuid() != 0
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.setblocking(False)
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-m", "gyre.sandbox.keeper", str(theirs.fileno()), "1" if self.rootless else "0"],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={"PYTHONPATH": str(SOURCE), "PATH": os.environ.get("PATH", "/usr/bin:/bin")},
            cwd="/",
        )
        theirs.close()
        self._waiting: dict[int, asyncio.Future[tuple[dict[str, Any], list[int]]]] = {}
        self._next_id = 1
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._sock.fileno(), self._receive)

    @property
    def pid(self) -> int:
        """The keeper's pid."""
        return self._process.pid

    async def ask(
        self, op: str, box: str, *, wait_s: float, fds: tuple[int, ...] = (), **fields: Any
    ) -> tuple[dict[str, Any], list[int]]:
        """Send one request; its reply and the descriptors that came with it, which the caller owns then.

        Raises SandboxError with the keeper's words, DeadlineError after `wait_s`.
        """
        request_id, self._next_id = self._next_id, self._next_id + 1
        future = self._waiting[request_id] = self._loop.create_future()
        packet = json.dumps({"id": request_id, "op": op, "box": box, **fields}).encode()
        try:
            async with asyncio.timeout(wait_s):
                await self._send(packet, fds)
                reply, received = await future
        except TimeoutError as error:
            raise DeadlineError(f"{op} in a sandbox", seconds=wait_s, missing="keeper") from error
        except asyncio.CancelledError:
            if op == "run":
                self.order("kill", box, target=request_id)
            raise
        finally:
            self._waiting.pop(request_id, None)
        if "error" in reply:
            raise SandboxError(f"sandbox {box}: {op}: {reply['error']}")
        return reply, received

    def order(self, op: str, box: str, **fields: Any) -> None:
        """Send a request whose reply nobody waits for, and whose failure nobody can mend."""
        try:
            self._sock.sendmsg([json.dumps({"id": 0, "op": op, "box": box, **fields}).encode()])
        except OSError as error:
            log.warning("keeper order=%s box=%s error=%s", op, box, error)

    async def _send(self, packet: bytes, fds: tuple[int, ...]) -> None:
        assert len(packet) < PACKET, len(packet)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        while True:
            try:
                self._sock.sendmsg([packet], rights)
                return
            except BlockingIOError:
                await asyncio.sleep(0.002)  # The caller's deadline bounds this.
            except OSError as error:
                raise SandboxError("the sandbox keeper is gone") from error

    def _receive(self) -> None:
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self._sock, PACKET, 4)
            except BlockingIOError:
                return None
            except OSError:
                data, fds = b"", []
            if not data:
                return self._gone()
            reply = json.loads(data)
            future = self._waiting.get(reply["id"])
            if future is None or future.done():
                for fd in fds:
                    os.close(fd)
            else:
                future.set_result((reply, list(fds)))

    def _gone(self) -> None:
        self._loop.remove_reader(self._sock.fileno())
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(SandboxError("the sandbox keeper is gone"))

    async def close(self, deadline_s: float = 5.0) -> None:
        """End the keeper and with it every sandbox; kill it when it does not end in time."""
        if self._sock.fileno() < 0:
            return
        self._gone()
        self._sock.close()
        end = self._loop.time() + deadline_s
        while self._process.poll() is None:
            if self._loop.time() > end:
                log.warning("keeper=late pid=%d killed", self._process.pid)
                self._process.kill()
            await asyncio.sleep(0.01)
