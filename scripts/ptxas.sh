#!/usr/bin/env bash
# Puts ptxas at FOLDER/ptxas, from the wheel nvidia-cuda-nvcc.
# Usage: scripts/ptxas.sh FOLDER
set -euo pipefail
folder=${1:?usage: scripts/ptxas.sh FOLDER}
mkdir -p "$folder"
download=$(mktemp -d)
trap 'rm -rf "$download"' EXIT
python3 -m pip download --quiet --no-deps --only-binary=:all: --dest "$download" nvidia-cuda-nvcc
python3 - "$download" "$folder/ptxas" <<'PYTHON'
import os, pathlib, sys, zipfile

wheel = next(pathlib.Path(sys.argv[1]).glob("*.whl"))
with zipfile.ZipFile(wheel) as files:
    name = next(n for n in files.namelist() if n.endswith("bin/ptxas"))
    pathlib.Path(sys.argv[2]).write_bytes(files.read(name))
os.chmod(sys.argv[2], 0o755)
PYTHON
