"""The hands of a node: one asyncio process that runs agents in sandboxes, holds their connections and grades.

It dials the front, does what it is told and tells what happened; it decides nothing. It ends by itself, with
every sandbox and harness, on Stop, on SIGTERM, and when the front has been silent for [stop].alone_s. Nothing
of it may stay behind: the sandbox keeper ends with this process whatever kills it, and what even that leaves
is reaped by the next start.

Run as `python -m gyre.program.hands --front ADDRESS --config FILE --node N --run NAME [--folder ROOT]`.
"""

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

from gyre.config.choices import HarnessName
from gyre.config.load import load_settings
from gyre.config.schema import Settings
from gyre.errors import DeadlineError, GyreError, RunError
from gyre.harness.cli import CliHarness, ModelWindow
from gyre.harness.harness import Harness
from gyre.harness.loop import LoopHarness
from gyre.harness.programs import PROGRAMS
from gyre.harness.zygote import MiniSweAgent
from gyre.program.attempt import Attempt, TaskShelf, Workshop
from gyre.sandbox.lease import reap_stale
from gyre.sandbox.sandbox import Sandboxes
from gyre.wire.link import AsyncPeer
from gyre.wire.messages import (
    HandsFailed,
    HandsUp,
    Heartbeat,
    Message,
    ModelAnswer,
    ModelCall,
    StartAgent,
    Stop,
    StopAgent,
)

log = logging.getLogger(__name__)

BEAT_S = 1.0
END_S = 4.0
LAST_WORD_S = 0.2
"""Time for the sender to hand over what is queued when the hands end by themselves."""


class Hands:
    """The process: link, attempts, heartbeat."""

    def __init__(self, settings: Settings, *, front: str, node: int, run: str, root: Path) -> None:
        self._settings, self._node = settings, node
        self._root = root
        self._peer = AsyncPeer(front, identity=f"hands/{node}", silence_s=settings.stop.alone_s)
        self._sandboxes = Sandboxes(run=run, root=root)
        self._outbox: asyncio.Queue[Message] = asyncio.Queue()
        self._answers: dict[str, asyncio.Future[ModelAnswer]] = {}
        self._attempts: dict[str, asyncio.Task[None]] = {}
        self._stopped = asyncio.Event()
        self._failure: GyreError | None = None
        self._harness: Harness | None = None
        self._shop: Workshop | None = None
        self._early: list[StartAgent] = []

    async def run(self) -> None:
        """Until told to stop or left alone."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop, signal.Signals(number).name)
        reaped = reap_stale(self._root)
        if reaped:
            log.warning("sandboxes=stale reaped=%d", reaped)
        hello = HandsUp(
            node=self._node, host=socket.gethostname(), pid=os.getpid(), abilities=self._sandboxes.abilities()
        )
        self.post(hello)
        workers = [asyncio.create_task(work) for work in (self._send(), self._beat(), self._receive(), self._begin())]
        await self._stopped.wait()
        try:
            async with asyncio.timeout(END_S):
                await self._end(workers)
        except TimeoutError:
            log.error("end=late seconds=%g", END_S)
        if self._failure is not None:
            raise self._failure

    async def _begin(self) -> None:
        """Make the harness ready; rollouts that were ordered meanwhile wait for it. Without it the hands end."""
        ready = asyncio.get_running_loop().create_future()
        try:
            self._harness = _make_harness(self._settings)
            self._shop = self._make_shop(self._harness, ready)
            while self._early:
                self._start(self._early.pop(0))
            await self._harness.start()
        except (GyreError, OSError) as error:
            self._failure = error if isinstance(error, GyreError) else RunError(f"harness: {error}")
            self.post(HandsFailed(node=self._node, reason=str(error)))
            self.stop(f"harness failed: {error}")
        else:
            ready.set_result(None)

    def _make_shop(self, harness: Harness, ready: asyncio.Future[None]) -> Workshop:
        chosen = self._settings.rollout
        return Workshop(
            settings=self._settings,
            sandboxes=self._sandboxes,
            harness=harness,
            harness_ready=ready,
            shelf=TaskShelf(),
            starts=asyncio.Semaphore(chosen.concurrent_starts),
            gradings=asyncio.Semaphore(chosen.concurrent_gradings),
            post=self.post,
            ask=self._ask,
        )

    def stop(self, reason: str) -> None:
        """End in order."""
        log.info("hands=stopping reason=%s", reason)
        self._stopped.set()

    def post(self, message: Message) -> None:
        """Queue a message for the front."""
        self._outbox.put_nowait(message)

    async def _end(self, workers: list[asyncio.Task[None]]) -> None:
        if self._failure is not None:
            await asyncio.sleep(LAST_WORD_S)
        for task in (*workers, *self._attempts.values()):
            task.cancel()
        # The keeper first: with it every sandbox dies at once, and the attempts' own closing is short.
        closing = [self._sandboxes.close(END_S / 2)]
        closing += [self._harness.close(END_S / 2)] if self._harness is not None else []
        await asyncio.gather(*closing)
        await asyncio.gather(*workers, *self._attempts.values(), return_exceptions=True)
        self._peer.close()

    async def _send(self) -> None:
        while True:
            await self._peer.send(await self._outbox.get())

    async def _beat(self) -> None:
        began = time.monotonic()
        while True:
            doing = f"{len(self._attempts)} rollouts"
            self.post(Heartbeat(source=f"hands/{self._node}", doing=doing, since_s=time.monotonic() - began))
            await asyncio.sleep(BEAT_S)

    async def _receive(self) -> None:
        try:
            while True:
                self._handle(await self._peer.recv())
        except DeadlineError as error:
            self.stop(str(error))

    def _handle(self, message: Message) -> None:
        match message:
            case StartAgent():
                self._start(message)
            case ModelAnswer(call=call):
                answer = self._answers.get(call)
                if answer is not None and not answer.done():
                    answer.set_result(message)
            case StopAgent(rollout=rollout):
                if task := self._attempts.get(rollout):
                    task.cancel()
            case Stop(reason=reason):
                self.stop(reason)
            case Heartbeat():
                pass
            case _:
                log.warning("message=%s unexpected", type(message).__name__)

    def _start(self, order: StartAgent) -> None:
        if order.rollout in self._attempts:
            log.warning("rollout=%s started=already", order.rollout)
            return
        if self._shop is None:
            self._early.append(order)
            return
        task = asyncio.create_task(self._attempt(Attempt(order, self._shop), order.rollout))
        self._attempts[order.rollout] = task
        task.add_done_callback(lambda _: self._attempts.pop(order.rollout, None))

    async def _attempt(self, attempt: Attempt, rollout: str) -> None:
        """An outer shell: one rollout's unforeseen failure is that rollout's, and is told."""
        try:
            await attempt.run()
        except Exception as error:
            log.exception("rollout=%s failed", rollout)
            attempt.tell_failure(repr(error))

    async def _ask(self, call: ModelCall) -> ModelAnswer:
        """Send a model call to the front and wait for its answer; the closing of the connection ends the wait."""
        future = self._answers[call.call] = asyncio.get_running_loop().create_future()
        self.post(call)
        try:
            return await future
        finally:
            del self._answers[call.call]


def _make_harness(settings: Settings) -> Harness:
    match settings.rollout.harness:
        case HarnessName.MINI_SWE_AGENT:
            return MiniSweAgent(config=settings.rollout.harness_config)
        case HarnessName.LOOP:
            return LoopHarness()
        case name:
            window = ModelWindow(
                context_tokens=settings.model.max_context_tokens, turn_tokens=settings.sampling.max_turn_tokens
            )
            return CliHarness(PROGRAMS[name.value], window)


async def serve(settings: Settings, *, front: str, node: int, run: str, root: Path) -> None:
    """Make the hands inside the event loop and run them."""
    await Hands(settings, front=front, node=node, run=run, root=root).run()


def main() -> int:
    """Command line of `spawn.start_hands`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--front", required=True)
    parser.add_argument("--config", required=True, type=Path)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--node", required=True, type=int)
    parser.add_argument("--run", required=True)
    parser.add_argument("--folder", type=Path, default=None)
    args = parser.parse_args()
    settings = load_settings(args.config, overrides=args.set)
    logging.basicConfig(
        level=settings.watch.log_level.value.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    root = args.folder or settings.sandbox.folder or Path(tempfile.gettempdir())
    try:
        asyncio.run(serve(settings, front=args.front, node=args.node, run=args.run, root=root))
    except GyreError as error:
        log.error("hands=failed error=%s", error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
