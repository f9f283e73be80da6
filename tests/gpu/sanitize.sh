#!/bin/sh
# Run the tests of the kernels under compute-sanitizer's memcheck and racecheck. Called from the
# project's root with the Python to use, whose torch sees the GPU.
set -eu
python=$1
sanitizer=${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer

stop() {
    echo "error: nothing is checked: $1" >&2
    exit 3
}

test -x "$sanitizer" ||
    stop "there is no $sanitizer; set CUDA_HOME to a CUDA toolkit that has one"
"$python" -c 'import torch; raise SystemExit(not torch.cuda.is_available())' ||
    stop "there is no GPU that the torch of $python sees"
${MAKE:-make} gpu-build GPU_PYTHON="$python"

# Every tensor is an allocation of its own, so that memcheck knows where it ends.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1

check() { # tool and its own options
    echo "compute-sanitizer, $1"
    "$sanitizer" --tool "$@" --kernel-name kns=combine --error-exitcode 1 --launch-timeout 120 \
        "$python" -m pytest -q -rs -W default -p no:cacheprovider \
        tests/gpu/test_kernels.py tests/gpu/test_random_halos.py
}

# Of the kernels' accesses: CUDA's calls have their errors checked where they are made.
check memcheck --report-api-errors no
# It knows of hazards in shared memory, of which the kernels have none so far.
check racecheck
