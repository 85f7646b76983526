"""A minimal agent: ask an OpenAI-compatible server for one shell command a turn, run it, show what came out.

A program of its own (`python -I -S loop_agent.py CONFIG_JSON`), standard library alone: it knows a base URL,
a key and a model, nothing else. Commands stand in a ```sh fence; `echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT`
submits. It ends with one JSON line {"status", "detail"} on stdout.
"""

import http.client
import json
import re
import subprocess
import sys
from typing import Any
from urllib.parse import urlsplit

SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
FENCE = re.compile(r"```sh\n(.*?)\n```", re.DOTALL)


class ServerError(Exception):
    """The server did not answer with a completion."""


def complete(config: dict[str, Any], messages: list[dict[str, str]]) -> str:
    """The text of the next assistant turn."""
    url = urlsplit(config["base_url"])
    connection = http.client.HTTPConnection(url.hostname, url.port)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {config['api_key']}"}
    body = json.dumps({"model": config["model"], "messages": messages})
    try:
        connection.request("POST", url.path.rstrip("/") + "/chat/completions", body, headers)
        response = connection.getresponse()
        data = response.read()
    finally:
        connection.close()
    if response.status != 200:
        raise ServerError(f"status {response.status}: {data[:300].decode(errors='replace')}")
    return json.loads(data)["choices"][0]["message"]["content"] or ""


def execute(command: str, timeout_s: float) -> tuple[int, str]:
    """(status, output) of one command; whatever the policy said, this does not raise."""
    try:
        done = subprocess.run(
            ["/bin/sh", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return -1, (error.output or b"").decode(errors="replace")
    except (OSError, ValueError) as error:
        return -1, str(error)
    return done.returncode, done.stdout.decode(errors="replace")


def run(config: dict[str, Any]) -> str:
    """The loop; returns its last word."""
    messages = [{"role": "system", "content": config["system"]}, {"role": "user", "content": config["task"]}]
    for _ in range(config["step_limit"]):
        text = complete(config, messages)
        messages.append({"role": "assistant", "content": text})
        found = FENCE.findall(text)
        if len(found) != 1:
            messages.append({"role": "user", "content": "Format error"})
            continue
        status, output = execute(found[0], config["timeout_s"])
        if status == 0 and output.strip() == SUBMIT:
            return "Submitted"
        messages.append({"role": "user", "content": f"rc={status}\n{output.strip()[: config['output_chars']]}"})
    return "LimitsExceeded"


def main() -> None:
    """Run, and say how it ended."""
    try:
        result = {"status": "end", "detail": run(json.loads(sys.argv[1]))}
    except (ServerError, OSError, http.client.HTTPException, ValueError, KeyError, IndexError, TypeError) as error:
        result = {"status": "crash", "detail": f"{type(error).__name__}: {error}"}
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
