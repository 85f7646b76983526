"""Starting SGLang's Engine inside a rank without letting it change the rank.

SGLang takes the process for its own: it reads torchrun's variables, sets others, changes the start method and
the root logger, and on shutdown kills every child. Here all of that is hidden or put back, and the engine owns
just the processes it spawned. `launch` must run on the engine's own thread, never the main one: signal handlers
stay untouched, and SIGINT and SIGTERM are blocked in that thread, which the spawned processes inherit. So
Ctrl-C and torchrun's SIGTERM, which reach the whole process group, do not break the engine under the rank that
is about to end in order; the processes still die with the rank (PR_SET_PDEATHSIG, set by SGLang).
"""

import asyncio
import logging
import multiprocessing
import os
import signal
import socket
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

from gyre.config.choices import Dtype
from gyre.config.schema import Settings
from gyre.errors import EngineError
from gyre.serve.remains import EngineFolder
from gyre.serve.request import SglangEngine

log = logging.getLogger(__name__)

TORCHRUN_PREFIXES = ("TORCHELASTIC_", "GROUP_", "ROLE_")
TORCHRUN_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
PORTS_PER_RANK = 16
"""A rank takes the first free pair in its stripe, so that a second run on the host does not collide."""


def engine_arguments(settings: Settings, *, rank: int, on_cpu: bool) -> dict[str, object]:
    """Arguments of `sglang.Engine`.

    On a CPU the engine is one scheduler process whatever the cell's layout (tensor parallelism over gloo is two
    orders slower), in float32 with torch's own attention. The CUDA arguments are sound defaults that have not
    been run yet: the engine spans the cell and its memory can be released.
    """
    engine = settings.engine
    port, nccl_port = free_ports(engine.port + PORTS_PER_RANK * (rank % 64))
    arguments: dict[str, object] = {
        "model_path": str(settings.model.path),
        "context_length": settings.model.max_context_tokens,
        "skip_tokenizer_init": True,
        "skip_server_warmup": True,
        "grammar_backend": "none",
        "enable_deterministic_inference": engine.deterministic,
        "random_seed": settings.run.seed,
        "max_running_requests": engine.max_running_requests,
        "max_total_tokens": engine.max_total_tokens,
        "sleep_on_idle": True,
        "log_level": "error",
        "port": port,
        "nccl_port": nccl_port,
    }
    if engine.attention_backend != "auto":
        arguments["attention_backend"] = engine.attention_backend
    if on_cpu:
        return arguments | {
            "device": "cpu",
            "dtype": "float32" if engine.dtype is Dtype.AUTO else engine.dtype.value,
            "attention_backend": arguments.get("attention_backend", "torch_native"),
            "sampling_backend": "pytorch",
            "mem_fraction_static": 0.05,
            "disable_overlap_schedule": True,
            "disable_cuda_graph": True,
        }
    return arguments | {
        "device": "cuda",
        "dtype": engine.dtype.value,
        "tp_size": settings.layout.num_ranks,
        "base_gpu_id": int(os.environ.get("LOCAL_RANK", "0")),
        "mem_fraction_static": engine.mem_fraction,
        "enable_memory_saver": True,
    }


def free_ports(first: int) -> tuple[int, int]:
    """The first two adjacent free ports of the stripe that begins at `first`. Raises EngineError."""
    for port in range(first, first + PORTS_PER_RANK, 2):
        if _is_free(port) and _is_free(port + 1):
            return port, port + 1
    raise EngineError(f"ports {first} to {first + PORTS_PER_RANK - 1} are all taken; set engine.port to another range")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def launch(
    arguments: Mapping[str, object], processes: list[BaseProcess], folder: EngineFolder, *, on_cpu: bool
) -> SglangEngine:
    """Construct the engine on this thread and give it an event loop (`.loop`). Blocks until the model is loaded.

    Each spawned process is appended to `processes` as soon as it exists, so that a caller can end a start that
    hangs. Raises whatever SGLang raises.
    """
    # Starting it later would unblock both signals again (CPython 3.11).
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    with folder.in_use(), unchanged_rank(on_cpu=on_cpu), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine_class = _owning_engine(processes, folder)
        # After the import, which changes the loop policy; before the engine, whose sockets want a loop.
        asyncio.set_event_loop(asyncio.new_event_loop())
        engine = engine_class(**arguments)
    # It would answer a dead process with SIGQUIT to this rank; gyre watches the processes itself.
    engine.tokenizer_manager._subprocess_watchdog.stop()
    return engine


def _owning_engine(processes: list[BaseProcess], folder: EngineFolder) -> type[SglangEngine]:
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.managers.load_snapshot import shm_path_for

    from gyre.serve.patches import run_scheduler

    class OwningEngine(Engine):
        """Records its processes; its exit hook kills nothing: a blanket kill would take the rank's other children."""

        run_scheduler_process_func = staticmethod(run_scheduler)

        @classmethod
        def _launch_scheduler_processes(cls, server_args, port_args, *arguments, **named):  # noqa: ANN001, ANN002, ANN003, ANN206 - upstream's
            # Before the scheduler makes it, so that not even a killed start leaves it behind.
            folder.note([shm_path_for(port_args.instance_id)])
            result, launched = super()._launch_scheduler_processes(server_args, port_args, *arguments, **named)
            processes.extend(launched or [])
            return result, launched

        @classmethod
        def _launch_detokenizer_subprocesses(cls, *arguments, **named):  # noqa: ANN002, ANN003, ANN206 - upstream's
            launched, names = super()._launch_detokenizer_subprocesses(*arguments, **named)
            processes.extend(launched or [])
            return launched, names

        def shutdown(self) -> None:
            """Close SGLang's sockets here; the processes are ended by their owner. May be repeated."""
            # Absent when the start failed: SGLang registers this hook before it makes the socket.
            if getattr(self, "send_to_rpc", None) is not None:
                manager: Any = self.tokenizer_manager
                # The contexts are not terminated: that waits without a deadline, and was seen to wait for ever.
                for sock in (self.send_to_rpc, manager.recv_from_detokenizer, manager.send_to_scheduler):
                    sock.close(linger=0)
                self.send_to_rpc = None

    return OwningEngine


class QuitSignal:
    """SIGQUIT, which a failing SGLang process sends to its parent: untreated it would end the rank.

    The engine notices the death of its processes by itself, so the signal is only logged. `catch` and `restore`
    do nothing outside the main thread, where Python cannot set handlers.
    """

    def __init__(self) -> None:
        self._previous: Any = None

    def catch(self) -> None:
        """Log SIGQUIT instead of dying of it."""
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGQUIT, _log_quit)
        else:
            log.warning("engine not started from the main thread: its failure would end this process by SIGQUIT")

    def restore(self) -> None:
        """Put the handler back that was there before."""
        if self._previous is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGQUIT, self._previous)
            self._previous = None


def _log_quit(number: int, frame: FrameType | None) -> None:
    log.error("an engine process reported that it failed")


@contextmanager
def unchanged_rank(*, on_cpu: bool) -> Iterator[None]:
    """Hide torchrun's variables inside; afterwards environment, start method and root logger are as before."""
    environment = dict(os.environ)
    start_method = multiprocessing.get_start_method(allow_none=True)
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    for name in environment:
        if name in TORCHRUN_NAMES or name.startswith(TORCHRUN_PREFIXES):
            del os.environ[name]
    if on_cpu:
        # Read when SGLang is imported; more than one OpenMP thread is ten times slower beside other ranks.
        os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # The terminal is the dashboard's: no progress bars and import warnings of the spawned processes.
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    try:
        yield
    finally:
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        multiprocessing.set_start_method(start_method, force=True)
        root.handlers[:] = handlers
        root.setLevel(level)
