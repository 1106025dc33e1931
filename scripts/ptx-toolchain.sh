#!/usr/bin/env bash
# Makes sure that a Rust toolchain with the sources of `core` is there: the device build compiles them.
# First rustup's component; where that cannot be had, Debian's matched pair.
set -euo pipefail

has_core() { [ -d "$1/lib/rustlib/src/rust/library/core" ] && [ -x "$1/bin/rustc" ] && [ -x "$1/bin/cargo" ]; }

if [ -n "${CUDA_BUILDER_TOOLCHAIN:-}" ]; then
    has_core "$CUDA_BUILDER_TOOLCHAIN" && exit 0
    echo "CUDA_BUILDER_TOOLCHAIN=$CUDA_BUILDER_TOOLCHAIN has no bin/rustc, bin/cargo and library sources" >&2
    exit 1
fi
has_core "$(rustc --print sysroot)" && exit 0
has_core /usr && exit 0

if command -v rustup >/dev/null && rustup component add rust-src >/dev/null 2>&1; then
    exit 0
fi
if command -v apt-get >/dev/null; then
    sudo=""
    [ "$(id -u)" = 0 ] || sudo="sudo"
    echo "installing rustc-web, cargo-web and rust-web-src for the device build" >&2
    export DEBIAN_FRONTEND=noninteractive
    $sudo apt-get update -qq >&2
    $sudo apt-get install -y -qq --no-install-recommends rustc-web cargo-web rust-web-src >&2
fi
has_core /usr && exit 0
echo "the device build needs the sources of core: run 'rustup component add rust-src'" >&2
exit 1
