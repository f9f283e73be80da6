#!/bin/sh
# Run the C++ core under the sanitizers: by its own tests, with ranks as threads, and by the tests of
# transports, with ranks as processes. Called from the project's root with the Python to use, and
# with `core` for the first part alone, which takes a minute.
set -eu
python=$1
part=${2:-all}
root=$PWD
tree=$root/build/sanitize
export PATH="$(dirname "$(realpath -s "$python")"):$PATH"
# Of a make above, whose jobs ninja cannot share through the shell.
unset MAKEFLAGS
export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
# The interpreter and torch keep memory until exit.
export ASAN_OPTIONS=detect_leaks=0
export TSAN_OPTIONS=halt_on_error=1:suppressions=$root/tests/csrc/thread_sanitizer.txt

build() { # tree, sanitizers, optimization, further arguments
    folder=$1 sanitizers=$2 flags="$3 -g1 -DNDEBUG"
    shift 3
    cmake -S . -B "$folder" -GNinja -DCMAKE_BUILD_TYPE=None -DCMAKE_CXX_FLAGS="$flags" \
        -DGPUDIST_CUDA=OFF -DGPUDIST_SANITIZE="$sanitizers" "$@" >/dev/null
    cmake --build "$folder"
}

build "$tree/thread" thread -O1 -DGPUDIST_PYTHON=OFF -DGPUDIST_TESTS=ON
if [ "$part" = core ]; then
    # To optimize with these sanitizers takes longer than all that the core's tests do.
    build "$tree/address" address,undefined -O0 -DGPUDIST_PYTHON=OFF -DGPUDIST_TESTS=ON
else
    build "$tree/address" address,undefined -O1 -DGPUDIST_PYTHON=ON -DGPUDIST_TESTS=ON \
        -DPython_EXECUTABLE="$python" -Dnanobind_DIR="$("$python" -m nanobind --cmake_dir)"
fi

# Its shadow memory does not fit every random layout of an address space.
if setarch -R true 2>/dev/null; then
    echo "test_core, thread sanitizer"
    setarch -R "$tree/thread/test_core" threads
else
    echo "test_core, thread sanitizer: left out, since this system does not let setarch fix addresses"
fi
echo "test_core, address and undefined sanitizers"
if [ "$part" = core ]; then
    ASAN_OPTIONS=detect_leaks=1 "$tree/address/test_core" quick
    exit 0
fi
ASAN_OPTIONS=detect_leaks=1 "$tree/address/test_core"

echo "transport tests, address and undefined sanitizers"
# A copy of the project, so that the module in use stays as it is.
copy=$tree/project
rm -rf "$copy"
mkdir -p "$copy"
cp -r gpudist csrc tests pyproject.toml "$copy"
rm -f "$copy"/gpudist/_native*.so
cp "$tree"/address/_native*.so "$copy/gpudist"
cd "$copy"
# Compilers run without what follows.
"$python" -c 'from tests.doubles.build import library; print(library())'
libraries=
for name in libasan.so libubsan.so libstdc++.so; do
    libraries="$libraries $(g++ -print-file-name=$name)"
done
export LD_PRELOAD="$libraries"
export OMP_NUM_THREADS=1
"$python" -c 'from gpudist import _native; print(_native.__file__)'
"$python" -m pytest -q -p no:cacheprovider -k "host or nccl" \
    tests/transport tests/native/test_mismatch.py tests/native/test_packing.py
# An allocator that is asked for too much ends the process here.
"$python" -m pytest -q -p no:cacheprovider -k "not impossible" tests/test_recycling.py
"$python" -m tests.native.stress --plans 50
"$python" -m tests.faults.chaos --transport host --fault killed --count 2
