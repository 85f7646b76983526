"""A strict reader of task folders in Harbor format (schema up to 1.4), standard library and tomli alone.

Every key is known or the folder is refused with the nearest name: a misspelt limit must not become a default.
Deprecated keys are taken with a warning. What this project cannot run is refused here, at load, with the
reason, and never half-run: images, GPUs, a public network, several steps, shared verification. Nothing is
executed and nothing outside the folder is read.
"""

import logging
import math
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import tomli

from gyre.errors import TaskError

log = logging.getLogger(__name__)

DEFAULT_WORKDIR = "/app"
DEFAULT_AGENT_S = 600.0
DEFAULT_VERIFIER_S = 600.0
NUMBER, TEXT, BOOL, LIST, TABLE = (int, float), (str,), (bool,), (list,), (dict,)
IMAGE_FILES = ("Dockerfile", "docker-compose.yaml", "docker-compose.yml")

KEYS: dict[str, dict[str, tuple[type, ...]]] = {
    "": {
        "schema_version": TEXT,
        "version": TEXT,
        "source": TEXT,
        "task": TABLE,
        "metadata": TABLE,
        "agent": TABLE,
        "verifier": TABLE,
        "environment": TABLE,
        "solution": TABLE,
        "artifacts": LIST,
        "steps": LIST,
    },
    "task": {
        "name": TEXT,
        "version": TEXT,
        "description": TEXT,
        "authors": LIST,
        "keywords": LIST,
    },
    "agent": {"timeout_sec": NUMBER, "user": (str, int), "network_mode": TEXT},
    "verifier": {
        "timeout_sec": NUMBER,
        "env": TABLE,
        "user": (str, int),
        "environment_mode": TEXT,
        "network_mode": TEXT,
        "collect": LIST,
    },
    "environment": {
        "docker_image": TEXT,
        "build_timeout_sec": NUMBER,
        "cpus": NUMBER,
        "memory_mb": NUMBER,
        "storage_mb": NUMBER,
        "gpus": NUMBER,
        "gpu_types": LIST,
        "env": TABLE,
        "workdir": TEXT,
        "network_mode": TEXT,
        "allowed_hosts": LIST,
        "healthcheck": TABLE,
        "mcp_servers": LIST,
        "skills_dir": TEXT,
        "os": TEXT,
        "allow_internet": BOOL,
        "memory": TEXT,
        "storage": TEXT,
    },
    "solution": {"env": TABLE},
}
DEPRECATED = {
    ("", "version"): "schema_version",
    ("environment", "allow_internet"): "network_mode",
    ("environment", "memory"): "memory_mb",
    ("environment", "storage"): "storage_mb",
}
NO_NETWORK = ("no-network",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One task that can be run here. Times in seconds; `memory_mb` and `storage_mb` are None where not asked."""

    name: str
    folder: Path
    instruction: str
    workdir: str = DEFAULT_WORKDIR
    agent_s: float = DEFAULT_AGENT_S
    verifier_s: float = DEFAULT_VERIFIER_S
    env: dict[str, str] = field(default_factory=dict)
    verifier_env: dict[str, str] = field(default_factory=dict)
    solution_env: dict[str, str] = field(default_factory=dict)
    memory_mb: int | None = None
    storage_mb: int | None = None

    @property
    def environment(self) -> Path:
        """Its content is the workspace at the start; may be missing."""
        return self.folder / "environment"

    @property
    def tests(self) -> Path:
        """Holds test.sh; the agent never sees it."""
        return self.folder / "tests"

    @property
    def solution(self) -> Path:
        """Holds solve.sh; may be missing."""
        return self.folder / "solution"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSet:
    """The tasks of a folder in the order of their names, and why the others were refused (by folder name)."""

    tasks: tuple[Task, ...]
    refused: dict[str, str]


def load_tasks(folder: Path) -> TaskSet:
    """Every sub-folder with a task.toml. TaskError when the folder is missing or has none at all."""
    if not folder.is_dir():
        raise TaskError(f"{folder}: no such folder of tasks")
    tasks, refused = [], {}
    for path in sorted(folder.iterdir()):
        if (path / "task.toml").is_file():
            try:
                tasks.append(load_task(path))
            except TaskError as error:
                refused[path.name] = str(error)
    if not tasks and not refused:
        raise TaskError(f"{folder}: no task in it (a task is a sub-folder with task.toml)")
    return TaskSet(tasks=tuple(tasks), refused=refused)


def load_task(folder: Path) -> Task:
    """Read one task folder. TaskError names the folder, the key and the reason."""
    reader = _Reader(folder)
    root = reader.root()
    agent, verifier = reader.table(root, "agent"), reader.table(root, "verifier")
    environment, solution = reader.table(root, "environment"), reader.table(root, "solution")
    task = reader.table(root, "task")
    reader.refuse_what_cannot_run(root, agent, verifier, environment)
    workdir = environment.get("workdir", DEFAULT_WORKDIR)
    if not workdir.startswith("/") or ".." in workdir.split("/") or workdir.strip("/").split("/")[0] in RESERVED:
        reader.fail("environment.workdir", f"{workdir!r} is not a path for a workspace")
    return Task(
        name=task.get("name", folder.name),
        folder=folder.resolve(),
        instruction=reader.text("instruction.md"),
        workdir=workdir.rstrip("/"),
        agent_s=reader.seconds("agent.timeout_sec", agent.get("timeout_sec", DEFAULT_AGENT_S)),
        verifier_s=reader.seconds("verifier.timeout_sec", verifier.get("timeout_sec", DEFAULT_VERIFIER_S)),
        env=reader.env("environment.env", environment.get("env", {})),
        verifier_env=reader.env("verifier.env", verifier.get("env", {})),
        solution_env=reader.env("solution.env", solution.get("env", {})),
        memory_mb=reader.size_mb(environment, "memory_mb", "memory"),
        storage_mb=reader.size_mb(environment, "storage_mb", "storage"),
    )


RESERVED = ("", "bin", "dev", "etc", "lib", "lib64", "logs", "proc", "sbin", "solution", "sys", "tests", "tmp", "usr")


class _Reader:
    """Reads and checks one folder; every error says where."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def fail(self, key: str, reason: str) -> None:
        """Raise TaskError."""
        raise TaskError(f"{self._folder}: {key}: {reason}")

    def text(self, name: str) -> str:
        """A UTF-8 file of the folder."""
        try:
            return (self._folder / name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TaskError(f"{self._folder}: {name}: {error}") from error

    def root(self) -> dict[str, Any]:
        """task.toml, its top keys checked; test.sh is there."""
        try:
            root = tomli.loads(self.text("task.toml"))
        except tomli.TOMLDecodeError as error:
            raise TaskError(f"{self._folder}: task.toml: {error}") from error
        self._check("", root)
        version = root.get("schema_version", root.get("version", "1.0"))
        if version.split(".")[0] != "1":
            self.fail("schema_version", f"{version!r} is not known; 1.0 to 1.4 are")
        if not (self._folder / "tests" / "test.sh").is_file():
            self.fail("tests/test.sh", "is missing")
        return root

    def table(self, root: dict[str, Any], name: str) -> dict[str, Any]:
        """One table with its keys checked; empty where it is missing."""
        table = root.get(name, {})
        self._check(name, table)
        return table

    def _check(self, where: str, table: dict[str, Any]) -> None:
        known = KEYS[where]
        for key, value in table.items():
            dotted = f"{where}.{key}" if where else key
            if key not in known:
                near = get_close_matches(key, known, n=1)
                self.fail(dotted, "unknown key" + (f"; did you mean {near[0]!r}?" if near else ""))
            if not isinstance(value, known[key]) or (isinstance(value, bool) and known[key] != BOOL):
                self.fail(dotted, f"wanted {' or '.join(kind.__name__ for kind in known[key])}, given {value!r}")
            if new := DEPRECATED.get((where, key)):
                log.warning("task=%s key=%s deprecated use=%s", self._folder.name, dotted, new)

    def seconds(self, key: str, value: float) -> float:
        """A positive finite time."""
        if not math.isfinite(value) or value <= 0:
            self.fail(key, f"wanted seconds above 0, given {value!r}")
        return float(value)

    def env(self, key: str, table: dict[str, Any]) -> dict[str, str]:
        """Text values only; a reference to the host's environment is refused."""
        for name, value in table.items():
            if not isinstance(value, str):
                self.fail(f"{key}.{name}", f"wanted text, given {value!r}")
            if "${" in value:
                self.fail(f"{key}.{name}", "refers to the host's environment, which a sandbox never sees")
        return dict(table)

    def size_mb(self, table: dict[str, Any], key: str, old: str) -> int | None:
        """MiB by the new key, or by the deprecated one with its unit ("4G")."""
        value = table.get(key)
        if value is None and old in table:
            text = str(table[old]).strip().upper().removesuffix("B").removesuffix("I")
            factors = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1 << 20}
            try:
                value = float(text[:-1]) * factors[text[-1:]]
            except (KeyError, ValueError):
                self.fail(f"environment.{old}", f"wanted a size such as '4G', given {table[old]!r}")
        if value is not None and not (math.isfinite(value) and value > 0):
            self.fail(f"environment.{key}", f"wanted a size above 0, given {value!r}")
        return None if value is None else max(1, int(value))

    def refuse_what_cannot_run(
        self, root: dict[str, Any], agent: dict[str, Any], verifier: dict[str, Any], environment: dict[str, Any]
    ) -> None:
        """Say clearly what is not supported."""
        if root.get("steps") or (self._folder / "steps").exists():
            self.fail("steps", "several steps are not supported")
        if root.get("artifacts"):
            self.fail("artifacts", "artifacts beyond the workspace are not collected")
        if environment.get("docker_image"):
            self.fail("environment.docker_image", "images need a root file system, which is not supported")
        for name in IMAGE_FILES:
            if (self._folder / "environment" / name).exists():
                self.fail(f"environment/{name}", "images are not built here")
        if environment.get("gpus"):
            self.fail("environment.gpus", "sandboxes have no GPU")
        if environment.get("os", "linux") != "linux":
            self.fail("environment.os", "only linux")
        for key in ("healthcheck", "mcp_servers", "skills_dir"):
            if environment.get(key):
                self.fail(f"environment.{key}", "not supported")
        for where, table in (("agent", agent), ("verifier", verifier), ("environment", environment)):
            mode = table.get("network_mode", "no-network")
            if mode not in NO_NETWORK:
                self.fail(f"{where}.network_mode", f"{mode!r}: a sandbox has no network but the model's gateway")
            if where != "environment" and table.get("user") not in (None, "root", "agent", 0):
                self.fail(f"{where}.user", "a sandbox has one user")
        if environment.get("allow_internet") or environment.get("allowed_hosts"):
            self.fail("environment.allow_internet", "a sandbox has no network but the model's gateway")
        if verifier.get("environment_mode", "separate") != "separate":
            self.fail("verifier.environment_mode", "only 'separate': grading beside the agent's processes is unsafe")
        if verifier.get("collect"):
            self.fail("verifier.collect", "commands before grading are not supported")
