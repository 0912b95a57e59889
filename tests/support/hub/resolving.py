"""`resolve` in a process of its own, with a catalogue, a Hub and a package index made for the test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.hub.fake_hub import MODEL, SHA256

ROOT = Path(__file__).resolve().parents[3]
CHILD = """
import json, sys
from llmrun.errors import LlmrunError
from llmrun.hub.resolve.model_file import resolve

def say(**what):
    print(json.dumps(what), flush=True)

class Report:
    def note(self, line):
        say(note=line)
    def progress(self, label, done, total):
        say(label=label, done=done, total=total)

try:
    found = resolve(sys.argv[1], reporter=Report())
except LlmrunError as error:
    say(error=type(error).__name__, code=error.exit_code, message=str(error), hint=error.hint)
else:
    say(path=str(found.path), entry=found.entry and found.entry.name)
say(modules=sorted(sys.modules))
"""


@dataclass
class Outcome:
    """What one `resolve` said and how it ended."""

    path: Path | None = None
    error: str = ""
    code: int = 0
    message: str = ""
    hint: str = ""
    notes: list[str] = field(default_factory=list)
    progress: list[tuple[str, int, int]] = field(default_factory=list)
    modules: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Machine:
    """A user's machine below one folder: an own catalogue, data folder, shared cache and package index."""

    root: Path

    @property
    def models(self) -> Path:
        return self.root / "data" / "models"

    @property
    def hub(self) -> Path:
        return self.root / "hf" / "hub"

    @property
    def index(self) -> Path:
        return self.root / "index"

    def environment(self, **more: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "HF_", "LLMRUN_"))}
        return kept | {
            "HOME": str(self.root),
            "LLMRUN_CONFIG": str(self.root / "config.toml"),
            "LLMRUN_DATA_DIR": str(self.root / "data"),
            "HF_HOME": str(self.root / "hf"),
            "HF_ENDPOINT": "http://127.0.0.1:9",  # the discard port: nobody listens
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.index),
            "PYTHONPATH": str(ROOT),
            "NO_PROXY": "*",
            **more,
        }

    def catalogue(self, name: str, *sources: str, **keys: object) -> None:
        """Write the user's models.toml, with one entry for the fake model."""
        self.index.mkdir(parents=True, exist_ok=True)
        (self.root / "config.toml").touch()
        values: dict[str, object] = {
            "description": "a model made for a test",
            "license": "MIT",
            "parameters": 1,
            "quantization": "F16",
            "file": "model.gguf",
            "size": len(MODEL),
            "sha256": SHA256,
            "wheel_bytes": 2_600_000,
            "sources": list(sources),
        }
        if not any(source.startswith("pypi:") for source in sources):
            del values["wheel_bytes"]
        values |= keys
        lines = [f"{key} = {json.dumps(value)}" for key, value in values.items()]
        (self.root / "models.toml").write_text(f'[models."{name}"]\n' + "\n".join(lines))

    def wheel(self, content: bytes = MODEL, member: str = "pack/model.gguf", **options: Any) -> Path:
        """Put the wheel `pack` 1.0 into the package index."""
        self.index.mkdir(parents=True, exist_ok=True)
        path = self.index / "pack-1.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w", **options) as archive:
            archive.writestr(member, content)
            archive.writestr("pack-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: pack\nVersion: 1.0\n")
            archive.writestr(
                "pack-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            archive.writestr("pack-1.0.dist-info/RECORD", "")
        return path

    def start(self, name: str, prelude: str = "", **environment: str) -> subprocess.Popen[str]:
        """A process that resolves `name`; `prelude` is Python to run in it first."""
        return subprocess.Popen(
            [sys.executable, "-c", prelude + "\n" + CHILD, name],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment(**environment),
            cwd=self.root,
        )

    def resolve(self, name: str, prelude: str = "", **environment: str) -> Outcome:
        with self.start(name, prelude, **environment) as process:
            out, complaints = process.communicate(timeout=60)
        assert process.returncode == 0, complaints
        assert complaints == ""
        return outcome(out)

    def left_over(self) -> list[Path]:
        """Files below the data folder and the shared cache that are neither a model, a record, a lock nor a ref."""
        files = [path for folder in (self.root / "data", self.hub) for path in folder.rglob("*") if path.is_file()]
        kept = {"model.gguf", SHA256, f"{SHA256}.lock", "main"}
        return [path for path in files if path.name not in kept]


def outcome(lines: str) -> Outcome:
    """Read back what the child said."""
    result = Outcome()
    for line in lines.splitlines():
        said = json.loads(line)
        if "note" in said:
            result.notes.append(said["note"])
        elif "label" in said:
            result.progress.append((said["label"], said["done"], said["total"]))
        elif "modules" in said:
            result.modules = set(said["modules"])
        elif "path" in said:
            result.path = Path(said["path"])
        else:
            result.error, result.code = said["error"], said["code"]
            result.message, result.hint = said["message"], said["hint"]
    return result
