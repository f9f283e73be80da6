#!/bin/sh
# Run the tests of the kernels under compute-sanitizer's memcheck and racecheck. Called from the
# project's root with the Python to use, whose torch sees the GPU; then, to run one of the two alone,
# its name and options of pytest's.
set -eu
python=$1
only=${2:-}
test $# -lt 2 && shift || shift 2
sanitizer=${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer

stop() {
    echo "error: nothing is checked: $1" >&2
    exit 3
}

test -x "$sanitizer" ||
    stop "there is no $sanitizer; set CUDA_HOME to a CUDA toolkit that has one"
"$python" -c 'import torch; raise SystemExit(not torch.cuda.is_available())' ||
    stop "there is no GPU that the torch of $python sees"
test -n "${GPU_BUILT:-}" || ${MAKE:-make} gpu-build GPU_PYTHON="$python"

# Every tensor is an allocation of its own, so that memcheck knows where it ends.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1

check() { # tool, and options of pytest's
    tool=$1
    shift
    test -z "$only" || test "$only" = "$tool" || return 0
    echo "compute-sanitizer, $tool"
    # Of the kernels' accesses: CUDA's calls have their errors checked where they are made.
    test "$tool" != memcheck || tool="$tool --report-api-errors no"
    # shellcheck disable=SC2086  # the tool and its own options
    "$sanitizer" --tool $tool --kernel-name kns=combine --error-exitcode 1 --launch-timeout 120 \
        "$python" -m pytest -q -rs -W default -p no:cacheprovider \
        tests/gpu/test_kernels.py tests/gpu/test_random_halos.py "$@"
}

check memcheck "$@"
# It knows of hazards in shared memory, of which the kernels have none so far.
check racecheck "$@"
