#!/usr/bin/env bash
# cuda_std, its macros and cuda_builder need nothing else of this repository: a copy of their folders alone is built,
# and tests of the copy run.
set -euo pipefail
cd "$(dirname "$0")/.."

copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
crates=(gpu-kernels/cuda_std host/cuda_builder)
git ls-files -z --cached --others --exclude-standard "${crates[@]}" | xargs -0 cp --parents -t "$copy"
# The versions that everything else here is tested with.
cp Cargo.lock "$copy/gpu-kernels/cuda_std/"

cd "$copy/gpu-kernels/cuda_std"
export CARGO_TARGET_DIR="$copy/target"
cargo=${CARGO:-cargo}
if $cargo tree --edges all --prefix none --format '{p}' | grep -F '(/' | grep -vE '^(cuda_std|cuda_std_macros|cuda_builder) '; then
    echo "cuda_std depends on another crate of this repository" >&2
    exit 1
fi
$cargo test --quiet --test races --test shrink
