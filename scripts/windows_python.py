"""Builds a Python for Windows that runs in Wine, and runs it. `scripts/test_windows` uses it.

    python scripts/windows_python.py build FOLDER [WHEEL]
    python scripts/windows_python.py run FOLDER [ARGUMENTS OF PYTHON]

Python's installer for Windows is not on the package index. But Panda3D's wheel contains Python's DLL and its extension
modules, because Panda3D makes stand-alone programs with them. The standard library comes from the Python that runs
this script, so it must have the same minor version. Wine 8 lacks a few functions that NumPy and Rust's libraries
import. Small DLLs provide them. With a WHEEL of llmrun, Python has that wheel and its dependencies only. Otherwise, it
has what the tests of this checkout need.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MINGW = "x86_64-w64-mingw32-"
MINOR = f"{sys.version_info.major}.{sys.version_info.minor}"
TAG = MINOR.replace(".", "")
# Their versions must be those that are installed here, because they are part of the names of cached kernels.
SAME_VERSIONS = ("numpy", "numba", "llvmlite", "gguf")
FOR_TESTS = ("capstone", "hypothesis", "pytest", "pytest-xdist", "tokenizers", "pyte", "pexpect")
UNIX_ONLY = ("pexpect", "ptyprocess")  # tests import them, but do not use them on Windows
LEFT_OUT = ("site-packages", "lib-dynload", "test", "idlelib", "turtledemo", "__pycache__", "ensurepip")

PROGRAM = """
#include <wchar.h>
int Py_Main(int, wchar_t **);
int wmain(int argc, wchar_t **argv) { return Py_Main(argc, argv); }
"""
RANDOM = """
#include <stddef.h>
unsigned char SystemFunction036(void *, unsigned long);
__declspec(dllexport) int ProcessPrng(unsigned char *to, size_t n) { return SystemFunction036(to, (unsigned long)n); }
"""
# The C library passes complex numbers as structures. Its long double is a double.
COMPLEX = """
#include <complex.h>
typedef struct { float r, i; } F;
typedef struct { double r, i; } D;
static float _Complex f(F a) { float _Complex z; __real__ z = a.r; __imag__ z = a.i; return z; }
static double _Complex d(D a) { double _Complex z; __real__ z = a.r; __imag__ z = a.i; return z; }
static F uf(float _Complex z) { F a = {__real__ z, __imag__ z}; return a; }
static D ud(double _Complex z) { D a = {__real__ z, __imag__ z}; return a; }
F my__FCbuild(float r, float i) { F z = {r, i}; return z; }
D my_cpow(D a, D b) { return ud(cpow(d(a), d(b))); }
D my_cpowl(D a, D b) { return my_cpow(a, b); }
F my_cpowf(F a, F b) { return uf(cpowf(f(a), f(b))); }
double my__cabs(D a) { return cabs(d(a)); }
"""
OF_ONE = ("ccos", "ccosh", "cexp", "csin", "csinh", "ctan", "ctanh")
TO_REAL = ("carg", "cimag", "creal", "cabs")
# For this name, Wine always loads its own C library, so NumPy's DLLs are changed to import another name.
MATH, OWN_MATH = b"api-ms-win-crt-math-l1-1-0.dll", b"xpi-ms-win-crt-math-l1-1-0.dll"


def build(folder: Path, wheel: str | None = None) -> None:
    """Create python.exe with all libraries in a folder: those of a wheel, or those of this checkout and its tests."""
    shutil.rmtree(folder, ignore_errors=True)
    library = folder / "Lib"
    shutil.copytree(sysconfig.get_path("stdlib"), library, ignore=shutil.ignore_patterns(*LEFT_OUT, "config-*"))
    _unpack("panda3d", "deploy_libs/", folder)
    _unpack("msvc-runtime", ".data/data/Scripts/", folder)
    for path in folder.glob("api-ms-*.dll"):  # Wine has its own
        path.unlink()
    if wheel is None:
        _install_for_tests(library / "site-packages")
    else:
        _pip("install", "--target", str(library / "site-packages"), *_WINDOWS, wheel)
    _link(folder / "python.exe", PROGRAM, {f"python{TAG}.dll": ["Py_Main"]}, "-municode")
    _link(folder / "bcryptprimitives.dll", RANDOM, {}, "-shared", libraries=["-ladvapi32"])
    stable = [name for name in _exports(folder / f"python{TAG}.dll") if name.startswith(("Py", "_Py"))]
    if not (folder / "python3.dll").exists():
        _forward(folder / "python3.dll", "", {name: f"python{TAG}.{name}" for name in stable})
    _complex_functions(library / "site-packages")


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", *arguments]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, cwd=ROOT)


_WINDOWS = ("--only-binary=:all:", "--platform", "win_amd64", "--python-version", MINOR)


def _unpack(package: str, inside: str, folder: Path) -> None:
    """Unpack the DLLs of one folder of a package's wheel for Windows."""
    downloads = folder / "downloads"
    _pip("download", "--no-deps", *_WINDOWS, "--dest", str(downloads), package)
    (wheel,) = downloads.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if inside in name and name.lower().endswith((".dll", ".pyd")):
                (folder / Path(name).name).write_bytes(archive.read(name))
    shutil.rmtree(downloads)


def _install_for_tests(folder: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extra = [line for line in project["optional-dependencies"]["test"] if line.startswith(FOR_TESTS)]
    wanted = [*project["dependencies"], *extra, *(f"{name}=={version(name)}" for name in SAME_VERSIONS)]
    _pip("install", "--target", str(folder), *_WINDOWS, *(line for line in wanted if not line.startswith(UNIX_ONLY)))
    _pip("install", "--target", str(folder), "--no-deps", "--upgrade", *UNIX_ONLY)


def _link(
    target: Path, source: str, imports: dict[str, list[str]], *flags: str, libraries: list[str] | None = None
) -> None:
    """Compile one C file, and link it to functions of DLLs that have no import library."""
    code = target.with_suffix(".c")
    code.write_text(source)
    stubs = []
    for number, (dll, names) in enumerate(imports.items()):
        definition, stub = target.with_suffix(f".{number}.def"), target.with_suffix(f".{number}.a")
        definition.write_text("\n".join([f"LIBRARY {dll}", "EXPORTS", *names]) + "\n")
        subprocess.run([f"{MINGW}dlltool", "-d", str(definition), "-l", str(stub)], check=True)
        stubs.append(str(stub))
    command = [f"{MINGW}gcc", "-O1", "-static", *flags, str(code), *stubs, *(libraries or []), "-o", str(target)]
    subprocess.run(command, check=True)


def _forward(target: Path, source: str, exports: dict[str, str]) -> None:
    """Make a DLL whose exports are functions of its own or of other DLLs."""
    code, definition = target.with_suffix(".c"), target.with_suffix(".def")
    code.write_text(source or "int DllMain(void) { return 1; }\n")
    lines = [f"{name} = {where}" for name, where in exports.items()]
    definition.write_text("\n".join([f"LIBRARY {target.name}", "EXPORTS", *lines]) + "\n")
    command = [
        f"{MINGW}gcc",
        "-shared",
        "-static",
        "-O1",
        "-fno-builtin",
        str(code),
        str(definition),
        "-o",
        str(target),
    ]
    subprocess.run(command, check=True)


def _dumped(path: Path) -> str:
    command = [f"{MINGW}objdump", "-p", str(path)]
    return subprocess.run(command, check=True, capture_output=True, text=True, encoding="utf-8").stdout


def _exports(dll: Path) -> list[str]:
    table = _dumped(dll).split("[Ordinal/Name Pointer]", 1)[1]
    return sorted(set(re.findall(r"\s(\w+)\s*$", table, re.MULTILINE)))


def _complex_functions(packages: Path) -> None:
    """Give NumPy a DLL that has the functions of complex numbers and forwards all others to Wine's C library."""
    users = [path for path in packages.glob("numpy*/**/*") if path.suffix in (".pyd", ".dll")]
    users = [path for path in users if MATH in path.read_bytes()]
    needed: set[str] = set()
    for path in users:
        for table in _dumped(path).split("DLL Name: ")[1:]:
            if table.lower().startswith(MATH.decode()):
                needed.update(re.findall(r"\s(\w+)\s*$", table.split("\n\n", 1)[0], re.MULTILINE))
        path.write_bytes(path.read_bytes().replace(MATH, OWN_MATH))
    needed.discard("Name")
    source, own = [COMPLEX], {"_FCbuild", "cpow", "cpowl", "cpowf", "_cabs"}
    for name in OF_ONE:
        source.append(f"D my_{name}(D a) {{ return ud({name}(d(a))); }}  D my_{name}l(D a) {{ return my_{name}(a); }}")
        source.append(f"F my_{name}f(F a) {{ return uf({name}f(f(a))); }}")
    for name in TO_REAL:
        source.append(
            f"double my_{name}(D a) {{ return {name}(d(a)); }}  double my_{name}l(D a) {{ return {name}(d(a)); }}"
        )
        source.append(f"float my_{name}f(F a) {{ return {name}f(f(a)); }}")
    own.update(f"{name}{suffix}" for name in (*OF_ONE, *TO_REAL) for suffix in ("", "f", "l"))
    exports = {name: f"my_{name}" if name in own else f"ucrtbase.{name}" for name in sorted(needed)}
    own_math = OWN_MATH.decode()
    _forward(packages / "numpy.libs" / own_math, "\n".join(source), exports)
    shutil.copy(packages / "numpy.libs" / own_math, packages.parent.parent / own_math)


def windows_path(path: Path) -> str:
    return "Z:" + str(path).replace("/", "\\")


def environment(folder: Path) -> dict[str, str]:
    """Return the environment variables for a Python that `build` has made."""
    bytecode = windows_path(folder / "bytecode")
    return {"WINEPREFIX": str(folder / "wine"), "WINEDEBUG": "-all", "PYTHONPYCACHEPREFIX": bytecode}


def run(folder: Path, *arguments: str) -> int:
    """Run Python in Wine and return its exit code. All three streams are pipes, because Wine 8 cannot inherit files."""
    command = ["wine", str(folder / "python.exe"), *arguments]
    variables = os.environ | environment(folder) | {"PYTHONPATH": windows_path(ROOT)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=ROOT, env=variables
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        while piece := os.read(process.stdout.fileno(), 1 << 16):
            sys.stdout.buffer.write(piece)
            sys.stdout.buffer.flush()
    return process.returncode


if __name__ == "__main__":
    what, where, *rest = sys.argv[1:]
    if what == "build":
        build(Path(where).resolve(), *rest)
    else:
        sys.exit(run(Path(where).resolve(), *rest))
