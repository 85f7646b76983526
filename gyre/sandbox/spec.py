"""What a sandbox is made of: limits, what it sees of the host, and the bubblewrap command line for it. Pure.

Inside: the host's /usr read-only, a minimal /etc, fresh /proc, /dev and tmpfs for everything writable, its own
pid, ipc, uts and network namespace (and user namespace where the owner is not root), no capabilities, and a
user id of its own. Nothing writable lies on the host's disk, and no home folder is visible.
"""

from dataclasses import dataclass, field
from pathlib import Path

AGENT, ROOT = "agent", "root"
WORKDIR = "/app"
LOGS = ("/logs/agent", "/logs/verifier", "/logs/artifacts")
READY_SCRIPT = "echo R; exec env --ignore-signal=CHLD cat >/dev/null 2>&1"
"""Process 1: ignoring SIGCHLD makes the kernel reap orphans; `cat` ends when the keeper that holds its stdin does."""
PATH = "/usr/local/bin:/usr/bin:/bin"
SMALL_MB = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """`memory_mb` and `cpu_s` bind each process, `processes` the sandbox's user, `disk_mb` each tmpfs and file."""

    memory_mb: int = 512
    processes: int = 64
    disk_mb: int = 64
    cpu_s: int = 600

    def rlimits(self) -> dict[str, int]:
        """The names are those of `enter.RLIMITS`."""
        return {
            "cpu_s": self.cpu_s,
            "file_bytes": self.disk_mb << 20,
            "processes": self.processes,
            "memory_bytes": self.memory_mb << 20,
            "core_bytes": 0,
            "files": 1024,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """`workdir` is the writable workspace; `read_only` paths of the host appear at the same place inside."""

    workdir: str = WORKDIR
    limits: Limits = field(default_factory=Limits)
    read_only: tuple[Path, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    ready_s: float = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """`stdout` and `stderr` are cut at the size asked for. `rc` is negative for a signal."""

    rc: int
    stdout: bytes
    stderr: bytes


def base_env(spec: SandboxSpec) -> dict[str, str]:
    """The whole environment of a process inside; nothing of the host's."""
    return {"PATH": PATH, "HOME": "/tmp", "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8", "USER": AGENT} | spec.env


def bwrap_argv(bwrap: str, spec: SandboxSpec, *, etc: Path, uid: int, rootless: bool) -> list[str]:
    """The command line; `etc` is a host folder with passwd, group and hosts. --info-fd is added by the keeper."""
    argv = [bwrap, "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-net"]
    argv += ["--die-with-parent", "--as-pid-1"]
    argv += ["--unshare-user", "--uid", str(uid), "--gid", str(uid)] if rootless else []
    argv += ["--cap-drop", "ALL", "--hostname", "sandbox", "--clearenv", "--setenv", "PATH", PATH]
    argv += ["--ro-bind", "/usr", "/usr"]
    for name in ("/bin", "/sbin", "/lib", "/lib64", "/lib32", "/libx32"):
        path = Path(name)
        if path.is_symlink():
            argv += ["--symlink", str(path.readlink()), name]
        elif path.is_dir():
            argv += ["--ro-bind", name, name]
    for name in ("/etc", "/etc/ssl"):  # Made on the way to a bind they would be closed to the user.
        argv += ["--perms", "0755", "--dir", name]
    for name in ("/etc/alternatives", "/etc/ld.so.cache", "/etc/ssl/certs", "/etc/localtime"):
        argv += ["--ro-bind-try", name, name]
    for name in ("passwd", "group", "hosts"):
        argv += ["--ro-bind", str(etc / name), f"/etc/{name}"]
    argv += ["--proc", "/proc", "--dev", "/dev"]
    disk = str(spec.limits.disk_mb << 20)
    argv += ["--size", disk, "--perms", "1777", "--tmpfs", "/tmp"]
    argv += ["--size", disk, "--perms", "0755", "--tmpfs", spec.workdir]
    for name in ("/tests", "/solution", "/logs"):
        argv += ["--size", disk if name != "/logs" else str(SMALL_MB << 20), "--perms", "0755", "--tmpfs", name]
    for name in LOGS:
        argv += ["--perms", "0777", "--dir", name]
    # After the temporary file systems: what is read-only may lie below one of them (a checkout in /tmp).
    for path in spec.read_only:
        for parent in reversed(path.parents[:-1]):
            argv += ["--perms", "0755", "--dir", str(parent)] if not parent.is_relative_to("/usr") else []
        argv += ["--ro-bind", str(path), str(path)]
    return [*argv, "--remount-ro", "/", "--chdir", "/", "/bin/sh", "-c", READY_SCRIPT]


def abilities(*, bwrap: str, rootless: bool) -> dict[str, str]:
    """Which driver is in force for what, in words for the start of a run."""
    return {
        "isolation": f"{bwrap}, {'own user namespace' if rootless else 'own uid a sandbox'}",
        "network": "none but the gateway socket",
        "memory": "rlimit, each process",
        "processes": "not limited (one mapped uid)" if rootless else "rlimit, each sandbox",
        "cpu": "rlimit, each process",
        "disk": "tmpfs size",
    }
