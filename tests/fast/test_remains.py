"""What a killed engine owner leaves behind is found by its folder's name and removed; a living owner's is not."""

import os
import subprocess
import sys
from pathlib import Path

from gyre.serve.remains import reap

OWNER = """
import sys
from gyre.serve.remains import EngineFolder
folder = EngineFolder()
with folder.in_use():
    pass
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_killed_owner_leaves_nothing_and_a_living_one_keeps_all(tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        cwd=Path(__file__).parents[2],
    )
    with owner:
        assert owner.stdout is not None and owner.stdout.readline() == "ready\n"
        kept = sorted(path.name.partition(".")[0].partition("-")[0] for path in tmp_path.iterdir())
        reap(tmp_path)
        assert kept == sorted(path.name.partition(".")[0].partition("-")[0] for path in tmp_path.iterdir())
        assert kept == ["gyre", "pymp"]
        owner.kill()
    reap(tmp_path)
    assert list(tmp_path.iterdir()) == []
