"""Stop signals of a rank: heard at once, even while the main thread is inside a collective.

Python runs signal handlers only between bytecodes of the main thread. The C-level wake-up descriptor does not
wait for that: a small thread reads it, reports the signal, and ends the process hard if the orderly way takes
longer than the grace time.
"""

import logging
import os
import signal
import socket
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)


class StopSignals:
    """Watches SIGINT and SIGTERM. Must be created in the main thread.

    `on_stop(name)` runs once, on the watching thread. `before_exit` runs right before a hard exit.
    """

    def __init__(self, *, grace_s: float, on_stop: Callable[[str], None], before_exit: Callable[[], None]) -> None:
        self.stopped = threading.Event()
        self._finished = threading.Event()
        self._grace_s, self._on_stop, self._before_exit = grace_s, on_stop, before_exit
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self.install()
        threading.Thread(target=self._watch, name="signals", daemon=True).start()

    def install(self) -> None:
        """(Re-)install the handlers: a library may have replaced them."""
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)

    def finish(self) -> None:
        """The process is ending in order; no hard exit any more."""
        self._finished.set()

    def _watch(self) -> None:
        while True:
            data = self._reader.recv(64)
            caught = [number for number in data if number in (signal.SIGINT, signal.SIGTERM)]
            if caught:
                break
        self.stopped.set()
        self._on_stop(signal.Signals(caught[0]).name)
        if not self._finished.wait(self._grace_s):
            log.error("stop grace_s=%g exceeded, hard exit", self._grace_s)
            self._before_exit()
            os._exit(1)
