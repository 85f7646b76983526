"""Starts a real run of gyre.py under torchrun, watches what it prints, and knows what it must leave behind: nothing."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

CHECKOUT = Path(__file__).parents[2]
CONFIG = CHECKOUT / "configs" / "quickstart.toml"
MARK = "GYRE_TEST_LAUNCH"


class Launched:
    """One run: its torchrun process, its output, its folder."""

    def __init__(
        self, folder: Path, name: str, *, ranks: int, settings: dict[str, object], resume: bool = False
    ) -> None:
        self.folder, self.output_path = folder / name, folder / f"{name}.out"
        self.mark = f"{os.getpid()}-{name}-{time.monotonic_ns()}"
        sets = {"run.name": name, "run.folder": str(folder), "watch.dashboard": "lines", **settings}
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command += ["--log-dir", str(folder / "torchrun")]  # It never removes its own temporary one.
        command += ["--max-restarts", "0", "gyre.py", str(CONFIG), *(["--resume"] if resume else [])]
        command += [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
        self._output = self.output_path.open("ab")
        self.process = subprocess.Popen(
            command,
            cwd=CHECKOUT,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env={**os.environ, MARK: self.mark},
            start_new_session=True,
        )

    @property
    def output(self) -> str:
        """Everything printed so far."""
        return self.output_path.read_text(errors="replace")

    def await_output(self, text: str, *, deadline_s: float) -> None:
        """Wait until the run has printed `text`; fails with what it printed instead."""
        self.await_that(lambda: text in self.output, what=repr(text), deadline_s=deadline_s)

    def await_that(self, holds: Callable[[], bool], *, what: str, deadline_s: float) -> None:
        """Wait for a condition; fails with the output, also when the run ends first."""
        end = time.monotonic() + deadline_s
        while not holds():
            assert time.monotonic() < end, f"no {what} within {deadline_s} s:\n{self.output[-4000:]}"
            if self.process.poll() is not None and not holds():
                raise AssertionError(f"ended without {what}:\n{self.output[-4000:]}\n{self.logs()}")
            time.sleep(0.1)

    def await_end(self, *, deadline_s: float) -> int:
        """Wait for torchrun to end; returns its exit code."""
        try:
            return self.process.wait(deadline_s)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(
                f"still running after {deadline_s} s:\n{self.output[-4000:]}\n{self.logs()}"
            ) from error

    def logs(self) -> str:
        """The last lines of every log of the run."""
        tails = []
        for path in sorted((self.folder / "logs").glob("*.log")):
            lines = [line[:300] for line in path.read_text(errors="replace").splitlines()[-12:]]
            tails.append("\n".join([f"-- {path.name}", *lines]))
        return "\n".join(tails)

    def rank_pid(self, rank: int) -> int:
        """Process id of a rank, which is a child of torchrun."""
        for child in psutil.Process(self.process.pid).children():
            if child.environ().get("RANK") == str(rank):
                return child.pid
        raise AssertionError(f"no rank {rank} below {self.process.pid}")

    def interrupt(self) -> None:
        """What Ctrl-C does: SIGINT to the whole foreground group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def processes(self) -> list[str]:
        """Every living process of the run, found by an environment variable that all inherit."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(f"{process.pid} {' '.join(process.cmdline())[:100]}")
            except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
                continue
        return found

    def await_nothing_left(self, *, deadline_s: float) -> None:
        """Wait until no process of the run lives and none of its files lie in shared memory."""
        end = time.monotonic() + deadline_s
        while (left := self.processes() + self.files()) and time.monotonic() < end:
            time.sleep(0.1)
        assert not left, f"left behind after {deadline_s} s: {left}\n{self.logs()}"

    def files(self) -> list[str]:
        """What the run's processes left in shared memory or the temporary folder."""
        name = self.folder.name
        places = [*Path("/dev/shm").glob(f"gyre.{name}.*"), *Path("/tmp").glob(f"gyre-{name}*")]
        return [str(path) for path in places]

    def close(self) -> None:
        """Kill whatever is left, by id."""
        self._output.close()
        for line in self.processes():
            try:
                os.kill(int(line.split()[0]), signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait(10)
