"""Tests of scripts/build_cuda with stand-ins for Python, pip and the C++ compiler, which record their arguments."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Answers like `python -m venv`, `python -m pip` and `python -c`.
PYTHON = r"""#!/bin/sh
printf '%s\n' "$*" >>asked
case "$*" in
    *"import nvidia"*) echo "$PWD/nvidia" ;;
    "-m venv"*) mkdir -p .venv-cuda/bin && cp "$0" .venv-cuda/bin/python ;;
    *"pip download"*)
        mkdir -p .venv-cuda/source llama_cpp_python-0/vendor
        tar -czf .venv-cuda/source/llama_cpp_python-0.tar.gz llama_cpp_python-0 ;;
    *"pip wheel"*)
        printf '%s\n' "$CMAKE_ARGS" >cmake_args
        echo "$CMAKE_BUILD_PARALLEL_LEVEL" >jobs
        mkdir -p .venv-cuda/build-90/bin dist/cuda-90
        touch .venv-cuda/build-90/bin/libllama-common.so dist/cuda-90/llama_cpp_python-0-py3-none-any.whl ;;
esac
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Return a clone in which Python and c++ are stand-ins."""
    (tmp_path / "scripts").mkdir()
    for name in ("build_cuda", "environment.sh"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "nvidia" / "cu13" / "lib").mkdir(parents=True)
    (tmp_path / "tools").mkdir()
    for name, text in {"python": PYTHON, "c++": '#!/bin/sh\necho "$@" >linked\n'}.items():
        (tmp_path / "tools" / name).write_text(text)
        (tmp_path / "tools" / name).chmod(0o700)
    return tmp_path


def build(clone: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": f"{clone}/tools:{os.environ['PATH']}", "PYTHON": f"{clone}/tools/python"}
    return subprocess.run(
        [clone / "scripts" / "build_cuda", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**environment, "JOBS": "3"},
    )


def test_the_compiler_comes_from_pip_and_builds_one_architecture(clone: Path) -> None:
    done = build(clone, "90")
    assert done.returncode == 0, done.stderr
    asked = (clone / "asked").read_text()
    assert re.search(r"pip install --no-deps nvidia-cuda-nvcc==\S+ nvidia-nvvm==", asked)
    assert re.search(r"pip download .*llama-cpp-python\[server\]==[\d.]+$", asked, re.MULTILINE)
    flags = (clone / "cmake_args").read_text().split()
    for flag in ("-DGGML_CUDA=on", "-DGGML_CUDA_NO_VMM=on", "-DGGML_NATIVE=off", "-DCMAKE_CUDA_ARCHITECTURES=90-real"):
        assert flag in flags
    assert f"-DCMAKE_CUDA_COMPILER={clone}/nvidia/cu13/bin/nvcc" in flags
    # The loader must get $ORIGIN, past the shell that runs the linker.
    assert r"-DCMAKE_SHARED_LINKER_FLAGS='-Wl,-rpath,\$ORIGIN/../../nvidia/cu13/lib'" in flags
    assert (clone / "jobs").read_text() == "3\n"
    assert sorted(path.name for path in (clone / "dist/cuda-90").iterdir())[0] == "libllama-common.so"
    assert "-o dist/cuda-90/llama-bench" in (clone / "linked").read_text()
    assert "-Wl,-rpath,$ORIGIN" in (clone / "linked").read_text()
    assert re.fullmatch(
        r'next: pip install dist/cuda-90/\S+\.whl "nvidia-cuda-runtime==13\.0\.\*" "nvidia-cublas==13\.0\.\*" \n',
        done.stdout,
    )


def test_an_interrupted_build_continues(clone: Path) -> None:
    build(clone, "90")
    (clone / "asked").unlink()
    assert build(clone, "90").returncode == 0
    assert "venv" not in (clone / "asked").read_text().replace(".venv-cuda", "")
    assert "pip wheel" in (clone / "asked").read_text()


def test_the_linker_finds_libraries_without_versions(clone: Path) -> None:
    build(clone, "90")
    libraries = clone / "nvidia" / "cu13" / "lib"
    assert {path.name: str(path.readlink()) for path in libraries.iterdir()} == {
        f"lib{name}.so": f"lib{name}.so.13" for name in ("cudart", "cublas", "cublasLt")
    }
    assert (clone / "nvidia/cu13/lib64").resolve() == libraries.resolve()


def test_the_gpu_of_this_machine_is_the_default(clone: Path) -> None:
    done = build(clone)
    assert (done.returncode, done.stderr) == (2, "error: no NVIDIA GPU was found: name an architecture, such as 90\n")
    smi = clone / "tools" / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 9.0\necho 8.9\n")
    smi.chmod(0o700)
    assert build(clone).returncode == 0
    assert "=90-real" in (clone / "cmake_args").read_text()
