#!/bin/sh
# clang-tidy over the C++ core and the bindings. Called from the project's root with the Python to
# use.
set -eu
python=$1
tree=$PWD/build/tidy
export PATH="$(dirname "$(realpath -s "$python")"):$PATH"
cmake -S . -B "$tree" -GNinja -DCMAKE_EXPORT_COMPILE_COMMANDS=ON -DGPUDIST_CUDA=OFF \
    -DGPUDIST_PYTHON=OFF -DGPUDIST_TESTS=ON >/dev/null
# The bindings are left to the compiler: most of what they consist of is nanobind's.
ls csrc/*/*.cpp tests/csrc/fuzz_messages.cpp | grep -v bindings | xargs -P 2 -n 3 clang-tidy -p "$tree" --quiet
