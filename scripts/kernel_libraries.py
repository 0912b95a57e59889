"""Compiles kernels and links them into one shared library per instruction level, for any platform.

LLVM can emit objects for every platform on one machine, and zig (from the package `ziglang`) links them. The same
sources and the same versions of the tools yield the same bytes.
"""

from __future__ import annotations

import functools
import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmrun import __version__
from llmrun.base.compiled.compiling import images_for
from llmrun.base.compiled.host import IDENTIFY
from llmrun.base.compiled.kernel import KernelName
from llmrun.base.compiled.levels import ARM, LEVELS, PORTABLE, X86, Level, target_of
from llmrun.base.compiled.library import BASE, INDEX
from llmrun.base.compiled.sources import digest_of_all
from scripts.kernel_list import Shape, kernels_of


@dataclass(frozen=True, slots=True)
class Platform:
    """A platform that wheels are built for.

    triple     LLVM's triple; kernels for one architecture are compiled once for all of its platforms
    suffix     the file name suffix of shared libraries
    wheel_tag  the platform tag of the wheel
    lacks      dependencies that have no wheels for the platform
    """

    name: str
    triple: str
    suffix: str
    wheel_tag: str
    lacks: tuple[str, ...] = ()

    @property
    def architecture(self) -> str:
        return self.triple.partition("-")[0]

    @property
    def levels(self) -> list[Level]:
        machines = X86 if self.architecture == "x86_64" else ARM
        return [level for level in LEVELS if level is PORTABLE or set(level.machines) & set(machines)]


_X86_LINUX, _ARM_LINUX = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"

# Libraries for Linux call nothing but memcpy and its relatives, so they work with any version of glibc and with musl.
PLATFORMS = {
    platform.name: platform
    for platform in (
        Platform("linux-x86_64", _X86_LINUX, ".so", "manylinux_2_17_x86_64.manylinux2014_x86_64"),
        Platform("musllinux-x86_64", _X86_LINUX, ".so", "musllinux_1_2_x86_64", lacks=("llguidance",)),
        Platform("linux-aarch64", _ARM_LINUX, ".so", "manylinux_2_17_aarch64.manylinux2014_aarch64"),
        Platform("windows-x86_64", "x86_64-pc-windows-msvc", ".dll", "win_amd64"),
        Platform("macos-arm64", "aarch64-apple-macosx11.0.0", ".dylib", "macosx_11_0_arm64"),
    )
}

Progress = Callable[[str, int, int], None]  # called with (library, number of kernels ready, number to compile)


def build_libraries(
    platforms: Sequence[Platform],
    folder: Path,
    shapes: Iterable[Shape],
    progress: Progress | None = None,
    kernels: Callable[[str, Iterable[Shape]], Sequence[KernelName]] = kernels_of,
) -> None:
    """Write the libraries and the index of each platform into a subfolder of `folder` with the platform's name.

    kernels  a function that returns the kernels of a library; tests pass their own to build small libraries

    Raises KernelCompileError, and CalledProcessError if zig fails.
    """
    shapes = sorted(shapes)
    files: dict[str, dict[str, dict[str, str]]] = {platform.name: {} for platform in platforms}
    for library, level, architecture in _libraries(platforms):
        having = [one for one in platforms if one.architecture == architecture and level in one.levels]
        targets = {one.name: target_of(level, one.triple) for one in having}
        names = [name for name in kernels(library, shapes) if name != IDENTIFY or architecture == "x86_64"]
        tell = None if progress is None else functools.partial(progress, f"{library}, {architecture}")
        images = images_for(names, list(dict.fromkeys(targets.values())), tell)
        for platform in having:
            path = folder / platform.name / f"{library}{platform.suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            link(platform, images[targets[platform.name]], path)
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            files[platform.name][library] = {"file": path.name, "sha256": digest}
    digest = digest_of_all()
    for platform in platforms:
        index = {"version": __version__, "sources": digest, "libraries": files[platform.name]}
        text = json.dumps(index, indent=1, sort_keys=True) + "\n"
        (folder / platform.name / INDEX).write_text(text, encoding="utf-8", newline="\n")


def _libraries(platforms: Sequence[Platform]) -> Iterator[tuple[str, Level, str]]:
    """Yield (library, level, architecture) for all libraries. Platforms with one architecture share objects."""
    for architecture in dict.fromkeys(platform.architecture for platform in platforms):
        levels = next(platform.levels for platform in platforms if platform.architecture == architecture)
        yield BASE, PORTABLE, architecture
        yield from ((level.name, level, architecture) for level in levels)


def link(platform: Platform, images: Mapping[KernelName, bytes], path: Path) -> None:
    """Link the objects of kernels into the shared library `path`. Raises CalledProcessError."""
    symbols = sorted(name.symbol for name in images)
    with tempfile.TemporaryDirectory() as folder:
        for name, image in images.items():
            (Path(folder) / f"{name.symbol}.o").write_bytes(image)
        _LINKERS[platform.suffix](platform, symbols, Path(folder), path.name)
        path.write_bytes((Path(folder) / path.name).read_bytes())


def _zig(folder: Path, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "ziglang", *arguments], check=True, cwd=folder)


def _link_elf(platform: Platform, symbols: Sequence[str], folder: Path, file: str) -> None:
    _export(folder, "exported.txt", ["{", "global:", *(f"{symbol};" for symbol in symbols), "local: *;", "};"])
    options = ["-shared", "--strip-all", "--gc-sections", "-z", "noexecstack", "--hash-style=gnu", "--build-id=none"]
    _zig(folder, "ld.lld", *options, "--version-script=exported.txt", "-o", file, *_objects(symbols))


# COFF objects with floats refer to `_fltused`, which only Microsoft's C library reads. The functions that kernels call
# come from ntdll.dll, which every Windows process has.
def _link_coff(platform: Platform, symbols: Sequence[str], folder: Path, file: str) -> None:
    _export(folder, "ntdll.def", ["LIBRARY ntdll.dll", "EXPORTS", "memcpy", "memmove", "memset", "__chkstk"])
    _export(folder, "exported.def", ["EXPORTS", *symbols])
    _zig(folder, "dlltool", "-m", "i386:x86-64", "-d", "ntdll.def", "-l", "ntdll.lib")
    options = ["/dll", "/noentry", "/noimplib", "/nodefaultlib", "/Brepro", "/alternatename:_fltused=__ImageBase"]
    _zig(folder, "lld-link", *options, "/def:exported.def", f"/out:{file}", "ntdll.lib", *_objects(symbols))


def _link_mach_o(platform: Platform, symbols: Sequence[str], folder: Path, file: str) -> None:
    options = ["-target", "aarch64-macos.11.0", "-shared", "-s"]  # zig also signs the library, which macOS requires
    _zig(folder, "cc", *options, "-o", file, *_objects(symbols))


_LINKERS = {".so": _link_elf, ".dll": _link_coff, ".dylib": _link_mach_o}


def _objects(symbols: Sequence[str]) -> list[str]:
    return [f"{symbol}.o" for symbol in symbols]


def _export(folder: Path, file: str, lines: Sequence[str]) -> None:
    (folder / file).write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")
