"""The engine of a cell: a real SGLang engine behind a small thread-safe interface.

One named thread runs SGLang's event loop; every method here may be called from any other thread and answers by
its deadline (a `time.monotonic()` value). Invariants: every submitted call is answered exactly once; an engine
without a `version` takes no calls; weights change and memory is released only while nothing is in flight; after
a failed load the engine has no version. A dead engine process fails every call in flight at once.
It does not queue, route or retry, and it does not know what a rollout is. CUDA has not been run yet.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Coroutine, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
from torch import Tensor

from gyre.config.schema import Settings
from gyre.errors import DeadlineError, EngineError
from gyre.fabric.device import free_device_bytes, runs_on_cpu
from gyre.fabric.weights import fingerprint_of
from gyre.serve import launch, update
from gyre.serve.calls import Calls, OnDone, answer
from gyre.serve.process import end_processes
from gyre.serve.remains import EngineFolder
from gyre.serve.request import GenerateRequest
from gyre.types import Sample

log = logging.getLogger(__name__)

POLL_S = 0.05


class Engine:
    """See the module. `rank` separates the ports of engines on one host."""

    def __init__(self, settings: Settings, *, rank: int) -> None:
        self._settings, self._rank = settings, rank
        self._on_cpu = runs_on_cpu(settings.placement.device)
        self._sglang: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._processes: list[BaseProcess] = []
        self._calls: Calls | None = None
        self._failure: EngineError | None = None
        self._is_closed, self._is_released = False, False
        self._version: int | None = None
        self._fingerprint: str | None = None
        self._probes = 0
        self._quit_signal = launch.QuitSignal()
        self._folder: EngineFolder | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}

    @property
    def version(self) -> int | None:
        """The policy version that is loaded; None before the first load, after a release or a failed load."""
        return self._version

    @property
    def fingerprint(self) -> str | None:
        """`fingerprint_of` the loaded weights; None when `version` is."""
        return self._fingerprint

    @property
    def in_flight(self) -> int:
        """Calls that are submitted and not answered."""
        return len(self._calls) if self._calls is not None else 0

    @property
    def process_ids(self) -> list[int]:
        """The engine's own processes."""
        return [process.pid for process in self._processes if process.pid is not None]

    # --- life -------------------------------------------------------------------------------------

    def start(self, deadline: float) -> None:
        """Start SGLang with the weights of the model folder (no version yet). Raises EngineError, DeadlineError.

        To be called from the main thread, else a failing engine process takes this one along (SIGQUIT).
        """
        self._shapes = update.read_shapes(self._settings.model.path)
        arguments = launch.engine_arguments(self._settings, rank=self._rank, on_cpu=self._on_cpu)
        ready: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run_loop, args=(arguments, ready), name=f"engine-{self._rank}", daemon=True
        )
        self._folder = EngineFolder()
        self._quit_signal.catch()
        began = time.monotonic()
        self._thread.start()
        try:
            ready.result(timeout=max(0.0, deadline - began))
        except FutureTimeoutError as error:
            self._fail(EngineError("the engine did not start in time"))
            self.kill()
            raise DeadlineError("start of the engine", seconds=deadline - began) from error
        except Exception as error:  # Whatever SGLang raises while starting, it is raised again as ours.
            self.kill()
            raise EngineError(f"the engine did not start: {type(error).__name__}: {error}") from error

    def _run_loop(self, arguments: dict[str, object], ready: "Future[None]") -> None:
        """The engine's thread: its life is that of the processes, which die with the thread that spawned them."""
        assert self._folder is not None
        try:
            self._sglang = launch.launch(arguments, self._processes, self._folder, on_cpu=self._on_cpu)
            loop: asyncio.AbstractEventLoop = self._sglang.loop
            self._calls = Calls(self._sglang, timeout_s=self._settings.engine.request_timeout_s)
            for process in self._processes:
                loop.add_reader(process.sentinel, self._process_died, process)
        except BaseException as error:  # noqa: BLE001 - start() must hear it, even a SystemExit of SGLang's
            ready.set_exception(error if isinstance(error, Exception) else EngineError(repr(error)))
            return
        self._loop = loop
        ready.set_result(None)
        loop.run_forever()
        # What was handed over while the loop stopped is answered in one more turn.
        loop.call_soon(loop.stop)
        loop.run_forever()
        loop.close()

    def _process_died(self, process: BaseProcess) -> None:
        assert self._loop is not None
        self._loop.remove_reader(process.sentinel)
        if self._is_closed:
            return
        process.join(1.0)
        error = EngineError(f"engine process {process.name} pid={process.pid} died, exit code {process.exitcode}")
        self._fail(error)
        if self._calls is not None:
            self._calls.fail(error)

    def _fail(self, error: EngineError) -> None:
        if self._failure is None:
            log.error("engine rank=%d error=%s", self._rank, error)
            self._failure = error
        self._version = self._fingerprint = None

    def kill(self) -> None:
        """End the engine's processes at once, without waiting. Safe in any state and from any thread."""
        self._is_closed = True
        end_processes(self._processes, wait_s=0.0)
        self._remove_folder()

    def shutdown(self, deadline: float) -> None:
        """End the engine: answer what is in flight, end its own processes and its thread. May be repeated."""
        if self._thread is None:
            return
        self._is_closed = True
        self._fail_quietly()
        if self._loop is not None and self._thread.is_alive():
            closing = asyncio.run_coroutine_threadsafe(self._close(), self._loop)
            try:
                closing.result(timeout=max(0.1, min(2.0, deadline - time.monotonic())))
            except FutureTimeoutError:
                log.warning("engine rank=%d did not close its calls in time", self._rank)
            self._loop.call_soon_threadsafe(self._loop.stop)
        alive = end_processes(self._processes, wait_s=max(0.1, deadline - time.monotonic()))
        self._thread.join(max(0.1, deadline - time.monotonic()))
        self._quit_signal.restore()
        self._remove_folder()
        if alive:
            raise DeadlineError("end of the engine", seconds=0.0, missing=f"processes {alive}")

    def _remove_folder(self) -> None:
        if self._folder is not None:
            self._folder.remove()

    def _fail_quietly(self) -> None:
        self._version = self._fingerprint = None
        if self._failure is None:
            self._failure = EngineError("the engine is shut down")

    async def _close(self) -> None:
        assert self._calls is not None
        calls = self._calls.fail(self._failure or EngineError("the engine is shut down"))
        await asyncio.gather(*calls, return_exceptions=True)
        self._sglang.shutdown()
        own = asyncio.current_task()
        for task in asyncio.all_tasks():
            if task is not own:
                task.cancel()

    def check(self) -> None:
        """Raises EngineError when an engine process has died or the engine is shut down."""
        if self._failure is not None:
            raise self._failure
        if self._loop is None:
            raise EngineError("the engine is not started")

    # --- calls ------------------------------------------------------------------------------------

    def submit(self, request: GenerateRequest, on_done: OnDone) -> None:
        """Start sampling; never blocks. `on_done(call, outcome)` runs once, on the engine's thread.

        (If the engine does not run, on the caller's, at once.) The outcome is a Sample (`finish` ABORT after
        `abort`, with what was sampled so far) or an EngineError: an unsound request, another version than the
        engine holds, a dead engine, a deadline.
        """
        try:
            if self._loop is None:
                raise EngineError("the engine is not started")
            self._loop.call_soon_threadsafe(self._begin, request, on_done)
        except EngineError as error:
            answer(request.call, error, on_done)
        except RuntimeError:  # The loop is closed.
            answer(request.call, self._failure or EngineError("the engine is shut down"), on_done)

    def abort(self, call: str) -> None:
        """Cut a call; what it has so far comes through its `on_done`. A call that is not in flight is no error."""
        if self._loop is None or self._is_closed or self._calls is None:
            return
        with contextlib.suppress(RuntimeError):  # The loop is closed: everything is answered.
            self._loop.call_soon_threadsafe(self._calls.abort, call)

    def _begin(self, request: GenerateRequest, on_done: OnDone) -> None:
        """On the loop, where versions cannot change between this look and the call's registration."""
        assert self._calls is not None
        if self._failure is None and request.version != self._version:
            held = "none" if self._version is None else self._version
            text = f"call {request.call} wants version {request.version}, engine holds {held}"
            answer(request.call, EngineError(text), on_done)
            return
        self._calls.begin(request, on_done)

    # --- weights and memory -----------------------------------------------------------------------

    def flush(self, deadline: float) -> None:
        """Forget every cached prefix. Raises EngineError when calls are in flight, DeadlineError."""
        self._require_idle("flush")
        self._wait(self._flush(), deadline, "flush of the engine's cache")

    async def _flush(self) -> None:
        """SGLang refuses for a moment after its last answer; the caller's deadline ends this."""
        while not (await self._sglang.tokenizer_manager.flush_cache()).success:
            await asyncio.sleep(POLL_S)

    def release(self, deadline: float) -> int:
        """Give the engine's memory back; afterwards it has no version. Returns the bytes freed on the device.

        On a CPU nothing is freed (SGLang's memory saver is CUDA's), and 0 is returned. Raises EngineError when
        calls are in flight or, on CUDA, when no memory came back; DeadlineError. A released engine stays released.
        """
        self._require_idle("release")
        if self._is_released:
            return 0
        held = self._version, self._fingerprint
        # First, so that no call slips in behind the flush; one that came before it is waited for.
        self._version = self._fingerprint = None
        try:
            self.flush(deadline)
        except DeadlineError:
            self._version, self._fingerprint = held
            raise
        before = free_device_bytes(on_cpu=self._on_cpu)
        self._is_released = True
        # Asserts idleness inside the scheduler and dies otherwise: the flush above has shown it.
        self._wait(update.release_memory(self._sglang), deadline, "release of the engine's memory")
        freed = free_device_bytes(on_cpu=self._on_cpu) - before
        if freed <= 0 and not self._on_cpu:
            raise EngineError(f"release freed {freed} bytes of device memory")
        return freed

    def resume(self, deadline: float) -> None:
        """Take the memory again. The weights are undefined until `load_weights`. May be repeated."""
        self.check()
        if self._is_released:
            self._wait(update.resume_memory(self._sglang), deadline, "resuming the engine's memory")
            self._is_released = False

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int, deadline: float) -> None:
        """Replace all weights (Hugging Face names, whole tensors) and call them `version`.

        Raises EngineError, DeadlineError; the engine then has no version, and a load may be tried again.
        """
        self._require_idle("load weights")
        if self._is_released:
            raise EngineError("cannot load weights: the engine's memory is released")
        self._version = self._fingerprint = None
        whole = list(tensors)
        update.require_whole(whole, self._shapes)
        self._wait(update.replace_weights(self._sglang, whole, version), deadline, f"loading version {version}")
        self._fingerprint = fingerprint_of(whole)
        self._version = version

    def probe(self, deadline: float) -> int:
        """Sample one greedy token to show that the engine answers; returns it. Raises EngineError, DeadlineError."""
        self.check()
        if self._version is None:
            raise EngineError("cannot probe: the engine holds no version")
        self._probes += 1
        request = GenerateRequest(
            call=f"probe-{self._rank}-{self._probes}",
            prompt=np.zeros(1, dtype=np.int32),
            max_new_tokens=1,
            temperature=0.0,
            top_p=1.0,
            seed=0,
            stop_tokens=(),
            version=self._version,
        )
        answered: Future[Sample | EngineError] = Future()
        began = time.monotonic()
        self.submit(request, lambda _, outcome: answered.set_result(outcome))
        try:
            outcome = answered.result(timeout=max(0.0, deadline - began))
        except FutureTimeoutError as error:
            self.abort(request.call)
            raise DeadlineError("probe of the engine", seconds=deadline - began) from error
        if isinstance(outcome, EngineError):
            raise outcome
        if len(outcome.tokens) != 1 or not np.isfinite(outcome.logprobs[0]):
            raise EngineError(f"the engine's probe gave {outcome.tokens.tolist()} with {outcome.logprobs.tolist()}")
        return int(outcome.tokens[0])

    def _require_idle(self, act: str) -> None:
        self.check()
        if self.in_flight:
            raise EngineError(f"cannot {act}: {self.in_flight} calls are in flight")

    def _wait(self, work: Coroutine[Any, Any, None], deadline: float, name: str) -> None:
        """Run `work` on the engine's loop until `deadline`, giving up at once when an engine process dies."""
        assert self._loop is not None
        began = time.monotonic()
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        while True:
            left = deadline - time.monotonic()
            try:
                return future.result(timeout=max(0.0, min(1.0, left)))
            except FutureTimeoutError as error:
                if self._failure is not None:
                    future.cancel()
                    raise self._failure from error
                if left <= 0:
                    future.cancel()
                    raise DeadlineError(name, seconds=deadline - began) from error
