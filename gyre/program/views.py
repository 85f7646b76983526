"""The commands that look at runs and machines and change neither: timeline, report, doctor."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

FOLDER = "run folder, e.g. runs/quickstart"


def add_views(commands: "Commands") -> None:
    """Add the commands to the command line."""
    timeline = commands.add_parser("timeline", help="write a run's trace for ui.perfetto.dev")
    timeline.add_argument("folder", type=Path, help=FOLDER)
    timeline.add_argument("out", type=Path, nargs="?", help="default: timeline.json in the run folder")
    timeline.set_defaults(act=_timeline)


def _timeline(arguments: argparse.Namespace) -> int:
    from gyre.watch.timeline import write_timeline

    out = arguments.out or arguments.folder / "timeline.json"
    count = write_timeline(arguments.folder, out)
    sys.stdout.write(f"{out}: {count} events; open it at https://ui.perfetto.dev\n")
    return 0
