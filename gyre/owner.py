"""Who owns what lies in a shared place: a stamp for names, by which anybody can tell that the owner is dead.

A process killed hard cleans up nothing, so its files carry its process id, its start time (ids are used again)
and its process-id namespace (a container cannot judge another's processes).
"""

import os
from pathlib import Path


def stamp() -> str:
    """`NAMESPACE.PID.START` of this process; three fields of digits."""
    return f"{_namespace()}.{os.getpid()}.{start_of(os.getpid())}"


def is_dead(owner: str) -> bool:
    """Whether the process of a stamp is gone. False for another namespace, and for what is no stamp."""
    fields = owner.split(".")
    if len(fields) != 3 or not all(field.isdigit() for field in fields) or fields[0] != _namespace():
        return False
    return start_of(int(fields[1])) != int(fields[2])


def _namespace() -> str:
    return str(os.stat("/proc/self/ns/pid").st_ino)


def start_of(pid: int) -> int:
    """When a process started, in clock ticks since boot; 0 if there is none (or only its zombie)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    # The command's name is in parentheses and may hold anything; field 3 follows the last one.
    fields = text.rpartition(")")[2].split()
    return 0 if fields[0] in ("Z", "X") else int(fields[19])
