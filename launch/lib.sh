# shellcheck shell=bash
# The environment of gyre: where it lies, how it is built, how a shell enters it. Sourced by the scripts beside it.
#
# It lies outside the checkout, in a folder named by a hash of the requirements, so that every clone with the same
# pins shares it. Two virtual environments: main/ (SGLang, Megatron, gyre) and harness/ (agent programs, whose
# libraries want other versions). Virtual environments cannot be moved, so a build happens in place and is
# believed only when its last act, the stamp `.complete`, is there; anything less is rebuilt.
#
# Settings: GYRE_ENV_ROOT (where environments lie), GYRE_TORCH_INDEX (a package index of CPU builds of torch).

set -euo pipefail

CHECKOUT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
ENV_ROOT=${GYRE_ENV_ROOT:-${XDG_CACHE_HOME:-$HOME/.cache}/gyre}
NEEDED_KB=$((4 * 1024 * 1024))
LOCK_WAIT_S=1800
STEP="" # What is being done, for the trap.
STEP_LOG=""

say() { printf 'gyre: %s\n' "$*" >&2; }

die() {
    trap - ERR
    say "$*"
    exit 1
}

# Names the step that failed and shows the end of its log; set as the ERR trap while the environment is built.
tell_failure() {
    say "failed: ${STEP:-set-up}"
    if [[ -s $STEP_LOG ]]; then
        tail -n 20 "$STEP_LOG" >&2
        say "whole log: $STEP_LOG"
    fi
}

# step WHAT COMMAND...: run it with its output in the log; a line now and then shows that it is alive.
step() {
    STEP=$1
    shift
    local began=$SECONDS next=$((SECONDS + 15)) job code=0
    printf '\n== %s: %s\n' "$STEP" "$*" >>"$STEP_LOG"
    "$@" >>"$STEP_LOG" 2>&1 9>&- &
    job=$!
    # An interrupt of the terminal reaches the command too; one sent to this shell alone must be passed on.
    # shellcheck disable=SC2064
    trap "kill $job 2>/dev/null; exit 130" INT TERM
    while kill -0 "$job" 2>/dev/null; do
        sleep 0.2
        if ((SECONDS >= next)); then
            say "  $STEP ... $((SECONDS - began)) s"
            next=$((SECONDS + 15))
        fi
    done
    wait "$job" || code=$?
    trap - INT TERM
    if ((code == 0)); then
        say "  $STEP: $((SECONDS - began)) s"
    fi
    return "$code"
}

is_gpu_machine() { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; }

# Python 3.11 is what the pins were chosen for: wheels and SGLang's and Megatron's own limits.
find_python() {
    local candidate
    for candidate in python3.11 python3; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    die "Python 3.11 was not found. Debian 12: apt-get install python3 python3-venv"
}

# Prints the name of the environment: the pins, the Python and nothing else decide it.
environment_key() {
    local python=$1
    {
        "$python" -c 'import sys; print(sys.version)'
        cat "$REQUIREMENTS" "$CHECKOUT/requirements-harness.txt"
    } | sha256sum | cut -c 1-12
}

# ensure_packages PYTHON: what comes from the distribution and not from PyPI.
ensure_packages() {
    local python=$1 missing=()
    command -v bwrap >/dev/null || missing+=(bubblewrap)
    command -v flock >/dev/null || missing+=(util-linux)
    # Debian splits ensurepip off its Python.
    "$python" -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
    ((${#missing[@]})) || return 0
    if [[ $(id -u) != 0 ]] || ! command -v apt-get >/dev/null; then
        die "missing packages: ${missing[*]}. As root: apt-get update && apt-get install --no-install-recommends" \
            "${missing[*]}"
    fi
    mkdir -p "$ENV_ROOT"
    STEP_LOG=$ENV_ROOT/packages.log
    export DEBIAN_FRONTEND=noninteractive
    step "package lists" apt-get update
    step "packages ${missing[*]}" apt-get install -y --no-install-recommends "${missing[@]}"
}

# Fails before the first download instead of in the middle.
check_space() {
    local free_kb
    free_kb=$(df -Pk "$ENV_ROOT" | awk 'NR == 2 { print $4 }')
    ((free_kb >= NEEDED_KB)) || die "$ENV_ROOT has $((free_kb / 1024)) MB free; the environment needs" \
        "$((NEEDED_KB / 1024)) MB. Free some, or set GYRE_ENV_ROOT to a folder elsewhere."
}

# section NAME FILE: the pins of one section; a section may have several parts.
section() { awk -v want="$1" '/^# section:/ { on = ($3 == want); next } on && /^[^#]/' "$2"; }

# A CUDA build of torch on a CPU machine would bring gigabytes of libraries with the next pip call.
check_torch_is_cpu() {
    local cuda
    cuda=$("$1/bin/python" -c "
import glob, runpy, sys
print(runpy.run_path(glob.glob(sys.prefix + '/lib/python3*/site-packages/torch/version.py')[0])['cuda'])")
    [[ $cuda == None ]] || die "pip's default torch is a CUDA build here ($cuda), and this machine has no GPU." \
        "Set GYRE_TORCH_INDEX to a package index of CPU builds of torch and start again."
}

install_cpu() {
    local venv=$1 pins=$2
    local -a index=()
    [[ -z ${GYRE_TORCH_INDEX:-} ]] || index=(--index-url "$GYRE_TORCH_INDEX")
    # --no-deps: should it be a CUDA build after all, only its own wheel came, not the libraries it asks for.
    step "torch" "$venv/bin/python" -m pip install ${index[@]+"${index[@]}"} --no-deps -r "$pins/torch"
    STEP="check of torch"
    check_torch_is_cpu "$venv"
    step "libraries" "$venv/bin/python" -m pip install -c "$pins/torch" -c "$pins/held" -r "$pins/deps"
    check_torch_is_cpu "$venv"
    step "SGLang" "$venv/bin/python" -m pip install --no-deps -r "$pins/no-deps"
    step "check of the imports" "$venv/bin/python" -c "import torch, megatron.core, zmq, msgspec, rich"
}

build_main() {
    local venv=$1 pins=$2 python=$3 name
    step "main environment" "$python" -m venv "$venv"
    if [[ $MACHINE == gpu ]]; then
        step "libraries (about 15 GB)" "$venv/bin/python" -m pip install -r "$REQUIREMENTS"
        return
    fi
    for name in torch deps no-deps held; do section "$name" "$REQUIREMENTS" >"$pins/$name"; done
    install_cpu "$venv" "$pins"
}

build_harness() {
    local venv=$1 python=$2
    step "harness environment" "$python" -m venv "$venv"
    step "harness" "$venv/bin/python" -m pip install -r "$CHECKOUT/requirements-harness.txt"
    step "check of the harness" "$venv/bin/python" -c "import importlib.metadata as m; print(m.version('mini-swe-agent'))"
}

build_environment() {
    local python=$1
    say "building the environment in $ENVIRONMENT (about 3 GB; once for these pins)"
    STEP="removal of an incomplete build"
    rm -rf "$ENVIRONMENT"
    mkdir -p "$ENVIRONMENT/pins"
    STEP_LOG=$ENVIRONMENT/build.log
    STEP="check of the disk"
    check_space
    build_main "$ENVIRONMENT/main" "$ENVIRONMENT/pins" "$python"
    build_harness "$ENVIRONMENT/harness" "$python"
    date -u +%FT%TZ >"$ENVIRONMENT/.complete"
    say "environment ready after $SECONDS s"
}

# Builds the environment unless it is there. One process builds, others wait for it.
ensure_environment() {
    local python
    python=$(find_python)
    MACHINE=cpu
    REQUIREMENTS=$CHECKOUT/requirements-cpu.txt
    if is_gpu_machine; then
        # No test has ever run this branch: the project's own machines have no GPU.
        MACHINE=gpu
        REQUIREMENTS=$CHECKOUT/requirements.txt
    fi
    ENVIRONMENT=$ENV_ROOT/$(environment_key "$python")
    trap tell_failure ERR
    set -E
    ensure_packages "$python"
    if [[ ! -e $ENVIRONMENT/.complete ]]; then
        mkdir -p "$ENV_ROOT"
        exec 9>"$ENVIRONMENT.lock"
        if ! flock -n 9; then
            say "another start builds the environment; waiting for it"
            flock -w "$LOCK_WAIT_S" 9 || die "still being built after $LOCK_WAIT_S s: $ENVIRONMENT"
        fi
        [[ -e $ENVIRONMENT/.complete ]] || build_environment "$python"
        exec 9>&-
    fi
    set +E
    trap - ERR
}

# Exports what every process of gyre is started with.
enter_environment() {
    ensure_environment
    local paths=$CHECKOUT
    if [[ $MACHINE == cpu ]]; then
        # Stand-ins for kernel packages that exist for GPUs only.
        paths+=:$CHECKOUT/launch/cpu
        export SGLANG_USE_CPU_ENGINE=1
        # One thread a rank: with more, ranks that share cores are about ten times slower.
        export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    fi
    export PATH=$ENVIRONMENT/main/bin:$PATH
    export VIRTUAL_ENV=$ENVIRONMENT/main
    export PYTHONPATH=$paths${PYTHONPATH:+:$PYTHONPATH}
    export GYRE_HARNESS_PYTHON=$ENVIRONMENT/harness/bin/python
    # Models are folders; nothing is looked up on a hub.
    export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false LITELLM_LOCAL_MODEL_COST_MAP=True
    # A restart of the ranks must not find addresses of the ranks before.
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    # Torch's compiler makes this folder even where nothing is compiled; by default it would lie in TMPDIR.
    export TORCHINDUCTOR_CACHE_DIR=$ENVIRONMENT/torchinductor
    # What libraries say about absent GPUs and absent optional packages, once a process.
    local quiet="Transformer Engine and Apex are not|Apex is not installed|Only CUDA|Triton is not supported"
    local warnings=${PYTHONWARNINGS:-}
    while IFS= read -r message; do
        warnings+=${warnings:+,}"ignore:$message:UserWarning"
    done < <(tr '|' '\n' <<<"$quiet")
    export PYTHONWARNINGS=$warnings
}
