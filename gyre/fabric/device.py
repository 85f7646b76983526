"""Which device a rank computes on, and what is free there."""

import torch

from gyre.config.choices import DeviceChoice


def runs_on_cpu(choice: DeviceChoice) -> bool:
    """Whether ranks compute on the CPU; `auto` takes CUDA where it is."""
    return choice is DeviceChoice.CPU or (choice is DeviceChoice.AUTO and not torch.cuda.is_available())


def free_device_bytes(*, on_cpu: bool) -> int:
    """Free memory of the current CUDA device in bytes; 0 on a CPU, where an engine frees nothing."""
    return 0 if on_cpu else torch.cuda.mem_get_info()[0]
