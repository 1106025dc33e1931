#!/usr/bin/env bash
# Installs every package of dist/ in a clean place, and runs it there with nothing else on the PATH and an empty home.
set -euo pipefail
cd "$(dirname "$0")/.."
only() {
    local files=(dist/$1)
    [ ${#files[@]} = 1 ] && [ -f "${files[0]}" ] || { echo "there is not one dist/$1; run make dist" >&2; exit 1; }
    realpath "${files[0]}"
}
tarball=$(only 'warpdraft-*.tar.gz')
deb=$(only 'warpdraft_*.deb')
wheel=$(only 'warpdraft-*.whl')
clean=$(mktemp -d)
trap 'rm -rf "$clean"' EXIT
texts=()

# check NAME FOLDER: runs FOLDER/warpdraft.
check() {
    local home=$clean/home-$1
    mkdir -p "$home"
    local run=(env -i HOME="$home" PATH="$2" warpdraft)
    local version text
    version=$(cd "$home" && "${run[@]}" --version)
    case $version in
        "warpdraft "[0-9]*) ;;
        *) echo "$1: --version says '$version'" >&2; exit 1 ;;
    esac
    text=$(cd "$home" && "${run[@]}" generate --model demo --max-tokens 8 --temperature 0 --device cpu --quiet impl)
    [ -n "$text" ] || { echo "$1: no text was generated" >&2; exit 1; }
    texts+=("$text")
    if readelf -S "$2/warpdraft" | grep -q '\.symtab'; then echo "$1: the binary is not stripped" >&2; exit 1; fi
    echo "$1: $version, runs"
}

present() {
    [ -s "$1" ] || { echo "$1 is missing or empty" >&2; exit 1; }
}

mkdir "$clean/tarball"
tar -C "$clean/tarball" --strip-components=1 -xzf "$tarball"
for file in README.md LICENSE completions/{warpdraft.bash,_warpdraft,warpdraft.fish} man/man1/warpdraft.1; do
    present "$clean/tarball/$file"
done
check tarball "$clean/tarball"

dpkg-deb -x "$deb" "$clean/deb"
for file in doc/warpdraft/copyright man/man1/warpdraft.1.gz bash-completion/completions/warpdraft; do
    present "$clean/deb/usr/share/$file"
done
check deb "$clean/deb/usr/bin"

python3 -m venv "$clean/venv" || { echo "a virtual environment is needed (apt-get install python3-venv)" >&2; exit 1; }
"$clean/venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps "$wheel"
check wheel "$clean/venv/bin"
"$clean/venv/bin/python" -m pip uninstall --quiet --yes warpdraft
[ ! -e "$clean/venv/bin/warpdraft" ] || { echo "wheel: uninstalling leaves the binary" >&2; exit 1; }

for text in "${texts[@]}"; do
    [ "$text" = "${texts[0]}" ] || { echo "the packages do not generate the same text" >&2; exit 1; }
done
