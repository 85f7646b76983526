"""The calls in flight of one engine. Everything here runs on the engine's own loop, except `len`.

Each begun call is answered exactly once: with its sample, with what it had when it was aborted, or with an error.
"""

import asyncio
import logging
from collections.abc import Callable

from gyre.errors import EngineError
from gyre.serve.request import GenerateRequest, SglangEngine, empty_sample, refuse_unsound, sampling_params, to_sample
from gyre.types import FinishReason, Sample

log = logging.getLogger(__name__)

OnDone = Callable[[str, Sample | EngineError], None]
REPEAT_S = 0.05


class _Call:
    """A call in flight and whether its abort was asked for."""

    __slots__ = ("is_aborted", "task")

    def __init__(self) -> None:
        self.is_aborted = False
        self.task: asyncio.Task[None] | None = None


class Calls:
    """See the module. `timeout_s` bounds each call."""

    def __init__(self, engine: SglangEngine, *, timeout_s: float) -> None:
        self._engine, self._timeout_s = engine, timeout_s
        self._calls: dict[str, _Call] = {}
        self._failure: EngineError | None = None

    def __len__(self) -> int:
        return len(self._calls)

    def begin(self, request: GenerateRequest, on_done: OnDone) -> None:
        """Start a call, or answer at once why not."""
        try:
            if self._failure is not None:
                raise self._failure
            refuse_unsound(request)
            if request.call in self._calls:
                raise EngineError(f"call {request.call} is in flight already")
        except EngineError as error:
            answer(request.call, error, on_done)
            return
        call = self._calls[request.call] = _Call()
        call.task = asyncio.get_running_loop().create_task(self._serve(request, call, on_done))
        # A task that is cancelled before its first step never runs a line of its body.
        call.task.add_done_callback(lambda _: self._answer_unserved(request.call, call, on_done))

    def abort(self, name: str) -> None:
        """Cut a call; one that is not in flight is no error."""
        call = self._calls.get(name)
        if call is not None and not call.is_aborted:
            call.is_aborted = True
            asyncio.get_running_loop().create_task(self._abort_until_answered(name, call))

    def fail(self, error: EngineError) -> list["asyncio.Task[None]"]:
        """Answer all calls, and every later one, with `error`; returns the tasks that end thereby."""
        if self._failure is None:
            self._failure = error
        tasks = [call.task for call in self._calls.values() if call.task is not None]
        for task in tasks:
            task.cancel()
        return tasks

    async def _serve(self, request: GenerateRequest, call: _Call, on_done: OnDone) -> None:
        outcome: Sample | EngineError
        try:
            async with asyncio.timeout(self._timeout_s):
                outcome = await self._sample(request, call)
        except TimeoutError:
            self._engine.tokenizer_manager.abort_request(rid=request.call)
            outcome = EngineError(f"call {request.call} ran past {self._timeout_s:g} s")
        except asyncio.CancelledError:
            outcome = self._failure or EngineError(f"call {request.call} was cancelled")
        except EngineError as error:
            outcome = error
        except Exception as error:  # noqa: BLE001 - SGLang raises ValueError and HTTPException for what it refuses
            outcome = EngineError(f"call {request.call} failed: {type(error).__name__}: {error}")
        del self._calls[request.call]
        answer(request.call, outcome, on_done)

    def _answer_unserved(self, name: str, call: _Call, on_done: OnDone) -> None:
        if self._calls.get(name) is call:
            del self._calls[name]
            answer(name, self._failure or EngineError(f"call {name} was cancelled"), on_done)

    async def _sample(self, request: GenerateRequest, call: _Call) -> Sample:
        if call.is_aborted:
            return empty_sample()
        output = await self._engine.async_generate(
            input_ids=request.prompt.tolist(),
            sampling_params=sampling_params(request),
            return_logprob=True,
            rid=request.call,
            # Prefixes of other weights must never be found: cached keys do not name the weights.
            cache_salt=f"v{request.version}",
        )
        sample = to_sample(output, version=request.version)
        if sample.finish is FinishReason.ABORT and not call.is_aborted:
            raise EngineError(f"the engine cut call {request.call}: {output['meta_info']['finish_reason']}")
        return sample

    async def _abort_until_answered(self, name: str, call: _Call) -> None:
        """An abort that overtakes its request on the way to the scheduler is lost there, so it is repeated."""
        manager = self._engine.tokenizer_manager
        while self._calls.get(name) is call:
            state = manager.rid_to_state.get(name)
            if state is not None:
                state.abort_sent = False
                manager.abort_request(rid=name)
            await asyncio.sleep(REPEAT_S)


def answer(call: str, outcome: Sample | EngineError, on_done: OnDone) -> None:
    """Hand an outcome over; the engine's loop must outlive a receiver's mistake."""
    try:
        on_done(call, outcome)
    except Exception:
        log.exception("engine call=%s the receiver of its answer failed", call)
