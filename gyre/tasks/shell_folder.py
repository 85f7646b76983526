"""The texts of a shell task's Harbor folder: instruction.md, task.toml, tests/test.sh, solution/solve.sh.

The verifier is POSIX sh with `cat` and `cmp` alone, so that grading costs a few milliseconds and runs in any
sandbox. It trusts nothing in the workspace: it executes nothing there, and takes neither a link nor a folder
for the right file.
"""

from collections.abc import Mapping

PATHS_LINE = "app=/app tests=/tests out=/logs/verifier/reward.json"
"""The one line of test.sh that names folders."""

_TEST = """\
#!/bin/sh
# {checks}: each 0 or 1; the reward is their weighted sum, 0 without the right file.
PATH=/usr/bin:/bin LC_ALL=C
{paths}
target={target} want={want}
file=0 format=0 exact=0 clean=0 tenths=0
if [ -f "$app/$target" ] && [ ! -L "$app/$target" ]; then
    file=1 clean=1
    text=$(cat "$app/$target")
    case "$text" in
        '' | *[!{allowed}]*) ;;
        *) format=1 ;;
    esac
    [ "$text" = "$want" ] && exact=1
    for path in "$app"/* "$app"/.[!.]* "$app"/..?*; do
        [ -e "$path" ] || [ -L "$path" ] || continue
        case "${{path#"$app"/}}" in
            {known}) ;;
            *) clean=0 ;;
        esac
    done
{unchanged}    tenths=$(({sum}))
fi
printf '{{"reward": %d.%d, {named}}}\\n' $((tenths / 10)) $((tenths % 10)) {values} > "$out"
"""

_UNCHANGED = """\
    [ -f "$app/{name}" ] && [ ! -L "$app/{name}" ] && cmp -s "$tests/initial/{name}" "$app/{name}" || clean=0
"""

_TASK = """\
schema_version = "1.4"

[task]
name = "gyre/{name}"
version = "1.0"
description = "A small shell task ({kind}) with four checks."
keywords = ["shell", "{kind}"]

[agent]
timeout_sec = 120.0

[verifier]
timeout_sec = 20.0
environment_mode = "separate"

[environment]
workdir = "/app"
network_mode = "no-network"
"""


def render_instruction(instruction: str) -> str:
    """The text itself, without a closing line break: a harness shows the policy exactly these characters."""
    return instruction


def render_task_toml(name: str, *, kind: str) -> str:
    """task.toml, Harbor schema 1.4."""
    return _TASK.format(name=name, kind=kind)


def render_solution(command: str) -> str:
    """solution/solve.sh: run in the workspace, it makes the reward 1."""
    return f"#!/bin/sh\nset -e\n{command}\n"


def render_test(*, target: str, want: str, allowed: str, initial: tuple[str, ...], tenths: Mapping[str, int]) -> str:
    """tests/test.sh: writes the reward and each check to /logs/verifier/reward.json.

    `allowed` is the inside of a bracket expression; `initial` names the files that must be as they were (their
    originals lie in tests/initial); `tenths` is the worth of each check, in the order in which it is written.
    """
    return _TEST.format(
        checks=", ".join(tenths),
        paths=PATHS_LINE,
        target=target,
        want=want,
        allowed=allowed,
        known=" | ".join((target, *initial)),
        unchanged="".join(_UNCHANGED.format(name=name) for name in initial),
        sum=" + ".join(f"{worth} * {name}" for name, worth in tenths.items()),
        named=", ".join(f'"{name}": %d' for name in tenths),
        values=" ".join(f"${name}" for name in tenths),
    )
