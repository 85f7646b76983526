"""The front as a process: its arguments, its first word to rank 0, its signals, its last cleaning up.

Started detached by rank 0 (`spawn.start_front`). What it does is in front.py.
"""

import argparse
import asyncio
import hashlib
import json
import logging
import os
import select
import signal
import sys
import tempfile
import time
from pathlib import Path

import uvloop

from gyre.config.dump import dump_settings
from gyre.config.load import load_settings
from gyre.config.schema import Settings
from gyre.errors import GyreError
from gyre.fabric import shm
from gyre.program.front import Front
from gyre.serve import remains
from gyre.store import records
from gyre.store.store import RunStore
from gyre.wire.link import FrontLink

AGENT_END_S = 5.0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gyre.program.front_process", description="Started by rank 0.")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--resumed-version", type=int, default=0)
    parser.add_argument("--agent-pid", type=int, required=True)
    parser.add_argument("--address-fd", type=int, required=True)
    return parser.parse_args()


def _began(settings: Settings, config_text: str, resumed_version: int, tokens_bytes: int) -> records.RunBegan:
    return records.RunBegan(
        name=settings.run.name,
        seed=settings.run.seed,
        policy=settings.schedule.policy.value,
        steps=settings.run.steps,
        num_cells=settings.placement.num_cells,
        groups_per_batch=settings.schedule.groups_per_batch,
        started_at=time.time(),
        resumed_version=resumed_version,
        config_sha256=hashlib.sha256(config_text.encode()).hexdigest(),
        model_path=str(settings.model.path.absolute()),
        tokens_bytes=tokens_bytes,
    )


def _say_hello(fd: int, hello: dict[str, str]) -> None:
    with os.fdopen(fd, "w") as pipe:
        pipe.write(json.dumps(hello) + "\n")


async def _live(arguments: argparse.Namespace, settings: Settings, store: RunStore) -> int:
    link = FrontLink()
    front = Front(
        settings=settings,
        folder=arguments.folder,
        link=link,
        store=store,
        resumed_version=arguments.resumed_version,
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, front.end, f"stopped by {number.name}")
    front.watch_agent(arguments.agent_pid)
    _say_hello(arguments.address_fd, {"address": link.address})
    try:
        return await front.run()
    finally:
        link.close()


def _clean_up(agent_pid: int) -> None:
    """Remove what killed ranks left behind, once torchrun, and with it every rank, is gone."""
    try:
        agent = os.pidfd_open(agent_pid)
        select.select([agent], [], [], AGENT_END_S)
        os.close(agent)
    except ProcessLookupError:
        pass
    shm.reap()
    remains.reap(Path(tempfile.gettempdir()))


def main() -> int:
    """Entry point of the front process."""
    arguments = _arguments()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        settings = load_settings(arguments.config, overrides=arguments.set)
        logging.getLogger().setLevel(settings.watch.log_level.value.upper())
        config_text = dump_settings(settings)
        store = RunStore.open(arguments.folder, config_text=config_text)
        store.record(_began(settings, config_text, arguments.resumed_version, store.tokens_bytes))
    except GyreError as error:
        _say_hello(arguments.address_fd, {"error": str(error)})
        return error.exit_code
    try:
        return uvloop.run(_live(arguments, settings, store))
    finally:
        store.close()
        _clean_up(arguments.agent_pid)


if __name__ == "__main__":
    sys.exit(main())
