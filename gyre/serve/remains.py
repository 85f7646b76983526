"""What SGLang leaves on disk: sockets under the temporary folder and a load table in shared memory.

Its processes are ended hard, so it never removes them. Each engine therefore gets a temporary folder of its own,
named after its owner, and removes it; whoever starts an engine removes the folders of owners that are dead.
"""

import logging
import multiprocessing.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gyre.owner import is_dead, stamp

log = logging.getLogger(__name__)

PREFIX = "gyre-engine"
TABLE_NOTE = "shared_memory_files"
"""File in the folder that lists what lies elsewhere."""
OWNER_NOTE = "owner_folder"
"""File in the folder that names the owner's own temporary folder: it goes when the owner is dead, not before."""


class EngineFolder:
    """The temporary folder of one engine. Removed by `remove`, or after the owner's death by the next engine."""

    def __init__(self) -> None:
        root = Path(tempfile.gettempdir())
        reap(root)
        self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}.{stamp()}.", dir=root))

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Inside, this process and those it spawns take the folder for the temporary one."""
        # Made now, in its usual place: multiprocessing keeps its folder for the whole life of the process.
        (self.path / OWNER_NOTE).write_text(multiprocessing.util.get_temp_dir())
        before, variable = tempfile.tempdir, os.environ.get("TMPDIR")
        tempfile.tempdir = os.environ["TMPDIR"] = str(self.path)
        try:
            yield
        finally:
            tempfile.tempdir = before
            if variable is None:
                del os.environ["TMPDIR"]
            else:
                os.environ["TMPDIR"] = variable

    def note(self, files: list[str]) -> None:
        """Remember files that lie elsewhere and go with the folder."""
        (self.path / TABLE_NOTE).write_text("\n".join(files))

    def remove(self) -> None:
        """Remove everything. May be repeated."""
        _remove(self.path)


def reap(root: Path) -> None:
    """Remove the folders below `root`, and what they name, whose owners are dead."""
    for path in root.glob(f"{PREFIX}.*"):
        if is_dead(".".join(path.name.split(".")[1:4])):
            log.info("engine removed=%s of a dead owner", path.name)
            _remove_owner_folder(path / OWNER_NOTE)
            _remove(path)


def _remove_owner_folder(note: Path) -> None:
    """Python removes it when a process ends in order, which a killed one did not."""
    if note.exists() and Path(name := note.read_text()).name.startswith("pymp-"):
        shutil.rmtree(name, ignore_errors=True)


def _remove(path: Path) -> None:
    note = path / TABLE_NOTE
    if note.exists():
        for name in note.read_text().splitlines():
            Path(name).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)
