"""Opens the models that a command names, and runs a request: streams the answer, checks it and prints statistics.

A model's files can also be found without opening them (`model_files`), or described to another process that opens the
model (`to_open`). Notes warn the user that the default model is only a toy, or that the flags for GPUs or threads do
not suit this machine.
"""

from __future__ import annotations

import gc
import itertools
import os
import secrets
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, TypeVar

from msgspec import structs

from llmrun.backends.base import AUTO, SPLIT_MODES, OpenOptions, beyond_training
from llmrun.backends.registry import check_options, is_stand_in
from llmrun.base.amounts import format_bytes, format_parameters, format_seconds
from llmrun.base.errors import DoesNotFit, LlmrunError, ModelNotFound, UsageError, kernel_warnings_told
from llmrun.base.folders import told_once
from llmrun.base.processes.commands import TERMINATING
from llmrun.cli.answers.loading import ModelLoading
from llmrun.cli.answers.markdown import markdown_view
from llmrun.cli.answers.report import (
    AnsweredRequest,
    check_format,
    completion_body,
    explain_length,
    logprob_fields,
    prompt_reporter,
    show_statistics,
)
from llmrun.cli.answers.thinking import CertainAnswer, ThinkingView
from llmrun.cli.console.output import out
from llmrun.cli.console.progress import HubReporter
from llmrun.cli.console.terminal import discard_typed_input, is_terminal, keep_output_at_ctrl_c
from llmrun.engine.base import check_generates
from llmrun.engine.remote.request import is_endpoint, parse_endpoint
from llmrun.engine.requests import (
    Finished,
    PrefillProgress,
    Request,
    StatePlace,
    TextDelta,
    TokenLogprobs,
    ToolCall,
    ToolCallDelta,
)
from llmrun.options.settings import MMPROJ_OFF, Settings, default_sampling, is_set, model_named

if TYPE_CHECKING:
    from llmrun.backends.base import Backend
    from llmrun.cli.answers.markdown.view import MarkdownView
    from llmrun.engine.base import Answering
    from llmrun.engine.child.messages import Open
    from llmrun.engine.engine import Engine
    from llmrun.hub.catalog import CatalogEntry
    from llmrun.hub.resolve.model_file import ResolvedModel
    from llmrun.model.vision.layout import Projector
    from llmrun.options.sampling_params import SamplingParams
    from llmrun.serving.background.engine import BackgroundEngine

Found = TypeVar("Found")


def resolved_draft(name: str, resolve: Callable[[str], Found]) -> Found:
    """Resolve the name of a draft model or a preset with `resolve`. Error messages name --speculate.

    Raises UsageError for a model on a server, and the errors of `resolve`, such as ModelNotFound.
    """
    name = model_named(name)
    if is_endpoint(name):
        raise UsageError(f"--speculate: {name}: a draft model must run on this machine", hint="name a local model")
    try:
        return resolve(name)
    except ModelNotFound as error:
        raise ModelNotFound(f"--speculate: {str(error).removeprefix('model: ')}", hint=error.hint) from error


def tell_of_default_model(settings: Settings) -> None:
    """Print a note that the default model is a toy. The note appears only once, and only on a terminal."""
    if out.quiet or not is_terminal(sys.stderr) or is_stand_in(settings.backend):
        return
    if settings.model != Settings().model or is_set("model") or not told_once("default-model"):
        return
    out.note(f"{settings.model} is a toy model for trying out llmrun; `llmrun fit` recommends models for this machine")


@dataclass(frozen=True, slots=True)
class OpenModel:
    """An open engine and the model's display name, which is taken from the catalogue, the file or the server.

    `default_sampling` has no seed yet. `thinking_tags` are the model's tags in the catalogue, if any.
    `preset` is the name of the preset that the user named, or "". `projector` returns the model's projector, or None if
    the model has none or runs on a server; the first call may have to read the projector's header.
    """

    engine: Answering
    name: str
    default_sampling: SamplingParams
    thinking_tags: Sequence[str] | None = None
    preset: str = ""
    projector: Callable[[], Projector | None] = lambda: None

    @property
    def title(self) -> str:
        """The model's display name, preceded by the preset's name if the user named a preset."""
        return f"{self.preset} ({self.name})" if self.preset else self.name


def unwatched(backend: Backend) -> Backend:
    """Return the backend itself."""
    return backend


def lasting_name(settings: Settings) -> str:
    """Return a name that identifies the preset or the model from any folder. Raises the errors of `lasting_model`."""
    model = lasting_model(settings)
    return model if settings.preset is None else settings.preset.name


def lasting_model(settings: Settings) -> str:
    """Return a name that means the same model in any folder: a model's name, an absolute path or a URL.

    Raises UsageError for an invalid URL and ModelNotFound for an unknown name.
    """
    if is_endpoint(settings.model):
        return parse_endpoint(settings.model).address
    if is_stand_in(settings.backend):
        return os.path.abspath(os.path.expanduser(settings.model))  # noqa: PTH100, PTH111  (Path.expanduser may raise)
    from llmrun.hub.resolve.model_file import LocalPath, existing, understand

    meant = understand(settings.model)
    if not isinstance(meant, LocalPath):
        return settings.model
    return meant.name or os.path.abspath(existing(meant))  # noqa: PTH100


@contextmanager
def open_model(
    settings: Settings,
    *,
    chat_template: str | None,
    will_chat: bool,
    max_sequences: int = 1,
    will_constrain: bool = False,
    saves_state: bool = False,
    images: bool = False,
    watch: Callable[[Backend], Backend] = unwatched,
) -> Iterator[OpenModel]:
    """Find the model's file, download it if necessary, and open it, or join a background engine that has it open.

    For a URL, connect to the server instead. May raise any LlmrunError from the hub or the engine.

    will_chat  True to start the chat template process first, because most of the process's 70 ms startup then overlaps
               with imports and the loading of weights
    max_sequences  the maximum number of concurrent requests; fewer requests run if their shared cache is too small
    will_constrain, watch  the arguments of Engine.open
    saves_state  the field of OpenOptions
    images     whether the model must read images
    """
    if is_endpoint(settings.model):
        with _open_remote(settings, max_sequences) as remote:
            yield remote
        return
    with ExitStack() as held:

        def open_here() -> OpenModel:
            return held.enter_context(
                _open_here(
                    settings, chat_template, will_chat, max_sequences, will_constrain, saves_state, images, watch
                )
            )

        opened: OpenModel | None = None
        if settings.warm and watch is unwatched and not is_stand_in(settings.backend):
            opened = _joined(held, settings, chat_template, images, open_here)
        opened = opened or open_here()
        engine = opened.engine
        check_generates(engine.info)
        if settings.ctx_size is not None and (
            words := beyond_training(opened.name, engine.info.context_size, engine.info.train_context)
        ):
            out.note(words)
        yield opened


def _joined(
    held: ExitStack,
    settings: Settings,
    chat_template: str | None,
    images: bool,
    open_here: Callable[[], OpenModel],
) -> OpenModel | None:
    """Join or start a background engine. Returns None if this process must open the model."""
    from llmrun.cli.answers.background import SEQUENCES, BackgroundRun

    @contextmanager
    def in_background() -> Iterator[tuple[Open, ModelLoading]]:
        with model_files(settings, images=images) as files:
            asked = to_open(settings, files, parallel=SEQUENCES, kv_tokens=None, template=chat_template)
            yield asked, files.loading

    needs_projector = _needs_projector(settings, images)
    engine = BackgroundRun(settings, chat_template, in_background, lambda: open_here().engine, needs_projector).joined()
    if engine is None:
        return None
    held.enter_context(engine)
    facts = engine.facts
    tell_of_too_many_threads(settings)
    _tell_of_unused_gpu_flags(settings)
    _describe(engine, settings.draft_model)
    sampling, tags = facts.default_sampling, facts.thinking_tags
    projector = cache(lambda: _projector(Path(engine.info.path), settings))
    return OpenModel(engine, facts.name, sampling, tags, _preset_name(settings), projector)


def _projector(model: Path, settings: Settings) -> Projector | None:
    from llmrun.cli.answers.vision import projector_of  # most runs do not need this module

    return projector_of(model, settings)


@contextmanager
def _open_here(
    settings: Settings,
    chat_template: str | None,
    will_chat: bool,
    max_sequences: int,
    will_constrain: bool,
    saves_state: bool,
    images: bool,
    watch: Callable[[Backend], Backend],
) -> Iterator[OpenModel]:
    """Open the model in this process. `open_model` describes the arguments."""
    from llmrun.engine.templates.chat_template import TemplateProcess

    with ExitStack() as held:
        templates = TemplateProcess()
        held.callback(templates.close)
        if will_chat:
            templates.start()
        files = held.enter_context(model_files(settings, images=images))
        from llmrun.engine.engine import Engine

        found = files.found
        tags = found.entry.thinking if found.entry else None
        options = replace(
            files.options,
            max_sequences=max_sequences,
            kv_tokens=AUTO if max_sequences > 1 else None,
            saves_state=saves_state,
            progress=files.loading,
            explain=lambda words: out.detail(f"backend    {words}"),
        )
        tell_of_too_many_threads(settings)
        with kernel_warnings_told(out.note), smaller_ones_named(found.entry):
            engine = Engine.open(
                found.path,
                options,
                chat_template=chat_template,
                thinking_tags=tags,
                templates=templates,
                speculate=settings.wants_speculation,
                draft=files.draft,
                will_constrain=will_constrain,
                watch=watch,
            )
        held.enter_context(engine)
        gc.freeze()  # otherwise, the first collection (__main__.py) would visit the vocabulary in the middle of a step
        files.loading.end()
        if not engine.info.gpu_layers:
            _tell_of_unused_gpu_flags(settings)
        if settings.speculate is not None and engine.speculates and not engine.info.batch_invariant:
            out.note("llama.cpp's results depend on the batch, so answers may differ from those without speculation")
        _describe(engine, settings.draft_model)
        if out.verbose:
            from llmrun.cli.answers.start_report import tell_of_start

            tell_of_start(engine.info, files.loading.began)
        recommended = found.entry.sampling if found.entry else None
        sampling = default_sampling(engine.info.metadata, recommended)
        encoder = engine.image_encoder
        projector = cache(lambda: _projector(found.path, settings) if encoder is None else encoder.projector)
        yield OpenModel(engine, found.name, sampling, tags, _preset_name(settings), projector)
        if engine.draft_error:  # drafting may stop at any step
            out.note(f"{engine.draft_error}; the answers are not affected")


def fetch_model(settings: Settings, *, images: bool) -> None:
    """Find the model's file and download it if necessary, without opening it. Does nothing for remote models.

    May raise any LlmrunError from the hub.

    images  whether the model must read images
    """
    if not is_endpoint(settings.model):
        options = local_options(settings)
        found = _found(settings.model, settings, options)
        if _needs_projector(settings, images):
            from llmrun.cli.answers.vision import with_projector

            with_projector(options, found, settings, needed=images)


def announce_loading(settings: Settings) -> None:
    """Show the progress line for a local model before slow imports. Does nothing if the model is not on this machine.

    Names that cannot be resolved are ignored, because opening the model will report the error.
    """
    if is_endpoint(settings.model) or is_stand_in(settings.backend):
        return
    from llmrun.hub.local.stored_models import find
    from llmrun.hub.resolve.model_file import LocalPath, understand

    with suppress(LlmrunError):
        asked = understand(settings.model)
        if isinstance(asked, LocalPath):
            ModelLoading(asked.title, asked.path).begin()
        elif (path := find(asked, HubReporter())) is not None:
            ModelLoading(asked.name, path).begin()


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model's file, the draft model's file if there is one, the options from the settings, and the progress line."""

    found: ResolvedModel
    draft: Path | None
    options: OpenOptions
    loading: ModelLoading


@contextmanager
def model_files(settings: Settings, *, sequences: int = 1, images: bool = False) -> Iterator[ModelFiles]:
    """Find the files of a local model, download them if necessary, and protect them from `llmrun rm` in the context.

    Idle background engines leave if this model needs their memory, so that each of its `sequences` can have a whole
    context. As soon as the files are known, a progress line says what is being loaded. Importing NumPy and the engine
    takes longer than finding the files, so callers import the engine inside the context.

    May raise any LlmrunError from the hub, and errors about RPC servers that cannot be used.

    images  whether the model must read images
    """
    from llmrun.cli.answers.room import make_room_for
    from llmrun.hub.local.safe_writes import in_use

    options, drafter = local_options(settings), settings.draft_model
    check_options(options)
    draft = None if drafter is None else resolved_draft(drafter, lambda name: _found(name, settings)).path
    found = _found(settings.model, settings, options)
    if _needs_projector(settings, images):
        from llmrun.cli.answers.vision import with_projector

        options = with_projector(options, found, settings, needed=images)
    with ExitStack() as held:
        for path in (found.path, draft, Path(options.mmproj) if options.mmproj else None):
            if path is not None:
                held.enter_context(in_use(path))
        loading = ModelLoading(found.name, found.path)
        if not is_stand_in(settings.backend):
            loading.begin()
            make_room_for(found.path, options, draft=draft, sequences=sequences)
        yield ModelFiles(found, draft, options, loading)


def local_options(settings: Settings) -> OpenOptions:
    """Return the options for opening a local model that come from the settings."""
    from llmrun.engine.drafting.sources import uses_draft_head

    return OpenOptions(
        backend=settings.backend,
        context_size=settings.ctx_size,
        threads=settings.threads,
        kv_type=settings.kv_type,
        adapters=settings.adapters,
        gpu_layers=settings.gpu_layers,
        tensor_split=settings.tensor_split or "",
        split_mode=settings.split_mode,
        main_gpu=settings.main_gpu,
        rpc=settings.rpc_servers,
        rpc_anyway=settings.rpc_anyway,
        draft_head=uses_draft_head(settings.wants_speculation, settings.draft_model),
        text_calls=settings.text_calls,
    )


def _needs_projector(settings: Settings, images: bool) -> bool:
    return images or settings.mmproj not in (None, MMPROJ_OFF)


def _tell_of_unused_gpu_flags(settings: Settings) -> None:
    """Print a note if the settings divide layers among GPUs, but no layer runs on a GPU."""
    flags = {
        "--gpu-layers": settings.gpu_layers not in (AUTO, 0),
        "--tensor-split": settings.tensor_split is not None,
        "--split-mode": settings.split_mode != SPLIT_MODES[0],
    }
    given = next((flag for flag, is_given in flags.items() if is_given), None)
    if given is not None:
        out.note(f"{given}: no layer of this model runs on a GPU; -v shows which backend runs it and why")


def tell_of_too_many_threads(settings: Settings) -> None:
    """Print a note if --threads exceeds the number of threads that this machine can run concurrently."""
    from llmrun.base.machine.cpu_count import most_threads

    if settings.threads is None or is_stand_in(settings.backend):
        return
    if settings.threads > (most := most_threads()):
        run = f"{most} threads" if most > 1 else "one thread"
        out.note(f"--threads {settings.threads}: this machine runs only {run} at a time, and more are slower")


@contextmanager
def smaller_ones_named(entry: CatalogEntry | None) -> Iterator[None]:
    """If a model from the catalogue does not fit, add a hint that names the largest quantization that fits."""
    try:
        yield
    except DoesNotFit as error:
        if entry is None or error.most_weights is None:
            raise
        from llmrun.hub.resolve.memory_check import smaller_choice

        smaller = smaller_choice(entry, error.most_weights)
        if not smaller:
            raise
        raise DoesNotFit(
            str(error), hint=f"the largest quantization that fits is {smaller}: try -m {smaller}"
        ) from error


def _found(name: str, settings: Settings, options: OpenOptions | None = None) -> ResolvedModel:
    from llmrun.hub.resolve.model_file import ResolvedModel, resolve

    if is_stand_in(settings.backend):
        return ResolvedModel(Path(name), Path(name).stem, None)
    return resolve(name, offline=settings.offline, reporter=HubReporter(), options=options)


@contextmanager
def _open_remote(settings: Settings, max_sequences: int) -> Iterator[OpenModel]:
    from llmrun.engine.remote.engine import RemoteEngine

    with RemoteEngine.open(
        settings.model, max_sequences=max_sequences, offline=settings.offline, explain=out.note
    ) as engine:
        info = engine.info
        out.detail(f"model      {info.name}")
        out.detail(f"endpoint   {info.path}")
        out.detail(f"opened in  {format_seconds(engine.load_s)}")
        yield OpenModel(engine, info.name, default_sampling({}), preset=_preset_name(settings))


def _preset_name(settings: Settings) -> str:
    """Return the name of the preset in use, or "", and print the name if --verbose is set."""
    if settings.preset is None:
        return ""
    out.detail(f"preset     {settings.preset.name}")
    return settings.preset.name


def _describe(engine: Engine | BackgroundEngine, draft_model: str | None) -> None:
    info, template = engine.info, engine.template
    out.detail(f"model      {info.name}: {info.path}")
    out.detail(
        f"weights    {info.architecture}, {info.file_type}, {format_parameters(info.parameters)}, "
        f"{format_bytes(info.file_bytes)}"
    )
    out.detail(f"backend    {info.backend}: {info.device}")
    out.detail(f"context    {info.context_size} tokens; the model was trained for {info.train_context}")
    if info.kv_bytes:
        out.detail(f"KV cache   {info.kv_type}, {format_bytes(info.kv_bytes)} for {engine.cache_tokens:,} tokens")
    out.detail(f"template   {f'{template.name} ({template.origin})' if template else 'none'}")
    if info.adapters:
        out.detail(f"adapters   {', '.join(f'{each.name} (scale {each.scale:g})' for each in info.adapters)}")
    out.detail(f"drafts     {_drafts(engine, draft_model) if engine.speculates else 'none'}")
    out.detail(f"loaded in  {format_seconds(engine.load_s)}")


def _drafts(engine: Engine | BackgroundEngine, draft_model: str | None) -> str:
    other = "the model's draft head" if engine.has_draft_head else draft_model
    return "by lookup" if other is None else f"by lookup and {other}"


_CACHED_PREFIXES = 64  # maximum number of cached sequences, each of which needs 4 bytes per block of 32 tokens


def to_open(
    settings: Settings, files: ModelFiles, *, parallel: int, kv_tokens: int | None, template: str | None
) -> Open:
    """Return the message that opens a model for several concurrent requests.

    parallel   the maximum number of answers to generate at a time
    kv_tokens  the size of the KV cache for all requests in tokens, or None for the largest size that fits
    template   the source of a chat template that replaces the model's own
    """
    from llmrun.engine.child.messages import Open

    entry = files.found.entry
    options = replace(
        files.options,
        max_sequences=parallel,
        kv_tokens=kv_tokens or AUTO,
        cached_prefixes=_CACHED_PREFIXES,
    )
    return Open(
        path=str(files.found.path),
        name=files.found.name,
        options=options.portable(),
        chat_template=template,
        thinking_tags=None if entry is None else entry.thinking,
        speculate=settings.wants_speculation,
        draft=None if files.draft is None else str(files.draft),
        catalogue=dict(entry.sampling) if entry else {},
    )


_RANDOM_SEEDS = 1_000_000  # the seeds are short enough to retype, yet repeats are rare among a thousand samples


def sent_sampling(engine: Answering, settings: Settings) -> frozenset[str] | None:
    """Return the names of the sampling parameters to send to the server, or None for local models.

    Only parameters that the user has set are sent (with a flag, in the environment, in config.toml or in a
    conversation). The server chooses the other parameters, because it may have the best defaults for its model, and
    because some OpenAI models reject every temperature.
    """
    if not is_remote(engine):
        return None
    return frozenset(settings.sampling) | ({"seed"} if settings.fixed_seed is not None else set())


def next_seed(engine: Answering, settings: Settings) -> int | None:
    """Return the user's seed, or a random seed by default. Return None if the server chooses the seed."""
    if settings.fixed_seed is not None or is_remote(engine):
        return settings.fixed_seed
    return secrets.randbelow(_RANDOM_SEEDS)


def is_remote(engine: Answering) -> bool:
    """Return whether the model runs on a server."""
    return engine.info.backend == "remote"


@dataclass(slots=True)
class CollectedAnswer:
    """The text, thinking, log probabilities and token ids of an answer so far."""

    pieces: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def take(self, delta: TextDelta) -> None:
        """Add the next piece of the answer."""
        if delta.unopened:
            self.thoughts += self.pieces
            self.pieces = []
        self.thoughts.append(delta.reasoning)
        self.pieces.append(delta.text)
        self.logprobs += delta.logprobs
        self.tokens += delta.tokens

    def answered(self, engine: Answering, model: str, request: Request, finished: Finished) -> AnsweredRequest:
        """Return the finished request with its answer. `model` is the display name."""
        text, thoughts = "".join(self.pieces), "".join(self.thoughts)
        return AnsweredRequest(
            model, engine.info, request, text, tuple(self.logprobs), finished, thoughts, tuple(self.tokens)
        )


@dataclass(slots=True)
class CollectedCalls:
    """The tool calls of an answer so far.

    Some servers give several calls the same index, and some repeat the id and the name in every piece. Therefore, only
    a piece with both a name and a different id begins a new call. A new id alone does not begin a new call, because
    some servers send a new id with every piece.

    problem  the reason why the most recently dropped call is invalid, or "" if no call was dropped
    """

    problem: str = ""
    _calls: dict[tuple[int, int], ToolCall] = field(default_factory=dict)  # keyed by index and occurrence
    _counts: dict[int, int] = field(default_factory=dict)  # the number of earlier calls with the same index

    def take(self, deltas: Iterable[ToolCallDelta]) -> None:
        """Add the next pieces of tool calls. Calls with a problem are dropped."""
        for delta in deltas:
            self.problem = delta.problem or self.problem
            key = delta.index, self._counts.get(delta.index, 0)
            before = self._calls.get(key, ToolCall("", "", ""))
            if before.id and before.name and delta.id not in ("", before.id) and delta.name:
                self._counts[delta.index] = key[1] + 1
                key, before = (delta.index, key[1] + 1), ToolCall("", "", "")
            if delta.problem:
                self._calls.pop(key, None)
            else:
                name = before.name if delta.name == before.name else before.name + delta.name
                self._calls[key] = ToolCall(before.id or delta.id, name, before.arguments + delta.arguments)

    @property
    def calls(self) -> list[ToolCall]:
        """The calls that have a name, in the order in which they began.

        Calls with missing or repeated ids receive new ids, because every result needs the id of its call.
        """
        ordered = [call for call in self._calls.values() if call.name]
        known = {""}
        numbers = itertools.count()
        for place, call in enumerate(ordered):
            if call.id in known:
                unused = next(name for name in (f"call_{number}" for number in numbers) if name not in known)
                ordered[place] = structs.replace(call, id=unused)
            known.add(ordered[place].id)
        return ordered


def answer(
    engine: Answering,
    request: Request,
    *,
    model: str,
    as_json: bool,
    renders: bool = False,
    hide_thinking: bool = False,
    stream: bool = True,
    log: Callable[[AnsweredRequest], None] | None = None,
) -> int:
    """Run a request, print the answer and its statistics, call `log` if it is given, and return the exit code.

    If `renders` is true and stdout is a terminal, Markdown is rendered. If `stream` is false, the answer is printed
    when it is complete. Ctrl-C or SIGTERM stops the answer. The text generated so far and the closing line are
    still printed. Raises LlmrunError at the end if the answer does not match the requested format.
    """
    collected = CollectedAnswer()
    shown = _ShownAnswer(markdown_view() if renders else None)
    thinking = ThinkingView(hidden=hide_thinking or as_json, stream=stream)
    finished: Finished | None = None
    certain = CertainAnswer(stream=stream)
    with (
        cancelling(engine.cancel_current, echo=not shown.is_rendered) as signals,
        _rest_written(certain, thinking, None if as_json else shown),
        prompt_reporter(engine, request) as waiting,
    ):
        for event in engine.generate(request):
            if not isinstance(event, PrefillProgress):
                waiting.end()
            if isinstance(event, TextDelta):
                collected.take(event)
                if event.unopened:
                    if held := certain.rest():
                        thinking.text(held)
                    elif not as_json:
                        shown.leave()
                        out.answer_was_thinking()
                if event.reasoning:
                    shown.leave()
                    thinking.text(event.reasoning)
                if not as_json:
                    shown.text(certain.passed(event))
            elif isinstance(event, Finished):
                finished = event
    if finished is None:
        raise LlmrunError("the engine stopped without finishing the request")
    done = collected.answered(engine, model, request, finished)
    if as_json:
        out.json(completion_body(done))
    else:
        if not shown.is_rendered:
            out.end_answer()
        for token in done.logprobs:
            out.fields(logprob_fields(token))
    explain_length(
        done,
        thinking="--think-budget N limits the thinking",
        limit="--max-tokens sets the limit" if is_terminal(sys.stderr) and not as_json else "",
        context="--ctx-size sets its size",
    )
    if out.verbose:
        from llmrun.cli.answers.start_report import tell_of_first_token

        tell_of_first_token(done.info, finished.timings)
    show_statistics(done)
    if log is not None:
        log(done)
    check_format(done)
    return 128 + signals[0] if signals else 0


def with_prompt_cache(
    path: Path, engine: Answering, then: Callable[[AnsweredRequest], None] | None
) -> Callable[[AnsweredRequest], None]:
    """Let a local engine load prompts from a file, and return a function that saves the prompt after an answer.

    then  a function that the returned function calls at the end, or None
    """
    engine.use_state(StatePlace(str(path.absolute())), out.note)

    def answered(done: AnsweredRequest) -> None:
        engine.save_state(done.finished.timings.prompt_tokens)
        if then is not None:
            then(done)

    return answered


class _ShownAnswer:
    """The text of an answer on stdout: rendered by a view, or else as it is."""

    def __init__(self, view: MarkdownView | None) -> None:
        self._view = view
        self.is_rendered = view is not None

    def text(self, piece: str) -> None:
        """Show the next piece of the answer."""
        if self._view is None:
            out.answer(piece)
        elif piece:
            out.clear_progress()
            self._view.text(piece)

    def leave(self) -> None:
        """Finish the rendered rows, because other text follows on the terminal, or because the answer is over."""
        if self._view is not None:
            self._view.end()


@contextmanager
def _rest_written(certain: CertainAnswer, thinking: ThinkingView, shown: _ShownAnswer | None) -> Iterator[None]:
    """Flush the buffered text on every exit path. `shown` is None if only the finished answer is printed."""
    try:
        yield
    finally:
        thinking.end()
        if shown is not None:
            shown.text(certain.rest())
            shown.leave()


@contextmanager
def cancelling(cancel: Callable[[], None], *, echo: bool = True) -> Iterator[list[int]]:
    """On the first Ctrl-C or SIGTERM, call `cancel` instead of ending the process. A second signal ends the process.

    Yields the list of signals received. Signals that were already ignored (because of `nohup`, or `&` in a
    script) stay ignored.

    echo  False to hide typed characters, which would move the cursor away from text that is redrawn
    """
    received: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        if received:
            os._exit(128 + number)
        received.append(number)
        restore_terminal()  # a second signal ends the process without cleaning up
        if number == signal.SIGINT:
            discard_typed_input()
        cancel()

    heeded = [number for number in (signal.SIGINT, *TERMINATING) if signal.getsignal(number) != signal.SIG_IGN]
    restore_terminal = keep_output_at_ctrl_c(echo=echo)
    before = {number: signal.signal(number, on_signal) for number in heeded}
    try:
        yield received
    finally:
        restore_terminal()
        for number, handler in before.items():
            signal.signal(number, handler)
