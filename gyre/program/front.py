"""The front: what "rank 0 holds" means. Trees, scheduler, dispatch, journal and screen, in one asyncio process.

It is started by rank 0 before any device is touched, runs detached, listens for ranks and hands, and ends the
run: when all steps are trained, when it is told to stop, or when something that the run needs has died. One
task receives messages, one keeps time; all state changes happen between awaits, so there is no lock.
"""

import asyncio
import logging
import socket
import time
from pathlib import Path

from gyre.config.schema import Settings
from gyre.gateway.render import Renderer
from gyre.gateway.template import ChatTemplate
from gyre.program.chronicle import Chronicle
from gyre.program.conductor import Conductor, Hooks
from gyre.program.groups import GroupLedger
from gyre.program.orders import FINISHED, OrderDesk, OrderHooks, is_orderly
from gyre.program.progress import Progress
from gyre.program.rollouts import Rollout, RolloutBook, RolloutHooks
from gyre.program.routes import Router
from gyre.program.steps import StepQueue
from gyre.program.watchdog import ProcessWatch
from gyre.schedule.events import (
    CellLost,
    DispatchHeld,
    DispatchReleased,
    Evaluate,
    GroupReady,
    MicroStepClaimed,
    MicroStepDone,
    RolloutStarted,
    RolloutTerminated,
    Tick,
)
from gyre.schedule.policy import SchedulerSettings
from gyre.schedule.scheduler import ResumePoint, Scheduler
from gyre.store import records
from gyre.store.store import RunStore
from gyre.store.summary import render_summary, write_summary
from gyre.tasks.harbor import load_tasks
from gyre.watch.live import LiveFile
from gyre.watch.screen import Screen
from gyre.wire.link import FrontLink
from gyre.wire.messages import (
    AgentEnded,
    AgentStarted,
    Claim,
    EngineReleased,
    EngineServing,
    EngineStarted,
    Generated,
    Graded,
    HandsFailed,
    HandsUp,
    Heartbeat,
    Message,
    MicroStepFinished,
    ModelCall,
    ModelCallGone,
    RankFailed,
    RankUp,
    StepApplied,
    StepJoined,
    Stop,
    StopRequested,
    WeightsExposed,
)

log = logging.getLogger(__name__)


class Front:
    """One run, from the first rank to the summary."""

    def __init__(
        self, *, settings: Settings, folder: Path, link: FrontLink, store: RunStore, resumed_version: int
    ) -> None:
        self._settings, self._folder, self._link, self._store = settings, folder, link, store
        self._began = time.monotonic()
        self._resumed_version = resumed_version
        self._ended = asyncio.Event()
        self.reason = ""
        self._watch = ProcessWatch(self._process_died)
        self._ranks: dict[str, RankUp] = {}
        self._leaders: dict[int, str] = {}
        self._hands: list[str] = []
        self.progress = Progress(settings=settings, screen=Screen(settings.watch), live=LiveFile(folder))
        self._chronicle = Chronicle(store=store, progress=self.progress, clock=self._now)
        self._build()

    def _build(self) -> None:
        settings = self._settings
        self._queue = StepQueue(send=self._post_cell, on_claimed=self._claimed)
        self._router = Router(
            send=self._post_cell,
            # Looked up when called: book and conductor are built after the router that they use.
            on_done=lambda turn, sample: self._book.turn_done(turn, sample),
            on_failed=lambda turn, error: self._book.turn_failed(turn, error),
            on_idle=lambda cell: self._conductor.cell_idle(cell),
            on_moved=lambda moved: self._chronicle.moved(moved),
            clock=self._now,
        )
        self._book = RolloutBook(
            settings=settings,
            renderer=Renderer(ChatTemplate.load(settings.model.path)),
            hooks=RolloutHooks(
                to_hands=lambda message: self._link.post(self._hands[0], message),
                record=self._record,
                submit=self._router.submit,
                forget=self._router.forget,
                started=lambda rollout: self._conductor.feed(RolloutStarted(rollout=rollout)),
                terminated=lambda rollout: self._conductor.feed(RolloutTerminated(rollout=rollout)),
                settled=self._settled,
                clock=self._now,
            ),
        )
        self._ledger = GroupLedger(
            settings=settings,
            book=self._book,
            queue=self._queue,
            train_tasks=_task_folders(settings.tasks.train),
            held_out_tasks=_task_folders(settings.tasks.held_out) if settings.tasks.held_out else [],
            record=self._record,
            on_ready=lambda group, count: self._conductor.feed(GroupReady(group=group, num_micro_steps=count)),
            on_evaluated=self._evaluated,
        )
        self._conductor = Conductor(
            settings=settings,
            scheduler=Scheduler(
                SchedulerSettings.of(settings, is_held=True), ResumePoint(version=self._resumed_version)
            ),
            router=self._router,
            queue=self._queue,
            hooks=Hooks(
                post=self._post_cell,
                journal=self._chronicle.journal,
                dispatch=self._ledger.dispatch,
                admit=lambda rollout, cell: self._book.admit(rollout),
                switched=self._chronicle.switched,
                finished=self._all_trained,
                aborted=self.end,
                clock=self._now,
            ),
        )
        self._desk = OrderDesk(self._order_hooks())

    def _order_hooks(self) -> OrderHooks:
        return OrderHooks(
            hold=lambda: self._conductor.feed(DispatchHeld()),
            release=lambda: self._conductor.feed(DispatchReleased()),
            take_checkpoint=self._queue.take_checkpoint,
            end=self.end,
        )

    # --- the run ----------------------------------------------------------------------------------

    async def run(self) -> int:
        """Until the run is over; returns the exit code."""
        tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._keep_time())]
        ended = asyncio.create_task(self._ended.wait())
        done, _ = await asyncio.wait([*tasks, ended], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if task is not ended and task.exception() is not None:
                log.error("front failed", exc_info=task.exception())
                self.end(f"front: {task.exception()}")
        await self._stop_everybody(tasks)
        for task in [*tasks, ended]:
            task.cancel()
        self._record(records.RunEnded(reason=self.reason, wall_s=self._now()))
        self._store.sync()
        self.progress.finish(render_summary(write_summary(self._folder)), reason=self.reason)
        return 0 if is_orderly(self.reason) else 1

    def end(self, reason: str) -> None:
        """The run is over; the first reason counts."""
        if not self.reason:
            self.reason = reason
            log.info("end reason=%s", reason)
            if not is_orderly(reason):
                self._chronicle.trouble("error", f"the run ends: {reason}")
            self._ended.set()

    def watch_agent(self, pid: int) -> None:
        """End the run when the process that started the ranks is gone."""
        self._watch.watch("the torchrun agent", pid)

    async def _stop_everybody(self, tasks: list[asyncio.Task]) -> None:
        """Tell ranks and hands, and give them the grace time to go."""
        until = time.monotonic() + self._settings.stop.grace_s
        for identity in [*self._ranks, *self._hands]:
            self._link.post(identity, Stop(reason=self.reason))
        self._watch.forget("the torchrun agent")
        while self._watch.alive and time.monotonic() < until and not tasks[0].done():
            await asyncio.sleep(0.05)
        if self._watch.alive:
            log.warning("still alive after grace_s=%g: %s", self._settings.stop.grace_s, self._watch.alive)
        self._watch.close()

    async def _receive(self) -> None:
        while True:
            identity, message = await self._link.recv()
            self._handle(identity, message)
            self._conductor.pump(self._now())

    async def _keep_time(self) -> None:
        beat = Heartbeat(source="front", doing="running", since_s=0.0)
        next_beat = 0.0
        while True:
            await asyncio.sleep(min(0.25, self._settings.watch.refresh_s))
            now = self._now()
            self._conductor.pump(now)
            if now >= next_beat:
                next_beat = now + 1.0
                for identity in [*self._ranks, *self._hands]:
                    self._link.post(identity, beat)
                # Finished rollouts survive a lost node from here on; one sync a second bounds what it costs.
                self._store.sync()
                self._conductor.feed(Tick())
                self._conductor.pump(now)
                late = self._conductor.overdue(now) or self.progress.overdue_start(now)
                if late:
                    self.end(late)
            self.progress.show(now, self._conductor, self._router, self._book)
            self._take_orders()

    def _handle(self, identity: str, message: Message) -> None:
        match message:
            case Generated():
                self._router.receive(message)
            case ModelCall():
                self._book.model_call(message)
            case ModelCallGone():
                self._book.model_call_gone(message)
            case Heartbeat():
                self.progress.heard(identity, message, self._now())
            case AgentStarted():
                self._book.agent_started(message)
            case AgentEnded():
                self._book.agent_ended(message)
            case Graded():
                self._book.graded(message)
            case Claim():
                self._queue.claim(message, self._now())
            case MicroStepFinished():
                self._micro_step_finished(message)
            case StepApplied():
                self._step_applied(message)
            case StepJoined():
                self._conductor.step_joined(message)
            case EngineReleased():
                self._conductor.engine_released(message)
            case EngineServing():
                self._engine_serving(message)
            case EngineStarted():
                self.progress.engine_started(message)
                self._conductor.engine_started(message)
            case WeightsExposed():
                self._conductor.weights_exposed(message)
            case RankUp():
                self._rank_up(identity, message)
            case HandsUp():
                self._hands_up(identity, message)
            case HandsFailed():
                self.end(f"hands of node {message.node} failed: {message.reason}")
            case RankFailed():
                self.end(f"rank {message.rank} failed: {message.reason}")
            case StopRequested():
                self.end(f"stopped by {message.reason}")
            case _:
                log.warning("unexpected peer=%s message=%s", identity, type(message).__name__)

    def _take_orders(self) -> None:
        for order in self.progress.orders():
            log.info("order=%s", order)
            self._chronicle.order(order)
            self._desk.take(order, is_training=self.progress.phase == "training")
        self.progress.notes = self._desk.notes()

    # --- who is there -----------------------------------------------------------------------------

    def _rank_up(self, identity: str, message: RankUp) -> None:
        self._ranks[identity] = message
        if message.is_leader:
            self._leaders[message.cell] = identity
        self.progress.rank_up(message)
        if message.host == socket.gethostname():
            self._watch.watch(identity, message.pid)

    def _hands_up(self, identity: str, message: HandsUp) -> None:
        self._hands.append(identity)
        self.progress.hands_up(message)
        if message.host == socket.gethostname():
            self._watch.watch(identity, message.pid)
        self._begin_if_ready()

    def _process_died(self, name: str) -> None:
        if self.reason:
            return
        rank = self._ranks.get(name)
        if rank is None:
            self.end(f"{name} died")
            return
        reason = f"rank {rank.rank} (cell {rank.cell}, host {rank.host}, pid {rank.pid}) died"
        self._conductor.feed(CellLost(cell=rank.cell, reason=reason))
        self._conductor.pump(self._now())
        self.end(reason)

    def _engine_serving(self, message: EngineServing) -> None:
        self._conductor.engine_serving(message)
        self.progress.serving.add(message.cell)
        self._chronicle.serving(message.cell, message.version)
        self._begin_if_ready()

    def _begin_if_ready(self) -> None:
        """Everybody is there: evaluate, then dispatch. Happens once."""
        all_serve = len(self.progress.serving) == self._settings.placement.num_cells
        if self.progress.begun or not all_serve or not self._hands:
            return
        self.progress.begin(self._now())
        if self._settings.tasks.eval_rollouts and self._resumed_version == 0:
            self._evaluate("before")
        else:
            self._desk.open_dispatch()

    # --- evaluation and steps ---------------------------------------------------------------------

    def _evaluate(self, name: str) -> None:
        self.progress.evaluating(name)
        self._conductor.feed(Evaluate(rollouts=self._ledger.evaluate(name)))

    def _evaluated(self, name: str, mean: float) -> None:
        self.progress.evaluated(name, mean)
        if name == "before":
            self._desk.open_dispatch()
        else:
            self.end(FINISHED)

    def _settled(self, one: Rollout) -> None:
        if one.group is None:
            self.progress.eval_settled()
        self._ledger.settled(one)

    def _all_trained(self) -> None:
        if self._settings.tasks.eval_rollouts:
            self._evaluate("after")
        else:
            self.end(FINISHED)

    def _claimed(self, cell: int, step: int, index: int) -> None:
        self._conductor.feed(MicroStepClaimed(cell=cell, step=step, index=index))

    def _micro_step_finished(self, message: MicroStepFinished) -> None:
        self._chronicle.micro_step(message)
        self._conductor.feed(MicroStepDone(cell=message.cell, step=message.step, index=message.index))

    def _step_applied(self, message: StepApplied) -> None:
        rewards = self._ledger.step_rewards(message.step)
        self._chronicle.step(message, rewards, staleness=self._ledger.step_staleness(message.step))
        self._store.sync()
        self._conductor.step_applied(message)
        self._desk.step_trained(message.version, message.checkpoint)

    # --- small things -----------------------------------------------------------------------------

    def _record(self, record: records.Record) -> None:
        self._store.record(record)

    def _post_cell(self, cell: int, message: Message) -> None:
        self._link.post(self._leaders[cell], message)

    def _now(self) -> float:
        return time.monotonic() - self._began


def _task_folders(folder: Path) -> list[Path]:
    return [task.folder for task in load_tasks(folder).tasks]
