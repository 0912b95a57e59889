"""Check what a wheel and a source distribution hold: `python scripts/check_distributions.py WHEEL SDIST`."""

from __future__ import annotations

import sys
import tarfile
import zipfile
from pathlib import Path

WHEEL = (
    "llmrun/__main__.py",
    "llmrun/models.toml",
    "llmrun/py.typed",
    "llmrun/bench/html/page.html",
    "llmrun/cli/completing/llmrun.bash",
    "llmrun/cli/completing/llmrun.fish",
    "llmrun/cli/completing/llmrun.zsh",
    ".data/data/share/man/man1/llmrun.1",
    ".dist-info/entry_points.txt",
    ".dist-info/licenses/LICENSE",
)
SOURCE = (
    "pyproject.toml",
    "README.md",
    "CHANGELOG.md",
    "LICENSE",
    "models.toml",
    "docs/architecture.md",
    "docs/llmrun.1",
    "docs/run.svg",  # the README shows it
    "llmrun/__main__.py",
    "scripts/build",
    "scripts/environment.sh",
    "tests/conftest.py",
)
IN_WHEEL = ("llmrun/", "llmrun_gguf-")  # no tests, scripts or documents
LEFTOVERS = (".pyc", ".gguf", ".o", ".so")


def wrong(names: list[str], wanted: tuple[str, ...], *, in_wheel: bool) -> list[str]:
    """Return what a distribution lacks, and what it holds that does not belong there."""
    missing = [f"lacks {ending}" for ending in wanted if not any(name.endswith(ending) for name in names)]
    leftovers = [name for name in names if name.endswith(LEFTOVERS) or (in_wheel and not name.startswith(IN_WHEEL))]
    return missing + [f"holds {name}" for name in leftovers]


def main(wheel: str, source: str) -> int:
    with zipfile.ZipFile(wheel) as archive:
        found = [f"{Path(wheel).name} {words}" for words in wrong(archive.namelist(), WHEEL, in_wheel=True)]
    with tarfile.open(source) as archive:
        found += [f"{Path(source).name} {words}" for words in wrong(archive.getnames(), SOURCE, in_wheel=False)]
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
