"""The strict reader of Harbor folders, and what counts as a reward."""

from pathlib import Path

import pytest

from gyre.errors import EvaluationError, TaskError
from gyre.tasks.harbor import load_task, load_tasks
from gyre.tasks.verifier import pack_folder, read_reward_json

HELLO = Path(__file__).resolve().parents[1] / "data" / "tasks" / "hello"


def write_task(folder: Path, toml: str) -> Path:
    """A minimal task folder."""
    (folder / "tests").mkdir(parents=True)
    (folder / "tests" / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
    (folder / "instruction.md").write_text("Do it.")
    (folder / "task.toml").write_text(toml)
    return folder


def test_a_task_is_read_whole() -> None:
    task = load_task(HELLO)
    assert (task.name, task.workdir, task.agent_s, task.verifier_s) == ("gyre/hello", "/app", 20.0, 20.0)
    assert task.instruction.startswith("Write the word hello")


def test_defaults_are_harbors(tmp_path: Path) -> None:
    task = load_task(write_task(tmp_path / "t", ""))
    assert (task.name, task.workdir, task.verifier_s, task.memory_mb) == ("t", "/app", 600.0, None)


def test_deprecated_keys_are_read_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    toml = 'version = "1.0"\n[environment]\nmemory = "2G"\nallow_internet = false\n'
    assert load_task(write_task(tmp_path / "t", toml)).memory_mb == 2048
    assert "use=schema_version" in caplog.text and "use=memory_mb" in caplog.text


@pytest.mark.parametrize(
    ("toml", "reason"),
    [
        ("[agent]\ntimeout_secs = 3\n", "agent.timeout_secs: unknown key; did you mean 'timeout_sec'"),
        ("[agentt]\n", "agentt: unknown key; did you mean 'agent'"),
        ("[agent]\ntimeout_sec = '3'\n", "agent.timeout_sec: wanted int or float, given '3'"),
        ("[agent]\ntimeout_sec = true\n", "agent.timeout_sec: wanted int or float, given True"),
        ("[agent]\ntimeout_sec = nan\n", "agent.timeout_sec: wanted seconds above 0"),
        ("[environment]\ngpus = 1\n", "environment.gpus: sandboxes have no GPU"),
        ("[environment]\ndocker_image = 'x'\n", "environment.docker_image"),
        ("[environment]\nnetwork_mode = 'public'\n", "environment.network_mode: 'public'"),
        ("[environment]\nallow_internet = true\n", "environment.allow_internet"),
        ("[environment]\nworkdir = '/usr/x'\n", "environment.workdir"),
        ("[environment.env]\nA = '${HOME}'\n", "environment.env.A: refers to the host's environment"),
        ("[verifier]\nenvironment_mode = 'shared'\n", "verifier.environment_mode"),
        ("[[steps]]\nname = 'a'\n", "steps: several steps"),
        ("schema_version = '2.0'\n", "schema_version: '2.0' is not known"),
        ("= 3", "task.toml"),
    ],
)
def test_what_cannot_be_run_is_refused_with_the_reason(tmp_path: Path, toml: str, reason: str) -> None:
    with pytest.raises(TaskError) as raised:
        load_task(write_task(tmp_path / "t", toml))
    assert reason in str(raised.value)


def test_an_image_to_build_is_refused(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "t", "")
    (folder / "environment").mkdir()
    (folder / "environment" / "Dockerfile").write_text("FROM x")
    with pytest.raises(TaskError, match="images are not built"):
        load_task(folder)


def test_a_folder_of_tasks_keeps_the_good_and_names_the_bad(tmp_path: Path) -> None:
    write_task(tmp_path / "b", "")
    write_task(tmp_path / "a", "")
    write_task(tmp_path / "c", "[environment]\ngpus = 1\n")
    (tmp_path / "d").mkdir()
    found = load_tasks(tmp_path)
    assert [task.name for task in found.tasks] == ["a", "b"]
    assert list(found.refused) == ["c"]
    with pytest.raises(TaskError, match="no task in it"):
        load_tasks(tmp_path / "d")


def test_packing_is_the_same_for_the_same_folder() -> None:
    assert pack_folder(HELLO / "tests") == pack_folder(HELLO / "tests")
    assert pack_folder(HELLO / "missing") == b""


def test_a_reward_with_checks_is_read() -> None:
    score = read_reward_json(b'{"reward": 0.5, "a": 1, "b": 0}')
    assert (score.reward, score.checks) == (0.5, {"a": 1.0, "b": 0.0})
    assert read_reward_json(b'{"passed": 1}').reward == 1.0


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"[]", b"{}", b"1", b'{"reward": NaN}', b'{"reward": Infinity}', b'{"reward": -1}', b'{"reward": 1.01}'),
        *(b'{"reward": true}', b'{"reward": "1"}', b'{"reward": null}', b'{"a": 1, "b": 1}', b'{"reward": 1, "a": []}'),
        *(b'{"reward": 1e999}', b"[" * 100_000, b'{"reward": 1', b"\xff"),
    ],
)
def test_what_is_no_reward_is_a_failed_evaluation(data: bytes) -> None:
    with pytest.raises(EvaluationError):
        read_reward_json(data)
