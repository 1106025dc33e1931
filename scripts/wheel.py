#!/usr/bin/env python3
"""Writes a wheel whose installation puts the binary on the PATH.

Usage: scripts/wheel.py STAGE VERSION PLATFORM FOLDER. STAGE holds what scripts/dist.sh has laid out, PLATFORM is the tag
for which the binary's C library is old enough.
"""

import base64
import hashlib
import os
import pathlib
import sys
import time
import zipfile

METADATA = """\
Metadata-Version: 2.4
Name: warpdraft
Version: {version}
Summary: Qwen3, Qwen2 and Llama inference with every GPU kernel written in Rust: the warpdraft command
License-Expression: Apache-2.0
License-File: LICENSE
License-File: LICENSES-demo-model
Requires-Python: >=3.8
Description-Content-Type: text/markdown

{readme}"""

WHEEL = """\
Wheel-Version: 1.0
Generator: warpdraft
Root-Is-Purelib: false
Tag: py3-none-{platform}
"""


def contents(stage: pathlib.Path, version: str, platform: str):
    """The files of the wheel: name, bytes and mode."""
    data, info = f"warpdraft-{version}.data", f"warpdraft-{version}.dist-info"
    yield f"{data}/scripts/warpdraft", (stage / "warpdraft").read_bytes(), 0o755
    for page in sorted((stage / "man/man1").iterdir()):
        yield f"{data}/data/share/man/man1/{page.name}", page.read_bytes(), 0o644
    readme = (stage / "README.md").read_text(encoding="utf-8")
    yield f"{info}/METADATA", METADATA.format(version=version, readme=readme).encode(), 0o644
    yield f"{info}/WHEEL", WHEEL.format(platform=platform).encode(), 0o644
    yield f"{info}/licenses/LICENSE", (stage / "LICENSE").read_bytes(), 0o644
    yield f"{info}/licenses/LICENSES-demo-model", (stage / "LICENSES-demo-model").read_bytes(), 0o644


def main() -> None:
    """Writes the wheel and says where."""
    stage, version, platform, folder = sys.argv[1:]
    path = pathlib.Path(folder) / f"warpdraft-{version}-py3-none-{platform}.whl"
    # A zip file knows no time before 1980.
    seconds = max(int(os.environ.get("SOURCE_DATE_EPOCH", "0")), 315_532_800)
    written = time.gmtime(seconds)[:6]
    record = []
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as wheel:

        def write(name: str, content: bytes, mode: int) -> None:
            entry = zipfile.ZipInfo(name, written)
            entry.external_attr = (0o100000 | mode) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            wheel.writestr(entry, content)

        for name, content, mode in contents(pathlib.Path(stage), version, platform):
            write(name, content, mode)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            record.append(f"{name},sha256={digest},{len(content)}")
        name = f"warpdraft-{version}.dist-info/RECORD"
        record.append(f"{name},,")
        write(name, ("\n".join(record) + "\n").encode(), 0o644)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
