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
    report = commands.add_parser("report", help="write one HTML page about a run")
    report.add_argument("folder", type=Path, help=FOLDER)
    report.add_argument("out", type=Path, nargs="?", help="default: report.html in the run folder")
    report.add_argument("--model", type=Path, help="model folder whose tokenizer gives the text; default: the run's")
    report.set_defaults(act=_report)


def _timeline(arguments: argparse.Namespace) -> int:
    from gyre.watch.timeline import write_timeline

    out = arguments.out or arguments.folder / "timeline.json"
    count = write_timeline(arguments.folder, out)
    sys.stdout.write(f"{out}: {count} events; open it at https://ui.perfetto.dev\n")
    return 0


def _report(arguments: argparse.Namespace) -> int:
    from gyre.program.tokens import reader_of
    from gyre.watch.history import read_history
    from gyre.watch.report import write_report

    history = read_history(arguments.folder)
    out = arguments.out or arguments.folder / "report.html"
    write_report(arguments.folder, history, out, read=reader_of(arguments.model or Path(history.began.model_path)))
    sys.stdout.write(f"{out}\n")
    return 0
