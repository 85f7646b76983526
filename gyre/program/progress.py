"""How far the run is, for the screen: start-up, figures of steps, switches, messages. Decides nothing."""

from collections import deque
from dataclasses import replace

from gyre.config.schema import Settings
from gyre.program.conductor import Conductor, Switch
from gyre.program.rollouts import RolloutBook
from gyre.program.routes import Router
from gyre.store.orders import Order
from gyre.types import Duty
from gyre.watch.live import LiveFile
from gyre.watch.screen import Screen
from gyre.watch.snapshot import CellPicture, RunSnapshot, SwitchPicture
from gyre.wire.messages import EngineStarted, HandsUp, Heartbeat, MicroStepFinished, RankUp, StepApplied

RATE_WINDOW_S = 20.0


class Progress:
    """Collects what `RunSnapshot` shows and feeds the screen and the folder's live picture."""

    def __init__(self, *, settings: Settings, screen: Screen, live: LiveFile) -> None:
        self._settings, self._screen, self._live = settings, screen, live
        self._shown: RunSnapshot | None = None
        self.notes: tuple[str, ...] = ()
        self._num_cells = settings.placement.num_cells
        self.serving: set[int] = set()
        self.begun = False
        self.phase = "starting"
        self.moved = 0
        self.clipped_rollouts = 0
        self._trained_rollouts = 0
        self._ranks: dict[int, RankUp] = {}
        self._engines: dict[int, float] = {}
        self._hands: list[HandsUp] = []
        self._doing: dict[str, Heartbeat] = {}
        self._heard: dict[str, float] = {}
        self._rewards: list[float] = []
        self._step_times: deque[float] = deque(maxlen=8)
        self._evaluations: dict[str, float] = {}
        self._eval_done = 0
        self._gap = 0.0
        self._clip_share = 0.0
        self._switches: deque[SwitchPicture] = deque(maxlen=4)
        self._messages: deque[str] = deque(maxlen=6)
        self._tokens: deque[tuple[float, int]] = deque()
        self.staleness_mean = 0.0

    # --- what happened ----------------------------------------------------------------------------

    def rank_up(self, message: RankUp) -> None:
        """A rank said hello."""
        self._ranks[message.rank] = message

    def hands_up(self, message: HandsUp) -> None:
        """A node's hands said hello."""
        self._hands.append(message)

    def engine_started(self, message: EngineStarted) -> None:
        """An engine is up."""
        self._engines[message.cell] = message.seconds

    def heard(self, source: str, message: Heartbeat, now: float) -> None:
        """A sign of life."""
        self._doing[source], self._heard[source] = message, now

    def begin(self, now: float) -> None:
        """Start-up is over."""
        self.begun = True
        self.phase = "training"

    def evaluating(self, name: str) -> None:
        """An evaluation begins."""
        self.phase, self._eval_done = f"evaluating {name}", 0

    def eval_settled(self) -> None:
        """One more rollout of the evaluation is settled."""
        self._eval_done += 1

    def evaluated(self, name: str, mean: float) -> None:
        """An evaluation is complete."""
        self._evaluations[name] = mean
        self.phase = "training" if name == "before" else "ended"

    def micro_step(self, message: MicroStepFinished) -> None:
        """A micro-step is accumulated."""
        self._gap = max(self._gap, message.max_logprob_gap)
        self.clipped_rollouts += message.clipped_rollouts
        self._trained_rollouts += len(message.ratios)

    def step_applied(self, message: StepApplied, rewards: list[float], now: float) -> None:
        """A step is trained."""
        self._rewards.append(sum(rewards) / len(rewards) if rewards else 0.0)
        self._clip_share = self.clipped_rollouts / self._trained_rollouts if self._trained_rollouts else 0.0
        self.clipped_rollouts = self._trained_rollouts = 0
        self._step_times.append(now)

    def switched(self, switch: Switch, now: float) -> None:
        """A cell changed its duty."""
        self._switches.append(SwitchPicture(cell=switch.cell, duty=switch.duty.value, seconds=switch.seconds, at_s=now))

    def trouble(self, level: str, text: str) -> None:
        """Something that a person should read."""
        self._messages.append(f"{level}: {text}")

    def overdue_start(self, now: float) -> str | None:
        """Why the start takes too long, if it does."""
        limit = self._settings.engine.start_timeout_s + self._settings.placement.data_timeout_s
        if self.begun or now < limit:
            return None
        return f"start did not end within {limit:g} s; " + "; ".join(self._start_lines())

    # --- what is shown ----------------------------------------------------------------------------

    def show(self, now: float, conductor: Conductor, router: Router, book: RolloutBook) -> None:
        """Give the screen a new picture."""
        self._shown = self._snapshot(now, conductor, router, book)
        self._screen.update(self._shown)
        self._live.update(self._shown)

    def orders(self) -> list[Order]:
        """What people told the run since the last time."""
        return self._live.orders()

    def finish(self, text: str, *, reason: str) -> None:
        """The last words, and why they are the last."""
        if self._shown is not None:
            last = replace(self._shown, phase="ended", ended=reason, eta_s=None, messages=tuple(self._messages))
            self._screen.update(last)
            self._live.finish(last)
        self._screen.finish(text)

    def _snapshot(self, now: float, conductor: Conductor, router: Router, book: RolloutBook) -> RunSnapshot:
        settings = self._settings
        return RunSnapshot(
            name=settings.run.name,
            policy=settings.schedule.policy.value,
            seed=settings.run.seed,
            phase=self.phase,
            elapsed_s=now,
            eta_s=self._eta(now),
            schedule=conductor.scheduler.snapshot(),
            cells=tuple(self._cell(cell, now, conductor, router) for cell in range(self._num_cells)),
            start_lines=() if self.begun else tuple(self._start_lines()),
            rollout_states=book.states(),
            longest_running_s=book.longest_running_s(now),
            tokens_sampled=book.tokens_sampled,
            tokens_per_s=self._rate(now, book.tokens_sampled),
            rewards=tuple(self._rewards),
            eval_before=self._evaluations.get("before"),
            eval_after=self._evaluations.get("after"),
            eval_done=self._eval_done,
            eval_total=settings.tasks.eval_rollouts,
            max_logprob_gap=self._gap,
            clip_share=self._clip_share,
            staleness_mean=self.staleness_mean,
            waiting_turns=router.num_waiting,
            moved_live_requests=self.moved,
            harness_errors=book.harness_errors,
            switches=tuple(self._switches),
            messages=tuple(self._messages),
            orders=self.notes,
        )

    def _cell(self, cell: int, now: float, conductor: Conductor, router: Router) -> CellPicture:
        leader = cell * self._settings.ranks_per_cell
        beat = self._doing.get(f"rank/{leader}")
        return CellPicture(
            version=conductor.version if conductor.duties[cell] is Duty.ROLLOUT else -1,
            requests=router.running(cell),
            doing=beat.doing if beat else "starting",
            doing_s=beat.since_s + now - self._heard[f"rank/{leader}"] if beat else now,
        )

    def _start_lines(self) -> list[str]:
        total = self._settings.num_ranks
        missing = [str(rank) for rank in range(total) if rank not in self._ranks]
        ranks = f"ranks {len(self._ranks)}/{total}" + (f", missing {', '.join(missing)}" if missing else "")
        hands = ", ".join(f"{one.host}" for one in self._hands)
        lines = [ranks, f"hands {hands or 'missing'}"]
        for cell in range(self._num_cells):
            beat = self._doing.get(f"rank/{cell * self._settings.ranks_per_cell}")
            if cell in self.serving:
                what = "serving"
            elif cell in self._engines:
                what = f"engine up after {self._engines[cell]:.0f} s"
            else:
                what = beat.doing if beat else "starting"
            lines.append(f"cell {cell}: {what}")
        return lines

    def _rate(self, now: float, tokens: int) -> float:
        self._tokens.append((now, tokens))
        while self._tokens[0][0] < now - RATE_WINDOW_S:
            self._tokens.popleft()
        began, before = self._tokens[0]
        return (tokens - before) / (now - began) if now > began else 0.0

    def _eta(self, now: float) -> float | None:
        left = self._settings.run.steps - len(self._rewards)
        if len(self._step_times) < 2 or left <= 0:
            return None
        per_step = (self._step_times[-1] - self._step_times[0]) / (len(self._step_times) - 1)
        return max(0.0, left * per_step - (now - self._step_times[-1]))
