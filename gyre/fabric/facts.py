"""What a rank knows of itself before anything is placed: where it is, on what, with which versions."""

import importlib.metadata
import os
import socket

import torch

from gyre.types import RankFacts

COMPARED_VERSIONS = ("torch", "sglang", "megatron-core", "transformers")


def collect_facts(*, rank: int, local_rank: int, on_cpu: bool) -> RankFacts:
    """The facts of this process."""
    if on_cpu:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:
        memory = torch.cuda.get_device_properties(local_rank).total_memory
    return RankFacts(
        rank=rank,
        local_rank=local_rank,
        host=socket.gethostname(),
        device="cpu" if on_cpu else f"cuda:{local_rank}",
        memory_bytes=memory,
        versions={name: _version(name) for name in COMPARED_VERSIONS},
    )


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"
