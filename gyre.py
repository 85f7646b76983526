#!/usr/bin/env python3
"""gyre: elastic online RL for agents. `torchrun --standalone --nproc-per-node N gyre.py CONFIG [--resume]`."""

import sys

from gyre.program.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
