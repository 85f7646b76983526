"""The shell tasks: what is drawn, what is written, and that the written verifier means what `checks_of` says."""

import json
import random
import subprocess
from pathlib import Path

import pytest

from gyre.errors import TaskError
from gyre.tasks.shell import CARELESS_FILE, Kind, ShellTask, checks_of, draw, draw_split, write_split, write_task
from gyre.tasks.shell_demos import STEP_LIMIT, Habits, demonstrate, script
from gyre.tasks.shell_folder import PATHS_LINE


def one_of_each() -> list[ShellTask]:
    return [draw(random.Random(7), kind) for kind in Kind]


def lay_out(task: ShellTask, root: Path) -> Path:
    """Write the task's folder and a fresh workspace beside it; return the workspace."""
    write_task(task, root / "task")
    (root / "logs").mkdir()
    workspace = root / "app"
    workspace.mkdir()
    for path in (root / "task" / "environment").iterdir():
        (workspace / path.name).write_bytes(path.read_bytes())
    return workspace


def grade(root: Path) -> dict[str, float]:
    """Run the written test.sh, its one line of paths turned to folders under `root`."""
    text = (root / "task" / "tests" / "test.sh").read_text()
    assert text.count(PATHS_LINE) == 1
    paths = f"app={root}/app tests={root}/task/tests out={root}/logs/reward.json"
    (root / "test.sh").write_text(text.replace(PATHS_LINE, paths))
    subprocess.run(["/bin/sh", str(root / "test.sh")], check=True, timeout=10, cwd=root)
    return json.loads((root / "logs" / "reward.json").read_text())


def plain_files(workspace: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in workspace.iterdir()}


@pytest.mark.parametrize("task", one_of_each(), ids=lambda task: task.kind)
def test_the_solution_scores_one_and_doing_nothing_scores_zero(task: ShellTask, tmp_path: Path) -> None:
    workspace = lay_out(task, tmp_path)
    assert grade(tmp_path)["reward"] == 0
    subprocess.run(["/bin/sh", tmp_path / "task/solution/solve.sh"], check=True, timeout=10, cwd=workspace)
    assert grade(tmp_path) == {"reward": 1.0, "file": 1, "format": 1, "exact": 1, "clean": 1}
    assert checks_of(task, plain_files(workspace))["reward"] == 1


def spoil(task: ShellTask, workspace: Path, rng: random.Random) -> None:
    """Leave one of the things in the workspace that a policy might leave."""
    texts = [task.want, task.want + "\n", task.want + ".", task.want.upper(), f" {task.want}", "7\n", "", "x\ny\n"]
    texts += [f"{task.want}\n\n", f"{task.want}\n{task.want}\n", "-12\n", "é\n", "*\n"]
    for name in rng.sample([task.target, *task.files, CARELESS_FILE, ".hidden", "..x", "a b"], rng.randint(0, 3)):
        (workspace / name).write_text(rng.choice(texts))
    for name in task.files:
        if rng.random() < 0.1:
            (workspace / name).unlink()


def test_the_written_verifier_agrees_with_the_stated_checks(tmp_path: Path) -> None:
    rng = random.Random(11)
    rewards = set()
    for index in range(80):
        task = draw(rng, list(Kind)[index % 4])
        workspace = lay_out(task, tmp_path / str(index))
        spoil(task, workspace, rng)
        graded = grade(tmp_path / str(index))
        assert graded == checks_of(task, plain_files(workspace)), (task, plain_files(workspace))
        rewards.add(graded["reward"])
    assert len(rewards) >= 4


def test_neither_a_link_nor_a_folder_passes_for_the_right_file(tmp_path: Path) -> None:
    task = draw(random.Random(7), Kind.CREATE)
    workspace = lay_out(task, tmp_path)
    (tmp_path / "elsewhere").write_text(task.want)
    (workspace / task.target).symlink_to(tmp_path / "elsewhere")
    assert grade(tmp_path)["reward"] == 0
    (workspace / task.target).unlink()
    (workspace / task.target).mkdir()
    assert grade(tmp_path)["reward"] == 0


def test_a_made_folder_and_a_dangling_link_are_side_effects(tmp_path: Path) -> None:
    task = draw(random.Random(7), Kind.SUM)
    workspace = lay_out(task, tmp_path)
    (workspace / task.target).write_text(task.want)
    (workspace / "made").mkdir()
    assert grade(tmp_path)["clean"] == 0
    (workspace / "made").rmdir()
    (workspace / "link").symlink_to("nowhere")
    assert grade(tmp_path)["clean"] == 0


def test_train_and_held_out_tasks_are_disjoint_and_repeatable() -> None:
    train, held_out = draw_split(3, num_train=192, num_held_out=64)
    instructions = [task.instruction for task in train + held_out]
    assert len(set(instructions)) == 256
    assert (train, held_out) == draw_split(3, num_train=192, num_held_out=64)
    assert draw_split(3, num_train=8, num_held_out=64)[1] == held_out
    assert draw_split(4, num_train=8, num_held_out=64)[1] != held_out
    assert all(CARELESS_FILE not in (task.target, *task.files) for task in train + held_out)


def test_a_written_set_is_kept_when_it_matches_and_replaced_when_it_does_not(tmp_path: Path) -> None:
    out = tmp_path / "set"
    assert write_split(out, seed=0, num_train=4, num_held_out=2)
    (out / "train" / "mark").write_text("")
    assert not write_split(out, seed=0, num_train=4, num_held_out=2)
    assert (out / "train" / "mark").exists()
    assert write_split(out, seed=1, num_train=8, num_held_out=2)
    assert len(list((out / "train").iterdir())) == 8
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


def test_a_folder_of_someone_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.md").write_text("years of work")
    (tmp_path / "manifest.json").write_text('{"chapters": 7}')
    with pytest.raises(TaskError, match="without a manifest"):
        write_split(tmp_path, seed=0, num_train=4, num_held_out=2)
    assert (tmp_path / "thesis.md").exists()


def test_a_careful_demonstrator_scores_one_and_a_careless_one_zero() -> None:
    careful = Habits(careless_file=0, careless_text=0, slip=0, look=0, linger=0)
    careless = Habits(careless_file=1, careless_text=1, slip=0, look=0, linger=0)
    for task in one_of_each():
        assert demonstrate(task, script(task, random.Random(0), careful)).reward == 1
        assert demonstrate(task, script(task, random.Random(0), careless)).reward == 0


def test_demonstrations_look_like_the_harness_shows_them() -> None:
    habits = Habits(careless_file=0, careless_text=0, slip=0, look=1, linger=1)
    task = draw(random.Random(7), Kind.LOOKUP)
    messages = demonstrate(task, script(task, random.Random(0), habits)).messages
    roles = ["system", "user", *["assistant", "user"] * STEP_LIMIT]
    assert [role for role, _ in messages] == roles[:-1]
    assert messages[1][1] == task.instruction
    assert messages[2][1] == f"```sh\ncat {task.operands[0]}\n```"
    assert messages[3][1] == f"rc=0\n{task.want}"
    assert messages[5][1] == "rc=0\n"
