"""One frozen picture of a run, from which the dashboard is drawn. No behaviour, no clock."""

from dataclasses import dataclass, field

from gyre.schedule.snapshot import ScheduleSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class CellPicture:
    """What the schedule does not know of a cell. `doing` is the main thread's phase."""

    version: int
    requests: int
    doing: str
    doing_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchPicture:
    """A switch that happened: `duty` is what the cell changed to."""

    cell: int
    duty: str
    seconds: float
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSnapshot:
    """The run now. Times are seconds since the front started; rewards lie in [0, 1].

    `phase` is one of "starting", "evaluating before", "training", "evaluating after", "ended". `start_lines`
    says what is there and what is awaited while starting. `eval_done` of `eval_total` rollouts are settled.
    `orders` is what people told the run and is in force; `ended` says why the run is over, "" while it is not.
    """

    name: str
    policy: str
    seed: int
    phase: str
    elapsed_s: float
    eta_s: float | None
    schedule: ScheduleSnapshot
    cells: tuple[CellPicture, ...]
    start_lines: tuple[str, ...] = ()
    rollout_states: dict[str, int] = field(default_factory=dict)
    longest_running_s: float = 0.0
    tokens_sampled: int = 0
    tokens_per_s: float = 0.0
    rewards: tuple[float, ...] = ()
    eval_before: float | None = None
    eval_after: float | None = None
    eval_done: int = 0
    eval_total: int = 0
    max_logprob_gap: float = 0.0
    clip_share: float = 0.0
    staleness_mean: float = 0.0
    waiting_turns: int = 0
    moved_live_requests: int = 0
    harness_errors: int = 0
    switches: tuple[SwitchPicture, ...] = ()
    messages: tuple[str, ...] = ()
    orders: tuple[str, ...] = ()
    ended: str = ""
