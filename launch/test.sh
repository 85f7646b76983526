#!/usr/bin/env bash
# bash launch/test.sh [TIER...]: the tests. Tiers: lint fast dist clients cluster quickstart; none named means all.
# bash launch/test.sh long: what takes much longer (three quickstart seeds and a control); an interrupted one goes on.
#
# Every tier runs even if one before it failed. Then it looks for what the tests left behind: processes, sandboxes,
# shared memory, temporary folders. The last line counts all tests of all tiers.

source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

TIERS=(lint fast dist clients cluster quickstart)
LEAK_WAIT_S=15
FAILED=()

# Runs in the tier's own time; remembers a failure instead of ending the script.
run_tier() {
    local tier=$1 began=$SECONDS
    printf '\n=== %s\n' "$tier"
    if "run_$tier"; then
        printf '=== %s: passed in %d s\n' "$tier" $((SECONDS - began))
    else
        FAILED+=("$tier")
        printf '=== %s: FAILED in %d s\n' "$tier" $((SECONDS - began))
    fi
}

run_lint() {
    local code=0
    ruff check --no-cache . || code=1
    # The wrapper of pyright fetches its program on first use: that is CI's and a developer's choice, not a test's.
    if [[ -n ${CI:-} || -n ${GYRE_PYRIGHT:-} ]]; then
        PYRIGHT_PYTHON_IGNORE_WARNINGS=1 pyright || code=1
    fi
    return "$code"
}

# run_pytest TIER FOLDER [ARGUMENT...]: each tier has a short temporary folder (paths of sockets must be short).
run_pytest() {
    local tier=$1 folder=$2
    shift 2
    if [[ ! -d $folder ]]; then
        printf 'there are no tests in %s yet\n' "$folder"
        return 0
    fi
    python -m pytest "$folder" -q --basetemp="$TMPDIR/$tier" --junitxml="$RESULTS/$tier.xml" "$@"
}

run_fast() { run_pytest fast tests/fast; }
run_dist() { run_pytest dist tests/dist; }
run_clients() { run_pytest clients tests/clients; }
run_cluster() { run_pytest cluster tests/cluster; }
run_quickstart() { run_pytest quickstart tests/quickstart -m "not long" -s; }

run_long() {
    local code=0
    run_pytest long tests/quickstart -m long -s --timeout 1800 || code=1
    python -m tests.quickstart.runs runs/long
    return "$code"
}

# Prints each process that this run started and that still lives: its environment names the run.
marked_processes() {
    local folder pid command
    for folder in /proc/[0-9]*; do
        pid=${folder#/proc/}
        grep -zqsx "GYRE_TEST_RUN=$GYRE_TEST_RUN" "$folder/environ" || continue
        # This script's own subshells carry the mark while they run a program, and are none of the tests' processes.
        [[ $(ps -o pgid= -p "$pid") -ne $OWN_GROUP || $(ps -o ppid= -p "$pid") -eq 1 ]] || continue
        command=$(tr '\0' ' ' <"$folder/cmdline" | cut -c 1-160)
        [[ -z $command ]] || printf 'process %s: %s\n' "$pid" "$command"
    done 2>/dev/null
}

# A sandbox may have an environment of its own; one whose parent is gone is nobody's.
orphan_sandboxes() {
    ps -eo pid=,ppid=,comm= | awk '$2 == 1 && $3 == "bwrap" { print "sandbox", $1 }'
}

list_shared_memory() { find /dev/shm -maxdepth 1 -name 'gyre*' -printf 'shared memory %p\n' 2>/dev/null; }

list_temporary() { find "$TMPDIR" -mindepth 1 -maxdepth 1 -printf 'temporary %p\n'; }

leftovers() {
    marked_processes
    { orphan_sandboxes && list_shared_memory; } | grep -vxFf "$RESULTS/before" || true
}

# Ends get a moment: a detached process may still be on its way out.
check_leaks() {
    local tier end=$((SECONDS + LEAK_WAIT_S)) found
    for tier in "$@"; do rm -rf "${TMPDIR:?}/$tier"; done
    while found=$(leftovers && list_temporary) && [[ -n $found ]] && ((SECONDS < end)); do sleep 0.5; done
    [[ -n $found ]] || return 0
    printf 'left behind by the tests:\n%s\n' "$found"
    return 1
}

# Prints the counts of all tiers in one line, the last of the run.
count_tests() {
    python - "$RESULTS" "$@" <<'PYTHON'
import pathlib
import sys
import xml.etree.ElementTree as ElementTree

passed = skipped = 0
failed = len(sys.argv) - 2  # Tiers that failed count at least once each, also where no test did.
for path in pathlib.Path(sys.argv[1]).glob("*.xml"):
    for suite in ElementTree.parse(path).getroot().iter("testsuite"):
        count = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
        bad = count["failures"] + count["errors"]
        passed += count["tests"] - bad - count["skipped"]
        skipped += count["skipped"]
        failed += max(0, bad - (path.stem in sys.argv[2:]))
print(f"total: {passed} passed, {failed} failed, {skipped} skipped")
PYTHON
}

check_names() {
    local name
    for name in "$@"; do
        [[ " ${TIERS[*]} long " == *" $name "* ]] || die "no tier $name; there are: ${TIERS[*]} long"
    done
}

cd "$CHECKOUT"
check_names "$@"
enter_environment
[[ $# -gt 0 ]] || set -- "${TIERS[@]}"

GYRE_TEST_RUN=$(date +%s)-$$
OWN_GROUP=$(ps -o pgid= -p $$)
TMPDIR=$(mktemp -d /tmp/gt.XXXXXX)
RESULTS=$(mktemp -d /tmp/gr.XXXXXX)
export GYRE_TEST_RUN TMPDIR
trap 'rm -rf "$TMPDIR" "$RESULTS"' EXIT
{ printf '%s\n' '-'; orphan_sandboxes; list_shared_memory; } >"$RESULTS/before"

for tier in "$@"; do run_tier "$tier"; done
check_leaks "$@" || FAILED+=(leaks)
printf '\n'
((${#FAILED[@]} == 0)) || printf 'failed: %s\n' "${FAILED[*]}"
printf 'all tiers: %d s\n' "$SECONDS"
count_tests ${FAILED[@]+"${FAILED[@]}"}
((${#FAILED[@]} == 0))
