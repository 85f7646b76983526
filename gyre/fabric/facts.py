"""What a rank knows of itself before anything is placed: where it is, on what, with which versions."""

import importlib.metadata
import os
import socket
from dataclasses import dataclass

import torch

COMPARED_VERSIONS = ("torch", "sglang", "megatron-core", "transformers")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """One rank's facts. `device` is "cpu" or "cuda:I"; `memory_bytes` is the device's, on a CPU the host's."""

    rank: int
    local_rank: int
    host: str
    device: str
    memory_bytes: int
    versions: dict[str, str]

    @property
    def device_kind(self) -> str:
        """The device without its index."""
        return self.device.partition(":")[0]


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
