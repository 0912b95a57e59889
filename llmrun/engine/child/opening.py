"""Opens the model that the server asks for, describes it, and computes its fingerprint.

The fingerprint identifies everything that can change the bytes of an answer.
"""

from __future__ import annotations

import hashlib
import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmrun import __version__
from llmrun.backends.base import OpenOptions
from llmrun.backends.registry import backend_named, is_stand_in
from llmrun.base.errors import UsageError
from llmrun.base.folders import conversations_folder
from llmrun.engine.child.messages import Loading, Note, Open
from llmrun.engine.engine import Engine
from llmrun.engine.requests import ModelFacts
from llmrun.engine.saved_state.budget import Budget
from llmrun.engine.saved_state.chunks import SavedChunks
from llmrun.formats.gguf.reader import open_gguf, sampled_digest
from llmrun.formats.layouts.records import NUMERICS
from llmrun.options.settings import default_sampling

if TYPE_CHECKING:
    from llmrun.base.types import ModelInfo
    from llmrun.engine.templates.chat_template import TemplateProcess


def fingerprint(info: ModelInfo, digest: str, *, answering: object) -> str:
    """Return a fingerprint of 16 hexadecimal digits after "fp_".

    digest     identifies the contents of the model file; if empty, its `sampled_digest`
    answering  other settings that change answers, as JSON: the chat template and the thinking tags that replace the
               model's own, `text_calls`, and the projector
    """
    decisive: dict[str, Any] = {
        "version": __version__,
        "digest": digest or _digest_of(info),
        "kv_type": info.kv_type,
        "answering": answering,
        "numerics": NUMERICS,
    }
    if info.adapters:
        decisive["adapters"] = [[each.name, each.identity, each.scale] for each in info.adapters]
    if not info.batch_invariant:
        decisive["machine"] = [info.backend, info.device, info.gpu_layers, platform.machine(), platform.node()]
    return "fp_" + hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]


def _digest_of(info: ModelInfo) -> str:
    path = Path(info.path)
    if not is_stand_in(info.backend):
        with open_gguf(path) as file:
            return sampled_digest(file)
    return hashlib.sha256(path.read_bytes() if path.is_file() else path.name.encode()).hexdigest()


_PROGRESS_S = 0.05  # seconds between two reports of progress; a model has hundreds of matrices


class _Throttled:
    """Passes on at most 20 reports of progress a second, and every change of the work."""

    def __init__(self, report: Callable[[str, float], None]) -> None:
        self._report = report
        self._work = ""
        self._reported = 0.0

    def __call__(self, work: str, fraction: float) -> None:
        now = time.monotonic()
        if work != self._work or fraction >= 1 or now - self._reported >= _PROGRESS_S:
            self._work, self._reported = work, now
            self._report(work, fraction)


def open_engine(
    asked: Open,
    tell: Callable[[Loading | Note], None],
    on_begin: Callable[[Sequence[int]], None],
    *,
    templates: TemplateProcess | None = None,
) -> Engine:
    """Open an engine. Raises the errors of `Engine.open`, which describes `templates`."""
    options = OpenOptions(
        **asked.options,
        progress=_Throttled(lambda work, fraction: tell(Loading(work, float(fraction)))),
        explain=lambda words: tell(Note(words, is_detail=True)),
    )
    engine = Engine.open(
        Path(asked.path),
        options,
        chat_template=asked.chat_template,
        thinking_tags=asked.thinking_tags,
        templates=templates,
        speculate=asked.speculate,
        draft=None if asked.draft is None else Path(asked.draft),
        overcommit=asked.overcommit,
        share_prefixes=asked.share_prefixes,
        on_begin=on_begin,
    )
    if asked.saved_prefixes:
        engine.use_saved(_saved_prefixes(engine, asked, tell))
    return engine


def _saved_prefixes(engine: Engine, asked: Open, tell: Callable[[Note], None]) -> SavedChunks:
    if not engine.saves_blocks:
        engine.close()
        raise UsageError(
            "--save-prefixes: only the CPU engine can save prefixes", hint="leave it out, or add --backend cpu"
        )
    folder = Path(asked.saved_prefixes)
    budget = Budget([folder, conversations_folder()], asked.state_bytes)
    return SavedChunks(folder, engine.state_key, budget, lambda words: tell(Note(words)))


def describe(engine: Engine, asked: Open) -> ModelFacts:
    """Return the facts about an open model. Raises BadGGUF for invalid sampling defaults in the model file."""
    sampling = default_sampling(engine.info.metadata, asked.catalogue)
    answering = [asked.chat_template, asked.thinking_tags, OpenOptions(**asked.options).text_calls]
    if engine.image_encoder is not None:
        answering.append(engine.image_encoder.projector.identity)
    bos, eos = (
        None if token is None else engine.tokenizer.token_text(token)
        for token in (engine.tokenizer.bos_id, engine.tokenizer.eos_id)
    )
    return ModelFacts(
        name=asked.name,
        info=replace(engine.info, metadata={}),
        kv_tokens=engine.cache_tokens,
        takes_chats=engine.takes_chats,
        takes_tools=engine.tools.abilities.takes_tools,
        fills=engine.fills,
        thinks=engine.thinking.can_think,
        end_tokens=tuple(sorted(engine.tokenizer.end_of_generation)),
        default_sampling=replace(sampling, **asked.sampling),
        fingerprint=fingerprint(engine.info, asked.digest, answering=answering),
        memory_bytes=_memory_bytes(engine, asked),
        bos_token=bos,
        eos_token=eos,
        chat_template=None if engine.template is None else engine.template.source,
        sees_images=engine.sees_images,
    )


def _memory_bytes(engine: Engine, asked: Open) -> int:
    """Return the maximum main memory that the model needs with a full cache, in bytes, or 0 for a stand-in."""
    info = engine.info
    entry = backend_named(info.backend)
    if entry is None:
        return 0
    with open_gguf(asked.path) as file:
        needed = entry.kind().footprint(file, OpenOptions(**asked.options))
    on_gpus, _, layers = info.gpu_layers.partition("/")
    in_ram = 1 - int(on_gpus) / int(layers) if layers else 1.0
    return round(in_ram * (needed.weights + info.kv_bytes)) + needed.scratch + needed.vocabulary + needed.programs
