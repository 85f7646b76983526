"""Entering a running sandbox from outside: fork into its namespaces, then give up every privilege.

The only module of gyre that foreign interpreters load too (by its path), so it imports the standard library
alone. Everything here is called between a fork and an exec, in single-threaded processes. Two modes: as
root the caller joins namespaces directly; without root it must join the sandbox's user namespace first, which
cannot be undone, so a child in between does it and passes on the exit status.
"""

import ctypes
import os
import resource
import signal
from collections.abc import Mapping

_libc = ctypes.CDLL(None, use_errno=True)

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
PR_SET_PDEATHSIG, PR_CAPBSET_READ, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 23, 24, 38
KEPT_CAPS = (0, 1, 3)
"""What root inside keeps for copying: CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_FOWNER."""

RLIMITS = {
    "cpu_s": resource.RLIMIT_CPU,
    "file_bytes": resource.RLIMIT_FSIZE,
    "processes": resource.RLIMIT_NPROC,
    "memory_bytes": resource.RLIMIT_AS,
    "data_bytes": resource.RLIMIT_DATA,
    "core_bytes": resource.RLIMIT_CORE,
    "files": resource.RLIMIT_NOFILE,
}


def _call(name: str, *args: int) -> None:
    if getattr(_libc, name)(*args) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}{args}: {os.strerror(number)}")


def _prctl(option: int, value: int) -> int:
    return _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0)


def die_with_parent() -> None:
    """Be killed when the parent's thread ends."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def fork_inside(pidfd: int, own_pid_ns: int, *, rootless: bool) -> int:
    """Fork a child into all namespaces of the process behind `pidfd`; returns its pid, and 0 in the child.

    `own_pid_ns` is an open /proc/self/ns/pid, to which the caller's future children return. Raises OSError
    in the caller when the pid namespace is gone; a child that cannot enter another one ends with 126.
    """
    others = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWNET
    if rootless:
        pid = os.fork()
        if pid:
            return pid
        _relay(pidfd, others)
        die_with_parent()
        return 0
    _call("setns", pidfd, CLONE_NEWPID)
    pid = os.fork()
    if pid == 0:
        try:
            _call("setns", pidfd, others)
        except OSError:
            os._exit(126)
        die_with_parent()
    else:
        _call("setns", own_pid_ns, CLONE_NEWPID)
    return pid


def _relay(pidfd: int, others: int) -> None:
    """Join everything, fork once more; the process in between ends as its child does."""
    die_with_parent()
    try:
        _call("setns", pidfd, CLONE_NEWUSER | CLONE_NEWPID | others)
    except OSError:
        os._exit(126)
    pid = os.fork()
    if pid == 0:
        return
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def set_limits(limits: Mapping[str, int]) -> None:
    """Set the named rlimits of `RLIMITS`, soft and hard. Call before giving up root."""
    for name, value in limits.items():
        kind = RLIMITS[name]
        hard = resource.getrlimit(kind)[1]
        if hard != resource.RLIM_INFINITY and os.geteuid() != 0:
            value = min(value, hard)
        resource.setrlimit(kind, (value, value))


def become(uid: int, gid: int) -> None:
    """Take the identity for good: no groups, no capabilities, no way to gain any.

    uid 0 (root on a rooted host, for copying) keeps `KEPT_CAPS` over an exec and nothing else.
    """
    if uid == 0 and os.geteuid() == 0:
        for cap in range(64):
            if cap not in KEPT_CAPS and _prctl(PR_CAPBSET_READ, cap) == 1:
                _prctl(PR_CAPBSET_DROP, cap)
    elif os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
        die_with_parent()  # A change of identity clears it.
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    os.umask(0o022)
