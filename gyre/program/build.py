"""Building a rank's parts from settings: its cell's replica and its control thread."""

from dataclasses import dataclass

from torch import Tensor

from gyre.config.schema import Settings
from gyre.fabric.groups import Groups
from gyre.fabric.world import World
from gyre.program.control import ControlThread
from gyre.program.leader import ModelCalls
from gyre.program.run import Launch, latest_checkpoint
from gyre.program.training import TrainingCell
from gyre.serve.engine import Engine
from gyre.train.replica import OptimizerSettings, Replica
from gyre.wire.link import ThreadPeer


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstWeights:
    """What the core holds at start: `version` and its weights by Hugging Face name (on the core's leader)."""

    version: int
    tensors: list[tuple[str, Tensor]]


def build_training(settings: Settings, launch: Launch, groups: Groups, cell: int) -> tuple[TrainingCell, FirstWeights]:
    """Collective over the world: build every rank's replica, the core's from the last checkpoint if resumed."""
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
        segment_tokens=trainer.segment_tokens,
        has_reference=trainer.kl_coefficient > 0,
        threads=trainer.threads,
    )
    version, tensors = 0, []
    folder = launch.folder / "checkpoints"
    if cell == 0:
        checkpoint = latest_checkpoint(folder) if launch.resume else None
        version = replica.load_checkpoint(checkpoint) if checkpoint is not None else 0
        tensors = replica.export_hf()
    training = TrainingCell(replica=replica, settings=settings, cell=cell, folder=folder)
    return training, FirstWeights(version=version, tensors=tensors)


def build_control(
    peer: ThreadPeer, world: World, cell: int, *, groups: Groups | None, engine: Engine | None
) -> ControlThread:
    """The control thread of a leader, or of a follower (no groups, no engine)."""
    if groups is None or engine is None:
        return ControlThread(
            peer=peer, rank=world.rank, cell=cell, agree=None,
            on_generate=lambda message: None, on_abort=lambda call: None,
        )  # fmt: skip
    calls = ModelCalls(engine=engine, peer=peer, cell=cell)
    return ControlThread(
        peer=peer,
        rank=world.rank,
        cell=cell,
        agree=groups.agree_roles,
        on_generate=calls.generate,
        on_abort=calls.abort,
    )
