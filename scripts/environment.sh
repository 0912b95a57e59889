# Sourced by the other scripts. `prepare EXTRA` creates .venv and installs llmrun with an extra into it.
# It requires only a POSIX shell and Python 3.11 to 3.14 with venv; the extra "test" also requires a C++ compiler. A stamp
# file has the checksum of the files that an installation depends on, so later calls are quick. LLMRUN_VENV names a
# folder to use instead of .venv, so that several versions of Python can be used side by side.

set -eu
cd "$(dirname "$0")/.."
venv=${LLMRUN_VENV:-.venv}
unset LLMRUN_VENV # llmrun refuses variables that are not its settings
export LLMRUN_WARM=0 # no script leaves a background engine behind
python=$venv/bin/python

# A version manager's shim may be on PATH but fail, so every candidate is run once before it is chosen. Free-threaded
# builds (3.14t) are untested, and some libraries have no wheels for them.
find_python() {
    suitable='import sys, sysconfig, venv, ensurepip
sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14) or bool(sysconfig.get_config_var("Py_GIL_DISABLED")))'
    if [ -n "${PYTHON:-}" ]; then
        candidates=$PYTHON
    else
        candidates=$(
            IFS=:
            for name in python3 python3.13 python3.12 python3.14 python3.11; do
                for folder in $PATH; do
                    [ -x "${folder:-.}/$name" ] && printf '%s\n' "${folder:-.}/$name"
                done
            done
        ) || true
    fi
    while IFS= read -r candidate; do
        if [ -n "$candidate" ] && "$candidate" -c "$suitable" </dev/null >/dev/null 2>&1; then
            printf '%s\n' "$candidate"
            return
        fi
    done <<EOF
$candidates
EOF
    echo "error: no Python 3.11 to 3.14 with venv was found (except free-threaded): set PYTHON=/path/to/python3" >&2
    return 1
}

# `run_step WORDS COMMAND...` shows one progress line while the command runs, and the command's output only if it fails.
# The command runs in the foreground, so that Ctrl-C reaches it and all of its children. The clock runs in the background.
run_step() {
    words=$1
    shift
    log=$(mktemp)
    started=$(date +%s)
    ticker=
    if [ -t 2 ]; then
        tick "$words" "$started" &
        ticker=$!
    else
        printf '%s ...\n' "$words" >&2
    fi
    trap 'stop_ticking; echo >&2; rm -f "$log"; exit 130' INT TERM
    status=0
    "$@" >"$log" 2>&1 </dev/null || status=$?
    trap - INT TERM
    stop_ticking
    if [ "$status" -eq 0 ]; then
        printf '%s: done in %s\n' "$words" "$(clock "$started")" >&2
    else
        printf '%s: failed after %s\n' "$words" "$(clock "$started")" >&2
        cat "$log" >&2
    fi
    rm -f "$log"
    return "$status"
}

tick() {
    while kill -0 $$ 2>/dev/null; do
        printf '\r%s ... %s' "$1" "$(clock "$2")" >&2
        sleep 1
    done
}

stop_ticking() {
    [ -n "$ticker" ] || return 0
    kill "$ticker" 2>/dev/null || true
    wait "$ticker" 2>/dev/null || true
    printf '\r' >&2
}

clock() {
    seconds=$(($(date +%s) - $1))
    printf '%d:%02d' $((seconds / 60)) $((seconds % 60))
}

# GCC 12 optimizes AMX's tile configuration away, so a default build crashes at its first matrix product
# (llama.cpp #20824). Prints the CMake flags that prevent it, or nothing on other processors.
flags_without_amx() {
    flags="-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
    ! grep -q amx /proc/cpuinfo 2>/dev/null || printf '%s\n' "-DCMAKE_C_FLAGS='$flags' -DCMAKE_CXX_FLAGS='$flags'"
}

# The libraries that builds by scripts/build_cuda need at run time. CUDA 13.0 runs with driver 580 or later. A later 13.x
# might require a later driver for the same GPUs.
cuda_libraries="nvidia-cuda-runtime==13.0.* nvidia-cublas==13.0.*"

# Prints the version of llama-cpp-python that the extra "test" pins.
llama_cpp_requirement() {
    sed -n 's/^ *"\(llama-cpp-python[^"]*==[^"]*\)".*/\1/p' pyproject.toml
}

# pip's cache does not record the flags that a wheel was built with, so builds with flags do not use it.
install_llama_cpp_without_amx() {
    export CMAKE_ARGS="${CMAKE_ARGS:-} $(flags_without_amx)"
    run_step "compiling llama.cpp without AMX (a few minutes, once)" \
        "$python" -m pip install --no-cache-dir "$(llama_cpp_requirement)"
}

# `require_program PROGRAM PACKAGES` ends the script if a program is missing, and names the packages of Debian that have it.
require_program() {
    command -v "$1" >/dev/null || { echo "error: $1 is missing: sudo apt-get install $2" >&2; exit 1; }
}

# Unpacks Debian's Python for Arm in .venv-arm-python, without installing it on this machine.
unpack_python_for_arm() {
    require_program qemu-aarch64-static "qemu-user-static mmdebstrap"
    require_program mmdebstrap "qemu-user-static mmdebstrap"
    packages=python3,libstdc++6,zlib1g,libffi8
    [ "$(cat .venv-arm-python/packages 2>/dev/null)" != "$packages" ] || return 0
    rm -rf .venv-arm-python
    run_step "unpacking Python for Arm" mmdebstrap --architectures=arm64 --variant=extract \
        --include="$packages" bookworm .venv-arm-python
    printf '%s\n' "$packages" >.venv-arm-python/packages
}

prepare() {
    extra=$1
    if ! "$python" -c 'import pip' 2>/dev/null; then
        found=$(find_python)
        run_step "making $venv with $found" "$found" -m venv --clear "$venv"
    fi
    case $extra in
        dev | build) enough=$extra ;;
        test) enough="test dev" ;;
        *) enough="$extra test dev" ;;
    esac
    wanted=$(cksum <pyproject.toml)
    for installed in $enough; do
        [ "$(cat "$venv/installed-$installed" 2>/dev/null)" = "$wanted" ] && return
    done
    words="installing llmrun with the extra $extra"
    case $extra in
        test | dev)
            if [ -n "$(flags_without_amx)" ]; then
                install_llama_cpp_without_amx
            else
                words="$words (the first time this compiles llama.cpp: a few minutes)"
            fi
            ;;
    esac
    run_step "$words" "$python" -m pip install --editable ".[$extra]"
    printf '%s\n' "$wanted" >"$venv/installed-$extra"
}
