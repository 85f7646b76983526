"""Building the heavy parts of a rank from settings: replica, engine, control thread."""

import time
from pathlib import Path

from gyre.config.schema import Settings
from gyre.fabric.groups import Groups
from gyre.fabric.world import World
from gyre.program.control import ControlThread, Phase
from gyre.program.leader import ModelCalls
from gyre.program.run import Launch
from gyre.program.training import TrainingCell
from gyre.serve.engine import Engine
from gyre.train.replica import OptimizerSettings, Replica
from gyre.wire.link import ThreadPeer


def build_training(
    settings: Settings, launch: Launch, groups: Groups, cell: int
) -> tuple[TrainingCell, int]:
    """Collective over the world: build every rank's replica. Returns it and the version the core holds."""
    trainer = settings.trainer
    replica = Replica.build(
        settings.model.path,
        settings.layout,
        groups.data,
        OptimizerSettings(
            learning_rate=trainer.learning_rate,
            adam_beta1=trainer.adam_beta1,
            adam_beta2=trainer.adam_beta2,
            adam_eps=trainer.adam_eps,
            weight_decay=trainer.weight_decay,
            clip_grad=trainer.clip_grad,
        ),
        is_core=cell == 0,
        threads=trainer.threads,
    )
    version = 0
    checkpoint = latest_checkpoint(launch.folder) if launch.resume else None
    if cell == 0 and checkpoint is not None:
        version = replica.load_checkpoint(checkpoint)
    return TrainingCell(replica=replica, groups=groups.data, settings=settings, cell=cell), version


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint of a run folder."""
    found = sorted((folder / "checkpoints").glob("step-*"))
    return found[-1] if found else None


def build_engine(settings: Settings, rank: int, cell: int) -> Engine:
    """Start the cell's engine with the weights of the model folder."""
    engine = Engine(settings, rank=rank)
    engine.start(time.monotonic() + settings.engine.start_timeout_s)
    return engine


def build_control(
    peer: ThreadPeer, world: World, cell: int, phase: Phase, *, groups: Groups | None, engine: Engine | None
) -> ControlThread:
    """The control thread of a leader, or of a follower (no groups, no engine)."""
    if groups is None or engine is None:
        return ControlThread(
            peer=peer, rank=world.rank, cell=cell, phase=phase, agree=None,
            on_generate=lambda message: None, on_abort=lambda call: None,
        )  # fmt: skip
    calls = ModelCalls(engine=engine, peer=peer, cell=cell)
    return ControlThread(
        peer=peer,
        rank=world.rank,
        cell=cell,
        phase=phase,
        agree=groups.agree_roles,
        on_generate=calls.generate,
        on_abort=calls.abort,
    )
