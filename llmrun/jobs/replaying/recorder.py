"""Makes and writes the recording of a run."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Final

from llmrun import __version__
from llmrun.base.errors import LlmrunError
from llmrun.base.machine.processor import processor_name
from llmrun.base.open_flags import O_BINARY, O_NOFOLLOW
from llmrun.formats.layouts.numerics import NUMERICS
from llmrun.hub.local.model_records import known_digest
from llmrun.hub.local.safe_writes import digest, put_in_place, writing
from llmrun.hub.names.file_names import shards_of
from llmrun.jobs.replaying.recording import ModelFile, Opening, Output, RecordedAdapter, Recording, first_tokens
from llmrun.jobs.replaying.watching import WatchedBackend

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmrun.base.types import Adapter
    from llmrun.engine.engine import Engine
    from llmrun.engine.requests import Finished, Request
    from llmrun.hub.progress_reporter import Reporter

_LOGITS: Final = 4  # how many rows of logits are digested


def record(
    engine: Engine,
    watched: WatchedBackend,
    request: Request,
    tokens: Sequence[int],
    finished: Finished,
    *,
    model: str,
    opening: Opening,
    reporter: Reporter,
) -> Recording:
    """Return the recording of the only request that the engine has answered. The engine's cache is empty afterwards.

    Hashing the model's files takes a second for each GB or two, unless llmrun has downloaded them. Raises LlmrunError
    if a file cannot be read.
    """
    n_prompt = finished.timings.prompt_tokens
    prompt = tuple(watched.tokens[position] for position in range(n_prompt))
    logits = {
        index: watched.logits[n_prompt - 1 + index][-1]
        for index in _spread([index for index in range(len(tokens) + 1) if n_prompt - 1 + index in watched.logits])
    }
    engine.forget()
    return Recording(
        numerics=NUMERICS,
        llmrun=__version__,
        model=model,
        files=model_files(Path(engine.info.path), reporter),
        opening=opening,
        prompt_tokens=prompt,
        request=request,
        output=Output(tuple(tokens), str(finished.reason), logits),
        ops=tuple(watched.op_digests(first_tokens(prompt))),
        machine={
            "device": engine.info.device,
            "processor": processor_name(),
            "system": f"{platform.system()} {platform.machine()}",
            **{name: version(name) for name in ("numpy", "llvmlite", "numba", "llguidance")},
        },
        adapters=tuple(_recorded(adapter, reporter) for adapter in engine.info.adapters),
    )


def _recorded(adapter: Adapter, reporter: Reporter) -> RecordedAdapter:
    path = Path(adapter.path).absolute()
    return RecordedAdapter(adapter.name, str(path), adapter_digest(path, reporter), adapter.scale)


def adapter_digest(path: Path, reporter: Reporter) -> str:
    """Return the sha256 of an adapter. Raises LlmrunError if it cannot be read."""
    return _digest_of(path, reporter, "adapter")


def opening_of(engine: Engine, *, chat_template: str | None, thinking_tags: Sequence[str] | None, raw: bool) -> Opening:
    """Describe how the model was opened. `chat_template` is the source of the user's own template."""
    template = None if raw or engine.template is None else template_digest(engine)
    tags = None if thinking_tags is None else tuple(thinking_tags)
    return Opening(engine.info.kv_type, engine.info.context_size, template, chat_template, tags)


def template_digest(engine: Engine) -> str | None:
    """Return the sha256 of the source of the engine's chat template, or None if it has none."""
    template = engine.template
    return None if template is None else hashlib.sha256(template.source.encode()).hexdigest()


def model_files(path: Path, reporter: Reporter) -> tuple[ModelFile, ...]:
    """Return the names and digests of a model's files. A known digest of an unchanged file is not computed again.

    Raises LlmrunError if a file cannot be read.
    """
    files = [path.with_name(name) for name in shards_of(path.name)]
    return tuple(ModelFile(file.name, _digest_of(file, reporter, "model")) for file in files)


def _digest_of(file: Path, reporter: Reporter, kind: str) -> str:
    try:
        return known_digest(file) or digest(file, reporter, f"hashing {file.name}")
    except OSError as error:
        raise LlmrunError(f"{kind}: {file}: cannot be read: {error.strerror or error}") from error


def write_recording(path: Path, recording: Recording) -> None:
    """Write a recording atomically. Only its owner may read it, because it contains the prompt. Raises LlmrunError."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    text = json.dumps(recording.as_json(), ensure_ascii=False, allow_nan=False)
    try:
        with writing(path):
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | O_BINARY | O_NOFOLLOW, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text + "\n")
                file.flush()
                os.fsync(file.fileno())
        put_in_place(partial, path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def _spread(indexes: Sequence[int]) -> list[int]:
    """Return the first, the last and evenly spread ones of these indexes, but no more than _LOGITS."""
    if not indexes:
        return []
    places = {round(number * (len(indexes) - 1) / (_LOGITS - 1)) for number in range(_LOGITS)}
    return [indexes[place] for place in sorted(places)]
