"""The preloaded parent of mini-swe-agent: imports it once, then forks one child a rollout into its sandbox.

Runs in the harness's own environment and imports no gyre module; `enter.py` is loaded by its path. Importing
costs seconds and a warm-up run compiles what the first call needs, so a child costs tens of milliseconds.
The agent is the unmodified library: its default agent, its text-based model, its local environment, its own
configuration file. Packets on the inherited socket are JSON: {id, task, base_url, ...} with the pidfd of the
sandbox's process 1 in, {id, pid} and then {id, status, detail} out. The parent ends when the socket does.

Usage: mini_parent.py SOCKET_FD ENTER_PATH CONFIG ROOTLESS
"""

import gc
import importlib.util
import json
import logging
import os
import select
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import ModuleType
from typing import Any, NoReturn

PACKET = 1 << 17
SUBMIT = "```sh\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n```"
WARM_UP_S = 60
Run = Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]


def load_enter(path: str) -> ModuleType:
    """The module that enters sandboxes, by its path: this interpreter does not have gyre."""
    spec = importlib.util.spec_from_file_location("enter", path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_agent() -> tuple[Run, Callable[[Any], dict[str, Any]]]:
    """Import mini-swe-agent (3-4 s); returns what makes and runs one agent."""
    import litellm
    import yaml
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel

    litellm.suppress_debug_info = True
    logging.disable(logging.CRITICAL)

    def run(config: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
        model = dict(config.get("model", {}))
        kwargs = dict(model.pop("model_kwargs", {}), api_base=request["base_url"], api_key=request["api_key"])
        model |= {"model_name": f"openai/{request['model']}", "model_kwargs": kwargs}
        environment = dict(config.get("environment", {}), cwd=request["workdir"])
        agent = DefaultAgent(LitellmTextbasedModel(**model), LocalEnvironment(**environment), **config["agent"])
        return agent.run(request["task"])

    return run, yaml.safe_load


class _Scripted(BaseHTTPRequestHandler):
    """Answers the warm-up's calls: one command, then the submission."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        text = SUBMIT if len(body["messages"]) > 3 else "```sh\ntrue\n```"
        message = {"role": "assistant", "content": text}
        answer = {
            "id": "warm", "object": "chat.completion", "created": 1, "model": "warm",
            "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        }  # fmt: skip
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


def warm_up(run: Run, config: dict[str, Any], enter: ModuleType) -> None:
    """One whole run against a scripted server in a child process, so that no server thread lives here."""
    server = HTTPServer(("127.0.0.1", 0), _Scripted)
    pid = os.fork()
    if pid == 0:
        enter.die_with_parent()
        signal.alarm(WARM_UP_S)
        server.serve_forever()
    try:
        url = f"http://127.0.0.1:{server.server_port}/v1"
        run(config, {"base_url": url, "api_key": "warm", "model": "warm", "workdir": "/", "task": "warm"})
    finally:
        server.server_close()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


class Parent:
    """Forks children on request and tells how they ended."""

    def __init__(
        self, sock: socket.socket, enter: ModuleType, run: Run, config: dict[str, Any], *, rootless: bool
    ) -> None:
        self.sock, self.enter, self.run, self.config, self.rootless = sock, enter, run, config, rootless
        self.pid_ns = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        self.children: dict[int, tuple[int, int]] = {}  # pid -> (request id, last words pipe)
        self.wake, wake_in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_in, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def reply(self, **fields: object) -> None:
        """Tell the owner; where it is gone the next receive says so."""
        try:
            self.sock.send(json.dumps(fields).encode())
        except OSError:
            pass

    def serve(self) -> None:
        """Until the owner is gone; then kill the children."""
        while True:
            ready, _, _ = select.select([self.sock, self.wake], [], [], 10.0)
            if self.wake in ready:
                os.read(self.wake, 4096)
            self.reap()
            if self.sock in ready and not self.receive():
                for pid in self.children:
                    os.kill(pid, signal.SIGKILL)
                return

    def receive(self) -> bool:
        """Take one request; False when the owner is gone."""
        try:
            data, fds, _, _ = socket.recv_fds(self.sock, PACKET, 1)
        except ConnectionResetError:
            return False  # The owner died with replies unread.
        if not data:
            return False
        request = json.loads(data)
        words_out, words_in = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            pid = self.enter.fork_inside(fds[0], self.pid_ns, rootless=self.rootless)
            if pid == 0:
                self.child(request, words_in)
            self.children[pid] = (request["id"], words_out)
            self.reply(id=request["id"], pid=pid)
        except OSError as error:
            os.close(words_out)
            self.reply(id=request["id"], status="start", detail=str(error))
        finally:
            os.close(words_in)
            for fd in fds:
                os.close(fd)
        return True

    def child(self, request: dict[str, Any], words: int) -> NoReturn:
        """Inside the sandbox from here on: become its user, run the agent, tell the last words, end."""
        status, detail = "crash", ""
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            self.sock.close()
            os.setsid()
            os.chdir(request["workdir"])
            self.enter.set_limits(own_limits(request["limits"]))
            self.enter.become(request["uid"], request["uid"])
            os.environ.clear()
            os.environ.update(request["env"])
            tempfile.tempdir = None
            result = self.run(self.config, request)
            status, detail = "end", str(result.get("exit_status", ""))
        except BaseException as error:  # noqa: BLE001 - the outer shell of this process: told, then it ends
            status, detail = "crash", f"{type(error).__name__}: {error}"
        finally:
            os.write(words, json.dumps({"status": status, "detail": detail[:2000]}).encode())
            os._exit(0)

    def reap(self) -> None:
        """Tell of every child that has ended."""
        while self.children:
            pid, code = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            request_id, words = self.children.pop(pid)
            try:
                last = json.loads(os.read(words, PACKET))
                last = {"status": str(last["status"]), "detail": str(last["detail"])}
            except (ValueError, KeyError, TypeError, BlockingIOError):
                last = {"status": "killed", "detail": f"wait status {code}"}
            finally:
                os.close(words)
            self.reply(id=request_id, **last)


def own_limits(limits: dict[str, int]) -> dict[str, int]:
    """The memory limit counts what this process has mapped already (a limit on new memory, then)."""
    with open("/proc/self/statm") as statm:
        mapped = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    return limits | {"memory_bytes": limits["memory_bytes"] + mapped}


def main() -> None:
    """Import, warm up, serve."""
    sock = socket.socket(fileno=int(sys.argv[1]))
    sock.set_inheritable(False)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    enter = load_enter(sys.argv[2])
    run, load_yaml = load_agent()
    with open(sys.argv[3]) as file:
        config = load_yaml(file)
    warm_up(run, config, enter)
    threads = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    gc.collect()
    gc.freeze()  # Keeps the collector from touching, and so copying, every shared page in each child.
    parent = Parent(sock, enter, run, config, rootless=sys.argv[4] == "1")
    # An idle worker of litellm's logging pool may be left; it waits on its queue and holds no lock.
    parent.reply(id=0, ready=True, threads=threads)
    parent.serve()


if __name__ == "__main__":
    main()
