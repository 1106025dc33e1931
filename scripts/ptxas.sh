#!/usr/bin/env bash
# Puts ptxas at FOLDER/ptxas, from the wheel nvidia-cuda-nvcc.
# Usage: scripts/ptxas.sh FOLDER
set -euo pipefail
folder=${1:?usage: scripts/ptxas.sh FOLDER}
mkdir -p "$folder"
if ! python3 -m pip --version >/dev/null 2>&1; then
    sudo=""
    [ "$(id -u)" = 0 ] || sudo="sudo"
    $sudo apt-get update -qq >&2 && $sudo apt-get install -y -qq --no-install-recommends python3 python3-pip >&2
fi
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
