"""Install a wheel of dist/ into an empty environment, and check its answer: `python scripts/try_wheel.py win_amd64`.

The argument is a tag in the name of the wheel. Wheels for a platform must answer without Numba. The wheel for all
platforms, whose tag is `any`, is installed with the extra `jit`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

DIST = Path(__file__).resolve().parent.parent / "dist"
MODEL = "smollm2:135m"
QUESTION = "Name three colors."
# SmolLM2's greedy answer. The CPU engine computes the same bits on every platform.
ANSWER = "1. Red\n2. Blue\n3. Green"
COMPILERS = {"numba", "llvmlite"}


def find_wheel(tag: str, folder: Path = DIST) -> Path:
    """Return the only wheel of `folder` with this platform tag."""
    found = [path for path in folder.glob("*.whl") if tag in path.stem.split("-")[-1].split(".")]
    if len(found) != 1:
        sys.exit(f"error: {len(found)} wheels in {folder} have the tag {tag}, expected one from scripts/build")
    return found[0]


def main(tag: str) -> None:
    """Try a wheel. Exit with an error if it needs a compiler, or if its answer is wrong."""
    wheel = find_wheel(tag)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        programs = folder / "environment" / ("Scripts" if os.name == "nt" else "bin")
        # The wheel must use neither this checkout nor the user's caches and settings.
        (folder / "config.toml").touch()
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("LLMRUN_", "PYTHON"))}
        clean["LLMRUN_WARM"] = "0"  # a background engine would outlive the folder
        places = {"CONFIG": "config.toml", "DATA_DIR": "data", "CACHE_DIR": "cache"}
        clean |= {f"LLMRUN_{key}": str(folder / place) for key, place in places.items()}

        def run(program: str, *arguments: str, stdout: int | None = subprocess.PIPE) -> str:
            path = shutil.which(program, path=str(programs)) or sys.exit(f"error: {wheel.name} lacks {program}")
            done = subprocess.run([path, *arguments], stdout=stdout, check=True, cwd=folder, env=clean)
            return (done.stdout or b"").decode()

        venv.create(folder / "environment", with_pip=True, symlinks=os.name != "nt")
        run("python", "-m", "pip", "install", "--quiet", f"{wheel}[jit]" if tag == "any" else str(wheel))
        run("python", "-m", "pip", "check")
        packages = {each["name"] for each in json.loads(run("python", "-m", "pip", "list", "--format", "json"))}
        if tag != "any" and (unwanted := packages & COMPILERS):
            sys.exit(f"error: {wheel.name} must not install {', '.join(sorted(unwanted))}")
        run("llmrun", "doctor", stdout=None)
        answer = run("llmrun", "generate", "--quiet", "--model", MODEL, "--temp", "0", "--max-tokens", "32", QUESTION)
        if answer.splitlines() != ANSWER.splitlines():
            sys.exit(f"error: {wheel.name} answers {answer!r} instead of {ANSWER!r}")
        print(answer)


if __name__ == "__main__":
    main(*sys.argv[1:])
