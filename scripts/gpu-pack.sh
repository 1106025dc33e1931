#!/usr/bin/env bash
# Builds what runs on a machine with a GPU, and packs it into dist/: the binary without the bundled model (the repository has it),
# the GPU tests, and the comparison's helper. Takes no compiler along.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo build --release --package warpdraft --no-default-features --features bench
rm -rf dist/gpu && mkdir -p dist/gpu
cp target/release/warpdraft dist/gpu/
cargo build --release --package benches --example score
cp target/release/examples/score dist/gpu/
tests=$(cargo test --release --package integration-tests --test gpu --no-run --message-format=json |
    python3 -c 'import json, sys
for line in sys.stdin:
    message = json.loads(line)
    if message.get("executable") and message["target"]["name"] == "gpu":
        print(message["executable"])')
cp "$tests" dist/gpu/gpu-tests
strip dist/gpu/*
# The default binary again, where `make demo` leaves it.
cargo build --release --package warpdraft
du -sh dist/gpu
cat <<'TEXT'
Copy the repository, dist/gpu with it, to the machine with the GPU, and there, in its root:
    scripts/gpu-check.sh all       tests, compute-sanitizer, and the comparison with transformers
See CONTRIBUTING.md.
TEXT
