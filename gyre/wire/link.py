"""Links of typed messages over ZeroMQ: the front listens (ROUTER), ranks and hands dial in (DEALER).

`FrontLink` and `AsyncPeer` belong to asyncio processes, `ThreadPeer` to a rank, whose threads all send
through it. A link keeps the order of messages between two ends, never blocks a sender, and reports silence:
a peer that hears nothing from the front for `silence_s` gets a `DeadlineError` naming the front. It does not
retry, and it does not look into messages.
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator

import msgspec
import zmq
import zmq.asyncio

from gyre.errors import DeadlineError
from gyre.wire.messages import Message, decode, encode

log = logging.getLogger(__name__)


class FrontLink:
    """The listening end. One asyncio task receives; any task of the same loop may send."""

    def __init__(self, address: str = "tcp://127.0.0.1:*") -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        # A rank that comes back after a restart dials in under its old name.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.bind(address)
        self.address: str = self._socket.getsockopt(zmq.LAST_ENDPOINT).decode()

    def post(self, identity: str, message: Message) -> None:
        """Queue `message` for the peer without waiting; a peer that never dialled in loses it."""
        self._socket.send_multipart([identity.encode(), encode(message)])

    async def send(self, identity: str, message: Message) -> None:
        """As `post`, and wait until the socket has taken it."""
        await self._socket.send_multipart([identity.encode(), encode(message)])

    async def recv(self) -> tuple[str, Message]:
        """The next message and who sent it. Frames that are no message are logged and skipped."""
        while True:
            frames = await self._socket.recv_multipart()
            if len(frames) != 2:
                log.warning("link frames=%d skipped", len(frames))
                continue
            try:
                return frames[0].decode(errors="replace"), decode(frames[1])
            except msgspec.DecodeError as error:
                log.warning("link peer=%r skipped error=%r", frames[0], str(error))

    def close(self) -> None:
        """Send what is queued (half a second at most) and close."""
        self._socket.close()
        self._context.term()


class AsyncPeer:
    """A dialling end for an asyncio process."""

    def __init__(self, address: str, *, identity: str, silence_s: float = 0.0) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, identity.encode())
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.connect(address)
        self._silence_s = silence_s or None

    async def send(self, message: Message) -> None:
        """Queue `message` for the front."""
        await self._socket.send(encode(message))

    async def recv(self) -> Message:
        """The next message. Raises DeadlineError after `silence_s` without any."""
        try:
            return decode(await asyncio.wait_for(self._socket.recv(), self._silence_s))
        except TimeoutError as error:
            raise DeadlineError("a word from the front", seconds=self._silence_s or 0.0, missing="front") from error

    async def __aiter__(self) -> AsyncIterator[Message]:
        while True:
            yield await self.recv()

    def close(self) -> None:
        """Send what is queued (half a second at most) and close."""
        self._socket.close()
        self._context.term()


class ThreadPeer:
    """A dialling end for a process of plain threads. One thread owns the socket; the others use queues.

    `send` may be called from any thread. Received messages go to `inbox` in order; `None` in the inbox means
    that the front has been silent for `silence_s`.
    """

    def __init__(self, address: str, *, identity: str, silence_s: float = 0.0) -> None:
        self.inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._silence_s = silence_s
        self._closing = threading.Event()
        self._context = zmq.Context()
        self._wake_in = self._context.socket(zmq.PAIR)
        self._wake_in.bind("inproc://wake")
        self._wake_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, args=(address, identity), name="link", daemon=True)
        self._thread.start()

    def send(self, message: Message) -> None:
        """Queue `message` for the front; never blocks."""
        self._outbox.put(encode(message))
        self._wake()

    def _wake(self) -> None:
        with self._wake_lock:
            if not self._wake_in.closed:
                try:
                    self._wake_in.send(b"", zmq.NOBLOCK)
                except zmq.Again:
                    pass  # The owner has wake-ups enough to drain the outbox.

    def _run(self, address: str, identity: str) -> None:
        sock = self._context.socket(zmq.DEALER)
        sock.setsockopt(zmq.IDENTITY, identity.encode())
        sock.setsockopt(zmq.SNDHWM, 0)
        sock.setsockopt(zmq.RCVHWM, 0)
        sock.setsockopt(zmq.LINGER, 500)
        sock.connect(address)
        wake = self._context.socket(zmq.PAIR)
        wake.connect("inproc://wake")
        poller = zmq.Poller()
        poller.register(sock, zmq.POLLIN)
        poller.register(wake, zmq.POLLIN)
        heard, silent = time.monotonic(), False
        while True:
            ready = dict(poller.poll(500))
            if wake in ready:
                wake.recv()
            while not self._outbox.empty():
                sock.send(self._outbox.get())
            if sock in ready:
                heard, silent = time.monotonic(), False
                self.inbox.put(decode(sock.recv()))
            elif self._silence_s and not silent and time.monotonic() - heard > self._silence_s:
                silent = True
                self.inbox.put(None)
            if self._closing.is_set() and self._outbox.empty():
                break
        sock.close()
        wake.close()

    def close(self, deadline_s: float = 2.0) -> None:
        """Send what is queued and end the thread."""
        self._closing.set()
        self._wake()
        self._thread.join(deadline_s)
        with self._wake_lock:
            self._wake_in.close(linger=0)
