"""A family of small shell tasks, drawn from a seed and written as Harbor task folders.

Four kinds: the sum of two numbers, a file with a given word, the number of lines of a file, and a word that
must be looked up in one file and written to another. Each has one right file, one right text and four checks (the file
is there, its format, its exact text, nothing else touched), so that a half-right attempt has a score between
0 and 1. The checks see the workspace alone, never the transcript.

`checks_of` states the checks in Python; `tests/test.sh` of a written task states them in POSIX sh. A test
holds the two equal. This module runs nothing itself.
"""

import argparse
import json
import logging
import os
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from gyre.errors import TaskError
from gyre.tasks.shell_folder import render_instruction, render_solution, render_task_toml, render_test

log = logging.getLogger(__name__)

GENERATOR = "shell-2"
"""Changes whenever the same seed would give other tasks, so that stale folders are written anew."""

_WORDS = """
acorn basil cedar daisy ember fern ginger hazel indigo jasmine kettle ladder maple nutmeg otter pepper quartz
rabbit saddle thistle umbrella velvet walnut yarrow zinnia bridge candle desert engine falcon garden harbor
island jacket lantern meadow needle orchid pillow rocket
"""
_STEMS = "a b c d notes data list log info main temp plan todo result answer table"
_SUFFIXES = "txt md cfg csv"
WORDS = tuple(_WORDS.split())
NAMES = tuple(f"{stem}.{suffix}" for stem in _STEMS.split() for suffix in _SUFFIXES.split())
CARELESS_FILE = "out.txt"
"""Never a file of any task: it is not among NAMES."""


class Kind(StrEnum):
    """The four kinds of task."""

    SUM = "sum"
    CREATE = "create"
    COUNT = "count"
    LOOKUP = "lookup"


FORMATS = {Kind.SUM: "0-9", Kind.CREATE: "a-z", Kind.COUNT: "0-9", Kind.LOOKUP: "a-z"}
"""The characters that the right file may consist of, as a bracket expression of sh and `re` alike."""

TENTHS = {"file": 1, "format": 2, "exact": 5, "clean": 2}
"""What each check is worth, in tenths. All are 0 while the right file is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellTask:
    """One task: `instruction` asks for `target` to hold `want`; `files` are there at the start.

    `operands` are what the instruction names beside the target: two numbers, a word, or a file.
    `solution` is one command that does it.
    """

    kind: Kind
    instruction: str
    operands: tuple[str, ...]
    target: str
    want: str
    files: dict[str, str]
    solution: str


def draw(rng: random.Random, kind: Kind) -> ShellTask:
    """One task of `kind`. The same state of `rng` gives the same task."""
    source, target = rng.sample(NAMES, 2)
    word = rng.choice(WORDS)
    match kind:
        case Kind.SUM:
            left, right = rng.randint(10, 99), rng.randint(10, 99)
            return ShellTask(
                kind=kind,
                instruction=f"Write the sum of {left} and {right} to {target}.",
                operands=(str(left), str(right)),
                target=target,
                want=str(left + right),
                files={},
                solution=f"echo $(({left}+{right})) > {target}",
            )
        case Kind.CREATE:
            return ShellTask(
                kind=kind,
                instruction=f"Create {target} with the text {word}.",
                operands=(word,),
                target=target,
                want=word,
                files={},
                solution=f"echo {word} > {target}",
            )
        case Kind.COUNT:
            num_lines = rng.randint(1, 9)
            return ShellTask(
                kind=kind,
                instruction=f"Count the lines of {source} into {target}.",
                operands=(source,),
                target=target,
                want=str(num_lines),
                files={source: "".join(f"{rng.choice(WORDS)}\n" for _ in range(num_lines))},
                solution=f"wc -l < {source} > {target}",
            )
        case Kind.LOOKUP:
            return ShellTask(
                kind=kind,
                instruction=f"Read {source} and write its word to {target}.",
                operands=(source,),
                target=target,
                want=word,
                files={source: f"{word}\n"},
                solution=f"cat {source} > {target}",
            )


def draw_many(seed: str, count: int, *, avoid: frozenset[str] = frozenset()) -> tuple[ShellTask, ...]:
    """`count` tasks, the kinds in turn, no instruction twice and none that is in `avoid`."""
    rng, seen, tasks = random.Random(seed), set(avoid), []
    kinds = tuple(Kind)
    for _ in range(100 * count):
        if len(tasks) == count:
            break
        task = draw(rng, kinds[len(tasks) % len(kinds)])
        if task.instruction not in seen:
            seen.add(task.instruction)
            tasks.append(task)
    if len(tasks) < count:
        raise TaskError(f"only {len(tasks)} of {count} different shell tasks could be drawn; ask for fewer")
    return tuple(tasks)


def draw_split(seed: int, *, num_train: int, num_held_out: int) -> tuple[tuple[ShellTask, ...], tuple[ShellTask, ...]]:
    """(train, held out) with no instruction in both. The held-out tasks do not depend on `num_train`."""
    held_out = draw_many(f"{seed} held out", num_held_out)
    train = draw_many(f"{seed} train", num_train, avoid=frozenset(task.instruction for task in held_out))
    return train, held_out


def checks_of(task: ShellTask, files: Mapping[str, bytes]) -> dict[str, float]:
    """The reward and the four checks (0 or 1) of a workspace that holds `files` (plain files, by name)."""
    found = files.get(task.target)
    text = "" if found is None else found.replace(b"\0", b"").decode("latin-1").rstrip("\n")
    others = {name: data for name, data in files.items() if name != task.target}
    passed = {
        "file": found is not None,
        "format": re.fullmatch(f"[{FORMATS[task.kind]}]+", text) is not None,
        "exact": found is not None and text == task.want,
        "clean": found is not None and others == {name: data.encode() for name, data in task.files.items()},
    }
    reward = sum(TENTHS[name] for name, is_passed in passed.items() if is_passed) / 10
    return {"reward": reward} | {name: float(is_passed) for name, is_passed in passed.items()}


def write_task(task: ShellTask, folder: Path) -> None:
    """Write the Harbor folder of one task; `folder` must not exist yet."""
    contents = {
        "instruction.md": render_instruction(task.instruction),
        "task.toml": render_task_toml(folder.name, kind=task.kind),
        "tests/test.sh": render_test(
            target=task.target, want=task.want, allowed=FORMATS[task.kind], initial=tuple(task.files), tenths=TENTHS
        ),
        "solution/solve.sh": render_solution(task.solution),
    }
    for name, text in task.files.items():
        contents[f"environment/{name}"] = text
        contents[f"tests/initial/{name}"] = text
    (folder / "environment").mkdir(parents=True)
    for name, text in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        if name.endswith(".sh"):
            path.chmod(0o755)


def write_split(out: Path, *, seed: int, num_train: int, num_held_out: int) -> bool:
    """Write `out/train` and `out/held_out`; False if they are there already, from the same numbers.

    The folder appears whole or not at all. A folder that this generator did not write is never touched:
    TaskError.
    """
    manifest = {"generator": GENERATOR, "seed": seed, "train": num_train, "held_out": num_held_out}
    if out.exists() and any(out.iterdir()):
        present = _read_manifest(out)
        if present is None:
            raise TaskError(f"{out}: not empty and without a manifest of this generator; give another folder")
        if present == manifest:
            return False
    train, held_out = draw_split(seed, num_train=num_train, num_held_out=num_held_out)
    out.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        fresh.chmod(0o755)
        for split, tasks in (("train", train), ("held_out", held_out)):
            for index, task in enumerate(tasks):
                write_task(task, fresh / split / f"{split.replace('_', '-')}-{index:04d}-{task.kind}")
        (fresh / "manifest.json").write_text(json.dumps(manifest) + "\n")
        if out.exists():
            shutil.rmtree(out)
        os.rename(fresh, out)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    return True


def _read_manifest(out: Path) -> dict[str, object] | None:
    """The manifest that some version of this generator left in `out`, or None."""
    try:
        present = json.loads((out / "manifest.json").read_text())
    except (OSError, ValueError):
        return None
    is_ours = isinstance(present, dict) and str(present.get("generator", "")).startswith("shell-")
    return present if is_ours else None


def main(argv: list[str]) -> int:
    """`python -m gyre.tasks.shell OUT --train 192 --held-out 64 --seed 0`."""
    parser = argparse.ArgumentParser(prog="python -m gyre.tasks.shell", description="Write a set of small shell tasks.")
    parser.add_argument("out", type=Path, help="the folder to write; train/ and held_out/ appear in it")
    parser.add_argument("--train", type=int, default=192, help="number of tasks to train on")
    parser.add_argument("--held-out", type=int, default=64, help="number of tasks to evaluate on")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        is_new = write_split(args.out, seed=args.seed, num_train=args.train, num_held_out=args.held_out)
    except TaskError as error:
        log.error("%s", error)
        return error.exit_code
    log.info("tasks=%s train=%d held_out=%d written=%s", args.out, args.train, args.held_out, is_new)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
