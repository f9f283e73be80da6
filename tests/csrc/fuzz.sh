#!/bin/sh
# libFuzzer over what comes over the wire, under the address and undefined sanitizers. Called from
# the project's root with the Python to use, and for how many seconds.
set -eu
python=$1
seconds=$2
tree=$PWD/build/fuzz
export PATH="$(dirname "$(realpath -s "$python")"):$PATH"
if ! command -v clang++ >/dev/null; then
    echo "libFuzzer: skipped, there is no clang (Debian: apt-get install clang)"
    exit 0
fi
"$python" -m pip install -q --disable-pip-version-check 'cmake>=3.22' ninja
CC=clang CXX=clang++ cmake -S . -B "$tree" -GNinja -DCMAKE_BUILD_TYPE=None -DCMAKE_CXX_FLAGS="-O1 -g" \
    -DGPUDIST_CUDA=OFF -DGPUDIST_PYTHON=OFF -DGPUDIST_SANITIZE=address,undefined -DGPUDIST_FUZZ=ON \
    >/dev/null
cmake --build "$tree" --target fuzz_messages
mkdir -p "$tree/corpus"
"$tree/fuzz_messages" -max_total_time="$seconds" -max_len=2048 "$tree/corpus"
