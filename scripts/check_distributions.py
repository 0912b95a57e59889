"""Check the contents of a wheel and a source distribution: `python scripts/check_distributions.py WHEEL SDIST`."""

from __future__ import annotations

import sys
import tarfile
import zipfile
from pathlib import Path

WHEEL = (
    "llmrun/__main__.py",
    "llmrun/models.toml",
    "llmrun/py.typed",
    "llmrun/jobs/bench/html/page.html",
    "llmrun/cli/completing/llmrun.bash",
    "llmrun/cli/completing/llmrun.fish",
    "llmrun/cli/completing/llmrun.zsh",
    "llmrun/serving/page/chat.html",
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
FOLDERS = ("llmrun/", "llmrun_gguf-")  # a wheel contains only these folders, without tests, scripts or documents
LEFTOVERS = (".pyc", ".o", ".so")


def missing(names: list[str], wanted: tuple[str, ...]) -> list[str]:
    """Return a phrase for each name that is missing from a distribution."""
    return [f"lacks {ending}" for ending in wanted if not any(name.endswith(ending) for name in names)]


def main(wheel: str, source: str) -> int:
    """Print the problems, and return 1 if there are any."""
    with zipfile.ZipFile(wheel) as archive:
        packed = archive.namelist()
    with tarfile.open(source) as archive:
        sources = archive.getnames()
    wrong = [f"{Path(wheel).name} {words}" for words in missing(packed, WHEEL)]
    wrong += [f"{Path(wheel).name} holds {name}" for name in packed if not name.startswith(FOLDERS)]
    wrong += [f"{Path(source).name} {words}" for words in missing(sources, SOURCE)]
    wrong += [f"a distribution holds {name}" for name in packed + sources if name.endswith(LEFTOVERS)]
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
