"""Runs the server of `llmrun serve`: finds the model's file, opens it in a process, and says how to use it."""

from __future__ import annotations

import asyncio
import gc
import socket
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from llmrun.amounts import format_parameters
from llmrun.cli.answers.open_model import model_files, smaller_ones_named, tell_of_too_many_threads
from llmrun.cli.answers.opening import to_open
from llmrun.cli.console.control_echo import hide_control_echo
from llmrun.cli.console.output import out
from llmrun.cli.console.progress import show_loading
from llmrun.engine_process.limits import ServingLimits
from llmrun.engine_process.model_process import ModelProcess
from llmrun.engine_process.stop_signals import StopSignals
from llmrun.folders import prefixes_folder
from llmrun.machine.freed_memory import return_large_blocks_at_once
from llmrun.serving.app import make_app
from llmrun.serving.bodies import Bodies
from llmrun.serving.http_server import HttpServer, allow_open_files
from llmrun.serving.models import Models
from llmrun.serving.running import run_server
from llmrun.serving.service import Service

if TYPE_CHECKING:
    import ssl

    from llmrun.cli.answers.open_model import ModelFiles
    from llmrun.cli.arguments.serving import ServeFlags
    from llmrun.engine.child.messages import Open
    from llmrun.engine.facts import ModelFacts
    from llmrun.serving.options import ServingOptions
    from llmrun.settings import Settings


def serve_model(
    flags: ServeFlags,
    settings: Settings,
    options: ServingOptions,
    template: str | None,
    listening: socket.socket,
    tls: ssl.SSLContext | None,
) -> None:
    """Serve a model until a signal. Raises the errors of finding and opening it.

    template   the source of a chat template that replaces the model's own
    listening  a bound socket
    """
    return_large_blocks_at_once()
    tell_of_too_many_threads(settings)
    allow_open_files(options.limits.connections)
    with model_files(settings) as files, smaller_ones_named(files.found.entry):
        asyncio.run(_serve(flags, options, listening, tls, _to_open(flags, settings, files, template)))


async def _serve(
    flags: ServeFlags,
    options: ServingOptions,
    listening: socket.socket,
    tls: ssl.SSLContext | None,
    opening: Open,
) -> None:
    limits = ServingLimits(max_queue=flags.max_queue, tenants=max(1, len(set(options.keys))))
    model = ModelProcess(opening, limits, loading=show_loading, note=out.note, detail=out.detail)
    service = Service(Models(opening.name, model, int(time.time())), options, Bodies(options.limits))
    app = make_app(service, host_names=_host_names(flags.host), log=lambda line: out.fields([line]), trace=out.trace)
    url = _url(flags.host, listening.getsockname()[1], tls is not None)

    def ready() -> None:
        assert model.facts is not None
        gc.freeze()  # else each full collection goes through all modules, and holds up the answers
        out.clear_progress()
        for line in _banner(model.facts, url, flags.parallel, bool(options.keys)):
            out.fields([line])

    signals, show_control_echo = StopSignals(), hide_control_echo()
    try:
        with signals.installed():
            await run_server(
                HttpServer(app, options.limits, tls),
                model,
                listening,
                drain_s=flags.drain,
                ready=ready,
                say=out.note,
                signals=signals,
            )
    finally:
        show_control_echo()


def _to_open(flags: ServeFlags, settings: Settings, files: ModelFiles, template: str | None) -> Open:
    opening = to_open(settings, files, parallel=flags.parallel, kv_tokens=flags.kv_tokens, template=template)
    return replace(
        opening,
        sampling=dict(settings.sampling),
        max_wait_s=flags.max_wait,
        overcommit=flags.overcommit,
        share_prefixes=flags.share_prefixes,
        options={**opening.options, "saves_state": flags.save_prefixes},
        saved_prefixes=str(prefixes_folder()) if flags.save_prefixes else "",
        state_bytes=settings.state_bytes,
    )


def _host_names(host: str) -> frozenset[str]:
    """Return the names by which clients may call this machine, in addition to its addresses."""
    return frozenset({host, socket.gethostname()})


def _url(host: str, port: int, is_tls: bool) -> str:
    """Return the URL that a client on this machine can use."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{'https' if is_tls else 'http'}://{f'[{shown}]' if ':' in shown else shown}:{port}/v1"


def _banner(facts: ModelFacts, url: str, parallel: int, needs_key: bool) -> list[str]:
    """Return the lines that say what is served and how to use it. Scripts read the last one."""
    info = facts.info
    key = ' -H "Authorization: Bearer $KEY"' if needs_key else ""
    route, field = ("chat/completions", '"messages": [{"role": "user", "content": "Hello"}]')
    if not facts.takes_chats:
        route, field = "completions", '"prompt": "Once upon a time"'
    return [
        f"serving {facts.name}: {info.architecture}, {info.file_type}, {format_parameters(info.parameters)}, "
        f"{info.device}",
        f"memory for {facts.kv_tokens:,} tokens in up to {parallel} answers at a time, "
        f"{info.context_size:,} tokens each",
        f"try: curl {url}/{route} -H 'Content-Type: application/json'{key} -d '{{{field}}}'",
        f"ready: {url}",
    ]
