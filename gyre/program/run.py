"""The life of a rank, from good settings to exit: this is where a run is composed.

Rank 0 starts the front before any device is touched; every rank joins the world, agrees the placement,
builds its cell's replica and, if it leads the cell, its engine; then it acts its cell's duty until told to
stop. Everything heavy is imported here, inside functions, after the settings are known to be good.
"""

import logging
import os
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gyre.config.schema import Settings
from gyre.errors import ConfigError, GyreError
from gyre.program.control import ControlThread, Phase, Pulse
from gyre.program.orders import FINISHED, is_orderly
from gyre.program.signals import StopSignals
from gyre.program.spawn import start_front, start_hands
from gyre.wire.link import ThreadPeer
from gyre.wire.messages import EngineStarted, RankFailed, RankUp, StopRequested

if TYPE_CHECKING:
    from gyre.fabric.weights import WeightShelf
    from gyre.fabric.world import World
    from gyre.schedule.placement import Placement
    from gyre.serve.engine import Engine

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How this rank was started: the command line and torchrun's environment."""

    config: Path
    folder: Path
    overrides: tuple[str, ...]
    resume: bool
    is_restart: bool
    rank: int
    local_rank: int
    world_size: int
    agent_pid: int

    @property
    def config_arguments(self) -> list[str]:
        """The configuration as arguments for the front and the hands."""
        overrides = [word for override in self.overrides for word in ("--set", override)]
        return ["--config", str(self.config), *overrides]

    @classmethod
    def from_environment(cls, *, config: Path, overrides: tuple[str, ...], folder: Path, resume: bool) -> "Launch":
        """Read torchrun's variables; without torchrun this is a world of one."""
        under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
            os.environ.setdefault(name, value)
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        if "MASTER_PORT" not in os.environ:
            os.environ["MASTER_PORT"] = str(_free_port())
        restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
        return cls(
            config=config,
            overrides=overrides,
            folder=folder,
            resume=resume or restarted,
            is_restart=restarted,
            rank=int(os.environ["RANK"]),
            local_rank=int(os.environ["LOCAL_RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            agent_pid=os.getppid() if under_torchrun else os.getpid(),
        )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run(settings: Settings, launch: Launch) -> int:
    """Run this rank to its end; returns the exit code."""
    wanted = settings.placement.num_cells * settings.ranks_per_cell
    if launch.world_size != wanted:
        raise ConfigError(
            "placement.num_cells",
            wanted=f"cells x ranks per cell ({wanted}) equal to the number of ranks",
            given=f"{launch.world_size} ranks",
            fix=f"start with torchrun --nproc-per-node {wanted} on one node",
        )
    address = _start_front(launch) if launch.rank == 0 else None
    rank = Rank(settings, launch)
    return rank.live(address)


def _start_front(launch: Launch) -> str:
    checkpoint = latest_checkpoint(launch.folder / "checkpoints") if launch.resume else None
    return start_front(
        config=launch.config_arguments,
        folder=launch.folder,
        resumed_version=step_of(checkpoint) if checkpoint else 0,
        agent_pid=launch.agent_pid,
    )


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint of a run (a checkpoint folder appears only when it is whole)."""
    found = sorted(folder.glob("step-*"))
    return found[-1] if found else None


def step_of(checkpoint: Path) -> int:
    """How many steps a checkpoint holds, by its name."""
    return int(checkpoint.name.removeprefix("step-"))


class Rank:
    """One rank: joins, builds, acts, ends."""

    def __init__(self, settings: Settings, launch: Launch) -> None:
        self._settings, self._launch = settings, launch
        self._phase = Phase("starting")
        self._peer: ThreadPeer | None = None
        self._pulse: Pulse | None = None
        self._control: ControlThread | None = None
        self._engine: Engine | None = None
        self._shelf: WeightShelf | None = None
        self._signals = StopSignals(
            grace_s=settings.stop.grace_s, on_stop=self._stop_requested, before_exit=self._leave_hard
        )

    def live(self, front_address: str | None) -> int:
        """Returns the exit code."""
        try:
            reason = self._act(front_address)
        except GyreError as error:
            log.error("rank=%d phase=%s error=%s", self._launch.rank, self._phase.read()[0], error)
            self._report_failure(str(error))
            return error.exit_code
        except Exception as error:  # The outer shell: the front must learn why, whatever it was.
            log.exception("rank=%d phase=%s", self._launch.rank, self._phase.read()[0])
            self._report_failure(f"{type(error).__name__}: {error}")
            return 1
        finally:
            self._end()
        log.info("rank=%d ends reason=%s", self._launch.rank, reason)
        return 0 if is_orderly(reason) else 1

    def _act(self, front_address: str | None) -> str:
        from gyre.fabric.world import World

        self._phase.enter("joining the world")
        world = World.join(self._settings, self._launch.local_rank)
        address = world.share_text("front", front_address)
        placement = self._place(world)
        cell = placement.cell_of(world.rank)
        self._peer = ThreadPeer(address, identity=f"rank/{world.rank}", silence_s=self._settings.stop.alone_s)
        self._pulse = Pulse(peer=self._peer, rank=world.rank, phase=self._phase)
        self._peer.send(
            RankUp(
                rank=world.rank,
                cell=cell.index,
                is_leader=cell.leader == world.rank,
                host=socket.gethostname(),
                pid=os.getpid(),
            )
        )
        if self._launch.local_rank == 0:
            start_hands(
                address=address, config=self._launch.config_arguments, folder=self._launch.folder, node=world.node
            )
        return self._build_and_serve(world, placement)

    def _place(self, world: "World") -> "Placement":
        from gyre.schedule.placement import place

        self._phase.enter("agreeing the placement")
        return world.agree_placement(lambda facts: place(facts, self._settings))

    def _build_and_serve(self, world: "World", placement: "Placement") -> str:
        from gyre.fabric.weights import WeightShelf
        from gyre.program.build import build_control, build_training
        from gyre.program.leader import Leader, follow
        from gyre.program.training import CellRelay
        from gyre.serve.engine import Engine

        cell = placement.cell_of(world.rank)
        assert self._peer is not None
        self._phase.enter("building the groups")
        groups = world.build_groups(placement)
        is_leader = cell.leader == world.rank
        relay = CellRelay(groups.data, is_leader=is_leader)
        self._phase.enter("building the replica")
        training, exposed = build_training(self._settings, self._launch, groups, cell.index)
        if not is_leader:
            self._control = build_control(self._peer, world, cell.index, groups=None, engine=None)
            follow(training, relay)
            return FINISHED
        self._phase.enter("starting the engine")
        began = time.monotonic()
        self._engine = Engine(self._settings, rank=world.rank)
        self._engine.start(began + self._settings.engine.start_timeout_s)
        self._signals.install()
        self._control = build_control(self._peer, world, cell.index, groups=groups, engine=self._engine)
        self._shelf = WeightShelf(self._launch.folder.name) if training.is_core else None
        leader = Leader(
            cell=cell.index,
            settings=self._settings,
            peer=self._peer,
            control=self._control,
            engine=self._engine,
            training=training,
            relay=relay,
            shelf=self._shelf,
            phase=self._phase,
        )
        if training.is_core:
            self._peer.send(leader.expose(exposed.version, exposed.tensors))
        self._peer.send(EngineStarted(cell=cell.index, seconds=time.monotonic() - began))
        return leader.run()

    def _stop_requested(self, name: str) -> None:
        if self._peer is None:
            # Nobody to tell yet, and nothing was built that would need an orderly end.
            os._exit(1)
        self._peer.send(StopRequested(rank=self._launch.rank, reason=name))

    def _leave_hard(self) -> None:
        """Before an exit without an end in order: what outlives a process must not."""
        if self._engine is not None:
            self._engine.kill()
        if self._shelf is not None:
            self._shelf.close()

    def _report_failure(self, reason: str) -> None:
        if self._peer is not None:
            self._peer.send(RankFailed(rank=self._launch.rank, reason=reason))

    def _end(self) -> None:
        self._phase.enter("ending")
        if self._engine is not None:
            self._engine.shutdown(time.monotonic() + self._settings.stop.grace_s)
        if self._shelf is not None:
            self._shelf.close()
        if self._control is not None:
            self._control.close()
        if self._pulse is not None:
            self._pulse.close()
        if self._peer is not None:
            self._peer.close()
        self._signals.finish()
        sys.stdout.flush()
