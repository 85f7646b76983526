"""Notices processes that died: a pidfd each, on the same host, inside the front's asyncio loop."""

import asyncio
import os
from collections.abc import Callable


class ProcessWatch:
    """`on_death(name)` is called once when a watched process ends. Needs a running loop."""

    def __init__(self, on_death: Callable[[str], None]) -> None:
        self._on_death = on_death
        self._fds: dict[str, int] = {}

    def watch(self, name: str, pid: int) -> None:
        """Watch `pid`; one that is already gone is reported at once."""
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._on_death(name)
            return
        self._fds[name] = fd
        asyncio.get_running_loop().add_reader(fd, self._died, name)

    @property
    def alive(self) -> list[str]:
        """Names of watched processes that have not ended."""
        return sorted(self._fds)

    def _died(self, name: str) -> None:
        self.forget(name)
        self._on_death(name)

    def forget(self, name: str) -> None:
        """Stop watching."""
        fd = self._fds.pop(name, None)
        if fd is not None:
            asyncio.get_running_loop().remove_reader(fd)
            os.close(fd)

    def close(self) -> None:
        """Stop watching everything."""
        for name in list(self._fds):
            self.forget(name)
