"""Ending the processes that an engine spawned, and what they spawned: those and no others."""

import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess

import psutil


def end_processes(processes: Sequence[BaseProcess], *, wait_s: float) -> list[int]:
    """Kill the processes and their descendants, wait up to `wait_s`; returns the ids that are still there.

    SIGKILL on purpose: a scheduler holds nothing that it would have to save, and it blocks SIGTERM.
    """
    trees: list[psutil.Process] = []
    for process in processes:
        if process.pid is None or process.exitcode is not None:
            continue  # Reaped: its number may be another's by now.
        try:
            root = psutil.Process(process.pid)
            trees += [*root.children(recursive=True), root]
        except psutil.NoSuchProcess:
            continue
    for member in trees:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue
    end = time.monotonic() + wait_s
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    _, alive = psutil.wait_procs(trees, timeout=max(0.0, end - time.monotonic()))
    return [member.pid for member in alive if member.is_running() and member.status() != psutil.STATUS_ZOMBIE]
