"""Installation of agent programs from the npm registry, once, into a cache outside the checkout.

Each program is a few pinned packages that bring no dependencies: no script of a package is run, nothing is
resolved. A folder is filled under another name and moved into place, so one that exists is whole. Agents see
it read-only inside their sandbox, and nothing is downloaded there.

Run as `python -m gyre.harness.install [NAME...]`; ends with 3 when the registry is out of reach.
"""

import fcntl
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gyre.errors import DeadlineError, SandboxError

log = logging.getLogger(__name__)

INSTALL_S = 300.0
OUT_OF_REACH = 3
_NETWORK_WORDS = ("ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ECONNRESET", "ETIMEDOUT", "ENETUNREACH", "network")
_ARCHITECTURES = {"x86_64": "x64", "aarch64": "arm64"}


class RegistryError(SandboxError):
    """The npm registry cannot be reached, so the program cannot be installed now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NpmProgram:
    """`packages` are exact (`name@version`); {arch} in them and in `program` is npm's word for this machine's.

    `program` is the executable or script, relative to node_modules, where {machine} is the kernel's word.
    """

    name: str
    version: str
    packages: tuple[str, ...]
    program: str
    executables: tuple[str, ...] = ()
    """Other files to be made executable, which the package's own script would do."""

    @property
    def folder(self) -> Path:
        """Where it is installed, or will be."""
        return cache_root() / f"harness-npm-{self.name}-{self.version}"

    @property
    def is_installed(self) -> bool:
        """Whether it is there."""
        return self.folder.is_dir()

    def path(self, relative: str) -> Path:
        """A file of the installation."""
        return self.folder / "node_modules" / relative.format(arch=_arch(), machine=platform.machine())

    def require(self) -> Path:
        """The program's path. SandboxError with what to do when it is not installed."""
        path = self.path(self.program)
        if not path.exists():
            raise SandboxError(f"{self.name} {self.version} is not installed: bash launch/harnesses.sh {self.name}")
        return path

    def install(self, deadline_s: float = INSTALL_S) -> Path:
        """Install it unless it is there; the program's path. RegistryError, SandboxError or DeadlineError."""
        end = time.monotonic() + deadline_s
        cache_root().mkdir(parents=True, exist_ok=True)
        with _lock(self.folder.with_name(self.folder.name + ".lock"), end):
            if not self.is_installed:
                self._fetch(end)
        return self.require()

    def _fetch(self, end: float) -> None:
        npm = shutil.which("npm")
        if npm is None:
            raise SandboxError("npm was not found. Debian: apt-get install --no-install-recommends npm")
        with tempfile.TemporaryDirectory(dir=cache_root(), prefix=f"{self.folder.name}.new-") as fresh:
            argv = [npm, "install", "--prefix", fresh, "--ignore-scripts", "--omit=optional", "--no-package-lock"]
            argv += [
                "--no-audit",
                "--no-fund",
                "--no-update-notifier",
                "--loglevel=error",
                "--fetch-retries=1",
                "--force",
            ]
            argv += [package.format(arch=_arch()) for package in self.packages]
            log.info("harness=%s version=%s installing folder=%s", self.name, self.version, self.folder)
            try:
                done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=end - time.monotonic())
            except subprocess.TimeoutExpired as error:
                raise DeadlineError(f"npm install of {self.name}", seconds=error.timeout) from error
            if done.returncode != 0:
                kind = RegistryError if any(word in done.stderr for word in _NETWORK_WORDS) else SandboxError
                raise kind(f"npm install of {self.name} {self.version} failed: {done.stderr.strip()[-600:]}")
            os.chmod(fresh, 0o755)
            for name in self.executables:
                os.chmod(Path(fresh, "node_modules", name.format(arch=_arch())), 0o755)
            os.rename(fresh, self.folder)
            os.mkdir(fresh)  # For the temporary folder's own removal.


def cache_root() -> Path:
    """Where the environments lie too (launch/lib.sh has the same rule)."""
    named = os.environ.get("GYRE_ENV_ROOT")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gyre"


def _arch() -> str:
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        raise SandboxError(f"no harness is published for {machine}")
    return _ARCHITECTURES[machine]


@contextmanager
def _lock(path: Path, end: float) -> Iterator[None]:
    """One installer at a time; DeadlineError when another holds it until `end` (time.monotonic)."""
    with open(path, "w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise DeadlineError(f"lock {path}", seconds=INSTALL_S) from None
                time.sleep(0.2)
        yield


def main() -> int:
    """Install the named programs, or all."""
    from gyre.harness.programs import PROGRAMS

    logging.basicConfig(level="INFO", format="gyre: %(message)s")
    names = sys.argv[1:] or list(PROGRAMS)
    if unknown := [name for name in names if name not in PROGRAMS]:
        log.error("no harness %s; there are: %s", unknown[0], ", ".join(PROGRAMS))
        return 2
    for name in names:
        try:
            log.info("harness=%s program=%s", name, PROGRAMS[name].npm.install())
        except RegistryError as error:
            log.error("the npm registry is out of reach, %s is not installed: %s", name, error)
            return OUT_OF_REACH
        except (SandboxError, DeadlineError) as error:
            log.error("%s", error)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
