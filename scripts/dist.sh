#!/usr/bin/env bash
# Packs a built binary into dist/: a tarball, a .deb and a wheel, for this machine's architecture.
# Usage: scripts/dist.sh BINARY
set -euo pipefail
binary=$(realpath "${1:?usage: scripts/dist.sh BINARY}")
cd "$(dirname "$0")/.."
for tool in strip readelf dpkg-deb python3; do
    command -v $tool >/dev/null || {
        echo "$tool is needed to make packages (apt-get install binutils dpkg python3)" >&2
        exit 1
    }
done
version=$("$binary" --version | cut -d' ' -f2)
machine=$(uname -m)
# Files are as old as the commit, so that the same sources give the same packages.
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || date +%s)}
export SOURCE_DATE_EPOCH

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p dist
rm -f dist/warpdraft-*.tar.gz dist/warpdraft_*.deb dist/warpdraft-*.whl

name=warpdraft-$version-$machine-linux
stage=$work/$name
mkdir -p "$stage/completions"
cp "$binary" "$stage/warpdraft"
cp README.md LICENSE "$stage/"
cp model/demo/LICENSES "$stage/LICENSES-demo-model"
strip "$stage/warpdraft"
"$binary" completions bash >"$stage/completions/warpdraft.bash"
"$binary" completions zsh >"$stage/completions/_warpdraft"
"$binary" completions fish >"$stage/completions/warpdraft.fish"
"$binary" manual "$stage/man/man1"

# The oldest C library that has every symbol which the binary asks for: what machines the packages are for.
glibc=$(readelf --dyn-syms --wide "$stage/warpdraft" | grep -o 'GLIBC_[0-9.]*' | cut -d_ -f2 | sort -V | tail -1)
echo "$name needs glibc $glibc or newer"

# Every file with the same time and owner.
find "$work" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +
chmod -R u=rwX,go=rX "$stage"
tar -C "$work" --sort=name --owner=0 --group=0 --numeric-owner -cf - "$name" | gzip -9n >"dist/$name.tar.gz"

root=$work/deb
share=$root/usr/share
mkdir -p "$root/DEBIAN" "$root/usr/bin" "$share/doc/warpdraft" "$share/man/man1" "$share/bash-completion/completions" \
    "$share/zsh/vendor-completions" "$share/fish/vendor_completions.d"
cp "$stage/warpdraft" "$root/usr/bin/"
cp "$stage/README.md" "$share/doc/warpdraft/"
cp "$stage/LICENSE" "$share/doc/warpdraft/copyright"
cp "$stage/LICENSES-demo-model" "$share/doc/warpdraft/"
cp "$stage"/man/man1/*.1 "$share/man/man1/"
gzip -9n "$share"/man/man1/*.1
cp "$stage/completions/warpdraft.bash" "$share/bash-completion/completions/warpdraft"
cp "$stage/completions/_warpdraft" "$share/zsh/vendor-completions/"
cp "$stage/completions/warpdraft.fish" "$share/fish/vendor_completions.d/"
architecture=$(dpkg --print-architecture)
cat >"$root/DEBIAN/control" <<CONTROL
Package: warpdraft
Version: $version
Architecture: $architecture
Maintainer: warpdraft maintainers <maintainers@warpdraft.invalid>
Installed-Size: $(du -sk "$root/usr" | cut -f1)
Depends: libc6 (>= $glibc), libgcc-s1
Section: science
Priority: optional
Description: Qwen3, Qwen2 and Llama inference on NVIDIA GPUs and CPUs
 Generates text, chats, and answers files of requests with these models. A
 small model comes with the program; a GPU is used if there is one, through
 the driver alone.
CONTROL
find "$root" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +
chmod -R u=rwX,go=rX "$root"
dpkg-deb --build --root-owner-group -Zxz "$root" "dist/warpdraft_${version}_$architecture.deb" >/dev/null

python3 scripts/wheel.py "$stage" "$version" "manylinux_${glibc/./_}_$machine" dist
ls -l dist/warpdraft*
