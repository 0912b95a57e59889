#!/usr/bin/env python3
"""Build a wheel for each platform: the wheel without kernels, plus the platform's libraries of kernels.

    python scripts/wheels.py WHEEL FOLDER [PLATFORM ...]     all platforms by default

WHEEL is the `py3-none-any` wheel, which works everywhere but needs Numba. Compiling the kernels of all platforms takes
about an hour on two cores. Compiled kernels stay in the cache folder, so the next build takes only a minute.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from subprocess import CalledProcessError

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from llmrun.base.compiled import library  # noqa: E402
from llmrun.base.errors import LlmrunError  # noqa: E402
from scripts.kernel_libraries import PLATFORMS, Platform, build_libraries  # noqa: E402
from scripts.kernel_list import known_shapes  # noqa: E402

_LIBRARIES = library.folder().relative_to(ROOT).as_posix()
_EPOCH = 315_532_800  # 1980, the first year that a zip file can hold


def platform_wheel(plain: Path, libraries: Path, platform: Platform, folder: Path) -> Path:
    """Write the wheel of a platform into `folder`, and return its path.

    plain      the wheel without kernels
    libraries  the folder with the platform's libraries and their index
    """
    with zipfile.ZipFile(plain) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
        attributes = {info.filename: info.external_attr for info in archive.infolist()}
    record = next(name for name in files if name.endswith(".dist-info/RECORD"))
    information = record.removesuffix("RECORD")
    del files[record]
    files[f"{information}WHEEL"] = _tagged(files[f"{information}WHEEL"], platform.wheel_tag)
    files[f"{information}METADATA"] = _metadata(files[f"{information}METADATA"], platform)
    files |= {f"{_LIBRARIES}/{path.name}": path.read_bytes() for path in sorted(libraries.iterdir())}
    files[record] = _record(files, record)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / plain.name.replace("-any.whl", f"-{platform.wheel_tag}.whl")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, data in sorted(files.items(), key=lambda file: (file[0].startswith(information), file[0])):
            info = zipfile.ZipInfo(name, _date())
            info.external_attr = attributes.get(name, 0o100644 << 16)
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, data, compresslevel=9)
    return path


def _tagged(text: bytes, tag: str) -> bytes:
    """Return the contents of the file WHEEL for a platform tag, which may be a set of tags joined by dots."""
    lines = [line for line in text.decode().splitlines() if line and not line.startswith(("Tag:", "Root-Is-Purelib:"))]
    lines += ["Root-Is-Purelib: false", *(f"Tag: py3-none-{one}" for one in tag.split("."))]
    return ("\n".join(lines) + "\n").encode()


def _metadata(text: bytes, platform: Platform) -> bytes:
    """Return the metadata of a wheel. Dependencies without wheels for the platform become the extra `formats`."""
    if not platform.lacks:
        return text
    lines = text.decode().split("\n")
    for number, line in enumerate(lines):
        found = re.match(r"Requires-Dist: ([\w-]+)", line)
        if found and found[1] in platform.lacks:
            lines[number] = f"Provides-Extra: formats\n{line}; extra == 'formats'"
    return "\n".join(lines).encode()


def _record(files: dict[str, bytes], record: str) -> bytes:
    lines = []
    for name, data in sorted(files.items()):
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(data)}")
    return ("\n".join([*lines, f"{record},,"]) + "\n").encode()


def _date() -> tuple[int, int, int, int, int, int]:
    found = time.gmtime(max(int(os.environ.get("SOURCE_DATE_EPOCH", _EPOCH)), _EPOCH))
    return found.tm_year, found.tm_mon, found.tm_mday, found.tm_hour, found.tm_min, found.tm_sec


def _show_progress(what: str, done: int, count: int) -> None:
    if sys.stderr.isatty():
        print(f"\rcompiling kernels: {what}: {done}/{count}", end="\n" if done == count else "", file=sys.stderr)
    elif done in (0, count):
        print(f"compiling kernels: {what}: {done}/{count}", file=sys.stderr)


def main(plain: str, folder: str, *names: str) -> int:
    unknown = [name for name in names if name not in PLATFORMS]
    if unknown:
        print(f"error: unknown platform: {unknown[0]}; the platforms are {', '.join(PLATFORMS)}", file=sys.stderr)
        return 2
    platforms = [PLATFORMS[name] for name in names or PLATFORMS]
    with tempfile.TemporaryDirectory() as libraries:
        try:
            build_libraries(platforms, Path(libraries), known_shapes(), _show_progress)
        except LlmrunError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        except CalledProcessError as error:  # zig has printed the reason, and the command is long
            print(f"error: cannot link kernels: zig failed with exit status {error.returncode}", file=sys.stderr)
            return 1
        for platform in platforms:
            print(platform_wheel(Path(plain), Path(libraries) / platform.name, platform, Path(folder)))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
