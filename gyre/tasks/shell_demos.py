"""A careless demonstrator of the shell tasks: scripted commands, executed for real, as the harness would show them.

Most of what it does is wrong: it writes to `out.txt` instead of the file that was named, subtracts, adds a
full stop, counts bytes, writes in capitals. A policy that imitates it answers wrongly at temperature 0 too,
while the right behaviour stays among its samples: reward alone can tell the two apart. It nearly always
submits, so rollouts of its imitators are short.

Messages, fences, observations and the step limit follow configs/quickstart/mini.yaml. Commands run in a
throw-away folder without a sandbox: they are this module's own, never a policy's.
"""

import random
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from gyre.tasks.shell import CARELESS_FILE, NAMES, Kind, ShellTask, checks_of

SYSTEM = "Use one shell command per turn."
SUBMIT_MARK = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
STEP_LIMIT = 4
OBSERVATION_CHARS = 60
COMMAND_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """Probabilities per decision. Above 0.5 a habit is what an imitator does at temperature 0."""

    careless_file: float = 0.68
    careless_text: float = 0.66
    slip: float = 0.01
    look: float = 0.15
    linger: float = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """`messages` are (role, text) of the whole conversation, ending with the last command; `reward` its score."""

    messages: tuple[tuple[str, str], ...]
    reward: float


def fence(command: str) -> str:
    """A turn of the policy that carries `command`."""
    return f"```sh\n{command}\n```"


def observe(returncode: int, output: str) -> str:
    """The harness's answer to a command."""
    return f"rc={returncode}\n{output.strip()[:OBSERVATION_CHARS]}"


def script(task: ShellTask, rng: random.Random, habits: Habits) -> tuple[str, ...]:
    """The demonstrator's commands for one task, good or bad as chance has it."""
    target = CARELESS_FILE if rng.random() < habits.careless_file else task.target
    if rng.random() < habits.slip:
        target = rng.choice(NAMES)
    is_careless = rng.random() < habits.careless_text
    commands = []
    match task.kind:
        case Kind.SUM:
            left, right = task.operands
            commands.append(f"echo $(({left}{'-' if is_careless else '+'}{right})) > {target}")
        case Kind.CREATE:
            commands.append(f"echo {task.want}{'.' if is_careless else ''} > {target}")
        case Kind.COUNT:
            commands.append(f"wc {'-c' if is_careless else '-l'} < {task.operands[0]} > {target}")
        case Kind.LOOKUP:
            commands.append(f"cat {task.operands[0]}")
            commands.append(f"echo {task.want.upper() if is_careless else task.want} > {target}")
    if rng.random() < habits.look:
        commands.append(f"cat {target}")
    if rng.random() < habits.linger:
        return (*commands, *[f"cat {target}"] * STEP_LIMIT)
    return (*commands, f"echo {SUBMIT_MARK}")


def demonstrate(task: ShellTask, commands: tuple[str, ...]) -> Demonstration:
    """Execute `commands` until one submits or the step limit is reached, and score what is left."""
    messages = [("system", SYSTEM), ("user", task.instruction)]
    with tempfile.TemporaryDirectory(prefix="gyre-demo-") as name:
        folder = Path(name)
        for file_name, text in task.files.items():
            (folder / file_name).write_text(text)
        for command in commands[:STEP_LIMIT]:
            messages.append(("assistant", fence(command)))
            returncode, output = _execute(command, folder)
            if output.strip() == SUBMIT_MARK:
                break
            messages.append(("user", observe(returncode, output)))
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
    if messages[-1][0] == "user":
        messages.pop()
    return Demonstration(messages=tuple(messages), reward=checks_of(task, files)["reward"])


def _execute(command: str, folder: Path) -> tuple[int, str]:
    """(exit status, standard output and error together) of one command in `folder`."""
    done = subprocess.run(
        ["/bin/sh", "-c", command],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "LC_ALL": "C"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=COMMAND_TIMEOUT_S,
        check=False,
    )
    return done.returncode, done.stdout
