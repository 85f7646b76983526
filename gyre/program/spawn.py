"""Starting the front and the hands so that they outlive the process that starts them.

Both run in a session of their own and are re-parented (setsid --fork): SGLang kills every child of a rank
when one of its schedulers dies, and a signal to the terminal's foreground group must not reach them. They end
by themselves: the front when the torchrun agent is gone, the hands when the front is silent.
"""

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path

from gyre.errors import DeadlineError, RunError


def detach(argv: list[str], *, log_path: Path, pass_fds: tuple[int, ...] = (), keep_stdout: bool = False) -> None:
    """Start `argv` detached; its stderr (and stdout unless kept) is appended to `log_path`."""
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("ab") as log_file:
        subprocess.run(
            ["setsid", "--fork", *argv],
            stdin=subprocess.DEVNULL,
            stdout=None if keep_stdout else log_file,
            stderr=log_file,
            pass_fds=pass_fds,
            check=True,
            timeout=30,
        )


def start_front(*, config: list[str], folder: Path, resumed_version: int, agent_pid: int) -> str:
    """Start the front; returns the address it listens on. Raises RunError with its last words if it refuses.

    `config` holds the arguments that name the configuration: its file and the overrides.
    """
    reader, writer = os.pipe()
    argv = [sys.executable, "-m", "gyre.program.front_process", *config, "--folder", str(folder)]
    argv += ["--agent-pid", str(agent_pid), "--resumed-version", str(resumed_version), "--address-fd", str(writer)]
    detach(argv, log_path=folder / "logs" / "front.log", pass_fds=(writer,), keep_stdout=True)
    os.close(writer)
    hello = _read_hello(reader, wait_s=30.0)
    if not hello:
        log_path = folder / "logs" / "front.log"
        last = log_path.read_text(errors="replace").strip().splitlines()[-1:]
        raise RunError(f"the front died while starting: {' '.join(last)} (more in {log_path})")
    if "error" in hello:
        raise RunError(hello["error"])
    return hello["address"]


def _read_hello(reader: int, *, wait_s: float) -> dict[str, str]:
    """One JSON object from the front's start pipe; empty if the pipe ends without one: the front died."""
    data, end = b"", time.monotonic() + wait_s
    with os.fdopen(reader, "rb", buffering=0) as pipe:
        while not data.endswith(b"\n"):
            if not select.select([pipe], [], [], max(0.0, end - time.monotonic()))[0]:
                raise DeadlineError("start of the front", seconds=wait_s, missing="front")
            chunk = pipe.read(65536)
            if not chunk:
                return {}
            data += chunk
    return json.loads(data)


def start_hands(*, address: str, config: list[str], folder: Path, node: int) -> None:
    """Start this node's hands, dialling the front at `address`."""
    argv = [sys.executable, "-m", "gyre.program.hands", "--front", address, *config]
    argv += ["--node", str(node), "--run", folder.name]
    detach(argv, log_path=folder / "logs" / f"hands-{node}.log")
