#!/usr/bin/env bash
# bash launch/quickstart.sh [ARGUMENT...]: a whole run at toy size on one CPU machine.
# The arguments go to gyre.py: --resume, or --set run.seed=1 and the like.

source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

CONFIG=configs/quickstart.toml
TORCHRUN_FOLDERS=runs/.torchrun

# The configuration knows how many ranks it wants, with what is overridden on the command line.
count_ranks() {
    python - "$CONFIG" "$@" <<'PYTHON'
import argparse
import pathlib
import sys

from gyre.config.load import load_settings
from gyre.errors import GyreError

parser = argparse.ArgumentParser(add_help=False)
parser.add_argument("config", type=pathlib.Path)
parser.add_argument("--set", action="append", default=[])
known, _ = parser.parse_known_args()
try:
    print(load_settings(known.config, overrides=known.set).num_ranks)
except GyreError as error:
    sys.exit(f"gyre: {error}")
PYTHON
}

# torchrun never removes the folder of its error files. Each start has one named by its process, which torchrun
# becomes; those of processes that are gone are removed by the next start.
sweep_torchrun_folders() {
    local folder
    for folder in "$TORCHRUN_FOLDERS"/*; do
        [[ -d $folder && ! -d /proc/${folder##*/} ]] && rm -rf "$folder"
    done
    return 0
}

cd "$CHECKOUT"
enter_environment
num_ranks=$(count_ranks "$@") || exit 2
python -m gyre.tasks.shell runs/tasks/quickstart --train 192 --held-out 64 --seed 0
sweep_torchrun_folders
exec torchrun --standalone --nproc-per-node "$num_ranks" --max-restarts 0 --log-dir "$TORCHRUN_FOLDERS/$$" \
    gyre.py "$CONFIG" "$@"
