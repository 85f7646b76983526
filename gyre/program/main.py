"""The command line: `gyre.py CONFIG`, and what looks at configurations and runs (check, watch, report, ...).

Settings are read and checked before anything heavy is imported; a mistake in them is told by rank 0 alone and
ends every rank with exit code 2.
"""

import argparse
import logging
import multiprocessing.util
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from gyre.errors import ConfigError, GyreError
from gyre.program.views import add_views

FOLDER = "run folder, e.g. runs/quickstart"
TAKEN_WAIT_S = 15.0

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def main(argv: list[str]) -> int:
    """Entry point of gyre.py; returns the exit code."""
    if argv and argv[0].endswith(".toml"):
        argv = ["train", *argv]
    arguments = _parser().parse_args(argv)
    is_speaker = os.environ.get("RANK", "0") == "0"
    try:
        return arguments.act(arguments)
    except GyreError as error:
        if is_speaker:
            kind = "configuration" if isinstance(error, ConfigError) else "error"
            sys.stderr.write(f"gyre: {kind}: {error}\n")
        return error.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gyre.py",
        description="Elastic online RL for agents. Train: torchrun --nproc-per-node N gyre.py CONFIG",
        epilog="`gyre.py CONFIG.toml` is short for `gyre.py train CONFIG.toml`.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    train = commands.add_parser("train", help="run the training that CONFIG describes (start it with torchrun)")
    train.add_argument("--resume", action="store_true", help="go on from the run folder's last checkpoint")
    check = commands.add_parser("check", help="check CONFIG and print where everything would be placed")
    for command, act in ((train, _train), (check, _check)):
        command.add_argument("config", type=Path, help="TOML file")
        command.add_argument(
            "--set", action="append", default=[], metavar="KEY=VALUE", help="override a setting, e.g. run.seed=1"
        )
        command.set_defaults(act=act)
    settings = commands.add_parser("settings", help="print every setting with type, default and meaning")
    settings.set_defaults(act=_settings)
    for add in (_add_summary, _add_watch, _add_tell, _add_simulate, add_views):
        add(commands)
    return parser


def _add_simulate(commands: "Commands") -> None:
    simulate = commands.add_parser("simulate", help="the run in virtual time, beside the other policies")
    source = simulate.add_mutually_exclusive_group(required=True)
    source.add_argument("config", type=Path, nargs="?", help="TOML file; its [simulate] section is the cluster")
    source.add_argument("--replay", type=Path, metavar="RUN", help="a run folder: predict its step time")
    simulate.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a setting")
    simulate.add_argument("--json", action="store_true", help="one JSON line instead of a table")
    simulate.add_argument("--svg", type=Path, metavar="FILE", help="draw the configured policy")
    simulate.add_argument("--svg-hours", type=float, metavar="HOURS", help="draw only the first hours")
    simulate.set_defaults(act=_simulate)
    plan = commands.add_parser("plan", help="does it fit, how many cells, which staleness: for [cluster]")
    plan.add_argument("config", type=Path, help="TOML file; only config.json of its model is read")
    plan.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a setting")
    plan.add_argument("--json", action="store_true", help="one JSON line instead of text")
    plan.set_defaults(act=_plan)


def _add_summary(commands: "Commands") -> None:
    summary = commands.add_parser("summary", help="recompute a run's summary from its store and print it")
    summary.add_argument("folder", type=Path, help=FOLDER)
    summary.set_defaults(act=_summary)


def _add_watch(commands: "Commands") -> None:
    watch = commands.add_parser("watch", help="show a run's dashboard from another terminal or machine")
    watch.add_argument("folder", type=Path, help=FOLDER)
    watch.add_argument("--once", action="store_true", help="one picture, then leave")
    watch.add_argument("--lines", action="store_true", help="plain lines instead of a picture")
    watch.set_defaults(act=_watch)


def _add_tell(commands: "Commands") -> None:
    tell = commands.add_parser("tell", help="order a running run: pause, resume, checkpoint, stop, stop-now")
    tell.add_argument("folder", type=Path, help=FOLDER)
    tell.add_argument(
        "order",
        choices=("pause", "resume", "checkpoint", "stop", "stop-now"),
        help="pause/resume: dispatch of new groups; checkpoint: with the next step; stop: after this step",
    )
    tell.set_defaults(act=_tell)


def _train(arguments: argparse.Namespace) -> NoReturn:
    from gyre.config.load import check_paths, check_runnable, load_settings

    settings = load_settings(arguments.config, overrides=arguments.set)
    check_paths(settings)
    check_runnable(settings)
    from gyre.program.resume import check_folder
    from gyre.program.run import Launch, run

    folder = settings.run_folder
    launch = Launch.from_environment(
        config=arguments.config, overrides=tuple(arguments.set), folder=folder, resume=arguments.resume
    )
    if launch.rank == 0:
        check_folder(settings, resume=launch.resume, is_restart=launch.is_restart)
    _log_to(folder / "logs" / f"rank-{launch.rank}.log", settings.watch.log_level.value)
    code = _run_quietly(lambda: run(settings, launch), folder / "logs" / f"rank-{launch.rank}.log")
    # Everything of ours is closed. Tearing down an interpreter that holds torch, SGLang and Megatron was seen to
    # take nine seconds of pure computation, which a stopping run does not have.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    shutil.rmtree(multiprocessing.util.get_temp_dir(), ignore_errors=True)
    os._exit(code)


def _run_quietly(act: Callable[[], int], log_path: Path) -> int:
    """Run a rank with its error output in its log: what libraries say there would be drawn into the dashboard.

    What a person must read comes from the front; an error of this rank itself is told on the terminal again.
    """
    terminal = os.dup(2)
    with log_path.open("ab") as log_file:
        os.dup2(log_file.fileno(), 2)
    try:
        return act()
    except BaseException:
        os.dup2(terminal, 2)
        raise
    finally:
        os.close(terminal)


def _log_to(path: Path, level: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(
        filename=path, level=level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s", force=True
    )


def _check(arguments: argparse.Namespace) -> int:
    from gyre.config.load import check_paths, check_runnable, load_settings
    from gyre.program.check import describe

    settings = load_settings(arguments.config, overrides=arguments.set)
    check_paths(settings)
    check_runnable(settings)
    sys.stdout.write(describe(settings))
    return 0


def _simulate(arguments: argparse.Namespace) -> int:
    from gyre.config.load import load_settings
    from gyre.program.simulate import simulate, simulate_replay

    if arguments.replay is not None:
        return simulate_replay(arguments.replay, is_json=arguments.json)
    settings = load_settings(arguments.config, overrides=arguments.set)
    return simulate(settings, is_json=arguments.json, picture=arguments.svg, picture_hours=arguments.svg_hours)


def _plan(arguments: argparse.Namespace) -> int:
    from gyre.config.load import load_settings
    from gyre.program.plan import plan

    return plan(load_settings(arguments.config, overrides=arguments.set), is_json=arguments.json)


def _settings(_: argparse.Namespace) -> int:
    from gyre.config.load import describe_settings

    sys.stdout.write(describe_settings())
    return 0


def _watch(arguments: argparse.Namespace) -> int:
    from gyre.config.choices import Dashboard
    from gyre.watch.attach import attach

    dashboard = Dashboard.LINES if arguments.lines else Dashboard.AUTO
    return attach(arguments.folder, dashboard=dashboard, is_once=arguments.once, stream=sys.stdout)


def _tell(arguments: argparse.Namespace) -> int:
    from gyre.store.orders import Order, await_taken, give_order
    from gyre.store.store import existing

    found = existing(arguments.folder)
    if found is None or found.ended:
        state = found.describe() if found else "no run there"
        raise ConfigError("RUN", wanted="the folder of a running run", given=f"{arguments.folder} ({state})")
    await_taken(give_order(arguments.folder, Order(arguments.order)), wait_s=TAKEN_WAIT_S)
    sys.stdout.write(f"taken: {arguments.order}\n")
    return 0


def _summary(arguments: argparse.Namespace) -> int:
    from gyre.store.summary import render_summary, write_summary

    sys.stdout.write(render_summary(write_summary(arguments.folder)))
    return 0
