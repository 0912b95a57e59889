"""Runs the server of `llmrun serve`: finds model files, opens models in processes, and prints how to use the server."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import socket
import time
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec import structs
from msgspec.structs import replace

from llmrun.backends.lora_files import LoraOption
from llmrun.backends.registry import is_stand_in
from llmrun.base.amounts import format_parameters
from llmrun.base.errors import ModelNotFound, NetworkError, UsageError
from llmrun.base.folders import prefixes_folder
from llmrun.base.machine.memory import free_memory, return_large_blocks_at_once
from llmrun.base.types import Pooling, named_pooling
from llmrun.cli.answers.answering import (
    ModelFiles,
    local_options,
    model_files,
    smaller_ones_named,
    tell_of_too_many_threads,
    to_open,
)
from llmrun.cli.answers.loading import ModelLoading
from llmrun.cli.answers.room import make_room_for
from llmrun.cli.answers.vision import with_projector
from llmrun.cli.arguments.prompts import filled_system
from llmrun.cli.console.output import out
from llmrun.cli.console.progress import HubReporter
from llmrun.cli.console.terminal import hide_control_echo
from llmrun.hub.resolve.model_file import resolve
from llmrun.options.settings import MMPROJ_OFF, Settings, load_presets, with_model
from llmrun.serving.app import make_app
from llmrun.serving.bodies import Bodies
from llmrun.serving.http_server import HttpServer, allow_open_files, run_server
from llmrun.serving.leases import ServerFacts, ServerPlace
from llmrun.serving.models.known import (
    KnownModel,
    KnownModels,
    catalogue_name,
    given_model,
    models_in_store,
)
from llmrun.serving.models.registry import Models
from llmrun.serving.prefix_log import PrefixLog, prefix_log_folder
from llmrun.serving.processes.model_process import ModelProcess
from llmrun.serving.processes.stop_signals import StopSignals
from llmrun.serving.processes.supervisor import ServingLimits
from llmrun.serving.service import Service

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterator, Sequence

    from llmrun.cli.arguments.serving import ServeFlags
    from llmrun.engine.child.messages import Open
    from llmrun.engine.requests import ModelFacts
    from llmrun.hub.resolve.model_file import ResolvedModel
    from llmrun.options.presets import Preset
    from llmrun.serving.models.registry import ModelLimits
    from llmrun.serving.options import ServingOptions
    from llmrun.serving.upstreams.upstream import Upstream


def serve_models(
    flags: ServeFlags,
    settings: Settings,
    names: Sequence[str],
    upstreams: Sequence[Upstream],
    options: ServingOptions,
    limits: ModelLimits,
    template: str | None,
    listening: socket.socket,
    tls: ssl.SSLContext | None,
) -> None:
    """Serve models until a signal arrives. Raises the errors of finding and opening the given models.

    names      the models to open at start, with the default first. Without names, the server only forwards requests
    template   the source of a chat template that replaces the model's own
    listening  a bound socket
    """
    return_large_blocks_at_once()
    tell_of_too_many_threads(settings)
    allow_open_files(options.limits.connections)
    with ExitStack() as held:
        place = None if flags.leases is None else ServerPlace(flags.leases)
        if place is not None:
            held.enter_context(place.served())
        given: list[tuple[KnownModel, ModelFiles]] = []
        for named in (with_model(settings, name) for name in names):
            preset = None if named.preset is None else _without_prompt(named.preset)
            files = held.enter_context(model_files(named))
            reading = with_projector(files.options, files.found, named, wanted=True)
            files = dataclasses.replace(files, options=reading)
            name = files.found.name if preset is None else preset.name
            known = given_model(name, files.found.path, preset)
            given += [(known, files), *((known.with_adapter(LoraOption.parse(text)), files) for text in settings.loras)]
        if given:
            held.enter_context(smaller_ones_named(given[0][1].found.entry))
        opener = _Opener(flags, settings, given, template, options)
        asyncio.run(_serve(flags, settings, upstreams, options, limits, listening, tls, opener, place))


class _Opener:
    """Creates processes that run models. --chat-template, --lora and --mmproj apply only to models on the command line.

    given  the models that are given at start
    """

    def __init__(
        self,
        flags: ServeFlags,
        settings: Settings,
        given: Sequence[tuple[KnownModel, ModelFiles]],
        template: str | None,
        options: ServingOptions,
    ) -> None:
        self._flags, self._settings, self._template = flags, settings, template
        self.given = [known for known, _ in given]
        self._files = {known.path: files for known, files in given}
        self._limits = ServingLimits(max_queue=flags.max_queue, tenants=max(1, len(set(options.keys))))

    async def process(self, among: KnownModels, known: KnownModel, room: int | None) -> ModelProcess:
        """Return a process that has not been started, with the adapters of all presets of the model.

        among  all models of the server
        Raises ModelNotFound for a model that has been removed.
        """
        files = self._files.get(known.path)
        if files is None:
            found = await asyncio.to_thread(_stored, known)
            chosen = await asyncio.to_thread(
                with_projector, local_options(self._settings), found, self._without_given_projector(), wanted=True
            )
            files = ModelFiles(found, None, chosen, ModelLoading(found.name, found.path))
        await asyncio.to_thread(
            make_room_for, files.found.path, files.options, draft=files.draft, sequences=self._flags.parallel
        )
        opening = self._to_open(files)
        given = self._settings.loras if known.path in self._files else ()
        presets = [one.preset for one in await among.listed() if one.path == known.path and one.preset is not None]
        options = {
            **opening.options,
            "adapters": _adapters(given, presets),
            "reserved_memory": _reserved(room),
            "saves_state": self._flags.save_prefixes,
        }
        files.loading.begin()
        return ModelProcess(
            structs.replace(opening, options=options),
            self._limits,
            loading=files.loading,
            note=out.note,
            detail=out.detail,
            prompts=lambda words: out.fields([f"{time.strftime('%H:%M:%S')}  {words}"]),
        )

    def _without_given_projector(self) -> Settings:
        """Return the settings for a model that was not given at start, which does not use the file of --mmproj."""
        is_file = self._settings.mmproj not in (None, MMPROJ_OFF)
        return dataclasses.replace(self._settings, mmproj=None) if is_file else self._settings

    def end_loading(self) -> None:
        """Erase the progress line. If only one model was opened, store how long the load took."""
        out.clear_progress()
        if len(self._files) == 1:
            next(iter(self._files.values())).loading.end()

    def _to_open(self, files: ModelFiles) -> Open:
        flags, settings = self._flags, self._settings
        template = self._template if files.found.path in self._files else None
        opening = to_open(settings, files, parallel=flags.parallel, kv_tokens=flags.kv_tokens, template=template)
        return structs.replace(
            opening,
            sampling=dict(settings.sampling),
            max_wait_s=flags.max_wait,
            overcommit=flags.overcommit,
            share_prefixes=flags.share_prefixes,
            saved_prefixes=str(prefixes_folder()) if flags.save_prefixes else "",
            state_bytes=settings.state_bytes,
            explains_prefixes=True,
        )


def _without_prompt(preset: Preset) -> Preset:
    """Return a preset without its prompt, because requests contain their own prompts.

    The variables of the system prompt receive their default values. Raises UsageError for a variable without a default.
    """
    if preset.prompt is None or preset.system is None:
        return preset
    try:
        system = filled_system(Settings(system=preset.system, preset=preset), {})
    except UsageError as error:
        hint = f"a server needs defaults: add [presets.{preset.name}.defaults] to models.toml"
        raise UsageError(str(error), hint=hint) from None
    return replace(preset, values={**preset.values, "system": system}, prompt=None)


def _presets() -> Iterator[Preset]:
    """Yield the presets that requests may name. Print a note for each preset that cannot be used."""
    for preset in load_presets().values():
        try:
            yield _without_prompt(preset)
        except UsageError as error:
            out.note(f"{error}; requests cannot use this preset")


def _adapters(given: Sequence[str], presets: Sequence[Preset]) -> list[str]:
    """Return the adapters to load, in the notation of --lora. A preset's adapters are used only on request."""
    loaded = {(option.name, option.path.absolute()): option for option in map(LoraOption.parse, given)}
    for option in (LoraOption.parse(text) for preset in presets for text in preset.loras):
        loaded.setdefault((option.name, option.path), replace(option, scale=0.0))
    return [option.text for option in loaded.values()]


def _reserved(room: int | None) -> int:
    """Return the free memory that a model must leave unused, in bytes, to limit the model's memory to `room`."""
    free = free_memory()
    return 0 if room is None or free is None else max(0, free - room)


def _stored(known: KnownModel) -> ResolvedModel:
    """Check a model in the store and return its file. Raises ModelNotFound."""
    try:
        return resolve(known.reference, offline=True, reporter=HubReporter())
    except NetworkError as error:
        raise ModelNotFound(f"no such model: {known.name!r}") from error


async def _serve(
    flags: ServeFlags,
    settings: Settings,
    given_upstreams: Sequence[Upstream],
    options: ServingOptions,
    limits: ModelLimits,
    listening: socket.socket,
    tls: ssl.SSLContext | None,
    opener: _Opener,
    place: ServerPlace | None,
) -> None:
    known = KnownModels(opener.given, models_in_store, catalogue_name, [*_presets()])
    if is_stand_in(settings.backend) or not opener.given:
        known = KnownModels(opener.given)
    models = Models(known, partial(opener.process, known), limits, created=int(time.time()), note=out.note)
    upstreams: Upstreams | None = None
    if given_upstreams:
        from llmrun.serving.upstreams.front import Upstreams  # importing the HTTP client takes 0.1 s

        upstreams = Upstreams(given_upstreams, options.limits.ping_s, out.note)
    prefixes = PrefixLog(prefix_log_folder() if settings.prefix_log else None, out.note)
    service = Service(models, options, Bodies(options.limits), prefixes=prefixes, upstreams=upstreams)
    # the names by which clients may call this machine, in addition to its addresses
    names = frozenset({flags.address, socket.gethostname()})
    app = make_app(service, host_names=names, log=lambda line: out.fields([line]), trace=out.trace)
    url = _url(flags.address, listening.getsockname(), tls is not None)

    def ready() -> None:
        gc.freeze()  # otherwise, each full garbage collection traverses all modules and delays the answers
        opener.end_loading()
        for line in _banner(models, given_upstreams, url, flags.parallel, bool(options.keys)):
            out.fields([line])
        if place is not None:
            place.announce(_facts(models, url))

    signals, show_control_echo = StopSignals(), hide_control_echo()
    ending = None if place is None else asyncio.create_task(place.end_unused(signals.receive))
    try:
        with signals.installed():
            await run_server(
                HttpServer(app, options.limits, tls),
                models,
                listening,
                drain_s=flags.drain,
                ready=ready,
                say=out.note,
                signals=signals,
                upstreams=upstreams,
            )
    finally:
        if ending is not None:
            ending.cancel()
        show_control_echo()


def _facts(models: Models, url: str) -> ServerFacts:
    """Return how to reach the server's first model, for those who hold leases."""
    known = models.known.given[0]
    process = models.process_of(known)
    assert process is not None
    assert process.facts is not None
    facts = process.facts
    return ServerFacts(url.removesuffix("/v1"), known.name, facts.info.context_size, facts.takes_tools)


def _url(host: str, bound: tuple[Any, ...], is_tls: bool) -> str:
    """Return the URL that a client on this machine can use.

    host   the address or name that the user gave
    bound  the socket's address and port, as returned by `getsockname`
    """
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(bound[0], host)
    return f"{'https' if is_tls else 'http'}://{f'[{shown}]' if ':' in shown else shown}:{bound[1]}/v1"


def _banner(models: Models, upstreams: Sequence[Upstream], url: str, parallel: int, needs_key: bool) -> Iterator[str]:
    """Yield the lines that name the models and show how to use the server. Scripts parse the last line."""
    shown = [known for known in models.known.given if not known.parent]
    opened = [(known.name, process) for known in shown if (process := models.process_of(known))]
    loaded = [(name, process.facts) for name, process in opened if process.facts is not None]
    for name, facts in loaded:
        info = facts.info
        yield (
            f"serving {name}: {info.architecture}, {info.file_type}, {format_parameters(info.parameters)}, "
            f"{info.device}"
        )
        results = "answers" if info.has_logits else "texts"
        yield (
            f"memory for {facts.kv_tokens:,} tokens in up to {parallel} {results} at a time, "
            f"{info.context_size:,} tokens each"
        )
        if info.adapters:
            yield f"adapters: {', '.join(adapter.name for adapter in info.adapters)}"
    if upstreams:
        yield f"forwarding to upstreams: {sum(one.is_up for one in upstreams)} of {len(upstreams)} up"
    key = ' -H "Authorization: Bearer $KEY"' if needs_key else ""
    route, field = example_for(loaded[0][1] if loaded else None)
    yield f"try: curl {url}/{route} -H 'Content-Type: application/json'{key} -d '{{{field}}}'"
    if not loaded or any(facts.info.has_logits for _, facts in loaded):
        yield f"chat in a browser: {url.removesuffix('v1')}"
    yield f"ready: {url}"


def example_for(facts: ModelFacts | None) -> tuple[str, str]:
    """Return the route and fields of an example request for a model. `facts` is None before a model is loaded."""
    chat = '"messages": [{"role": "user", "content": "Hello"}]'
    if facts is None:
        return "chat/completions", f'"model": "NAME", {chat}'
    pooling = named_pooling(facts.info.metadata, facts.info.architecture)
    if pooling is Pooling.RANK:
        return "rerank", '"query": "Why is the sky blue?", "documents": ["Rayleigh scattering."]'
    if pooling or not facts.info.has_logits:
        return "embeddings", '"input": "The sky is blue."'
    return ("chat/completions", chat) if facts.takes_chats else ("completions", '"prompt": "Once upon a time"')
