#!/bin/sh
# clang-tidy over the C++ core. Called from the project's root with the Python to use, and with
# `quick` to leave out the static analyzer, which takes seven times as long as all other checks.
set -eu
python=$1
# Without the analyzer, warnings in system headers are not suppressed.
checks=
[ "${2:-}" = quick ] && checks='--checks=-clang-analyzer-* --extra-arg=-Wno-deprecated-declarations'
tree=$PWD/build/tidy
export PATH="$(dirname "$(realpath -s "$python")"):$PATH"
cmake -S . -B "$tree" -GNinja -DCMAKE_EXPORT_COMPILE_COMMANDS=ON -DCMAKE_UNITY_BUILD=OFF \
    -DGPUDIST_CUDA=OFF -DGPUDIST_PYTHON=OFF -DGPUDIST_TESTS=ON >/dev/null
# The bindings are left to the compiler: most of what they consist of is nanobind's.
ls csrc/*/*.cpp tests/csrc/fuzz_messages.cpp | grep -v bindings | xargs -P 2 -n 3 clang-tidy $checks -p "$tree" --quiet
