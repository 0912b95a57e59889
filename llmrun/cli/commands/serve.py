"""Serve models over HTTP, with the APIs of OpenAI and others.

The server provides the APIs of OpenAI, Anthropic and Ollama, and a chat page for browsers. The models named here are
loaded at once; any other downloaded model is loaded when a request names it. With --upstream, the server forwards
requests for other models to other servers; without MODEL, it forwards all requests.

By default, the server listens on this machine only, and clients need no API key. For other machines, add --host and
--api-key-file. Ctrl-C stops the server after the running answers; a second Ctrl-C stops the server at once.

Examples:
    llmrun serve qwen3:4b
    llmrun serve qwen3:4b gemma3:4b --max-memory 12 --keep-alive 10m
    llmrun serve -m ./file.gguf --port 9000 --parallel 4
    llmrun serve --upstream http://10.0.0.5:8080 --upstream http://10.0.0.6:8080
    llmrun serve qwen3:4b --host 0.0.0.0 --api-key-file keys.txt --tls-cert cert.pem --tls-key key.pem
"""

from __future__ import annotations

from typing import Annotated

import typer

from llmrun.base.errors import UsageError
from llmrun.cli.arguments.options import models, takes_flags
from llmrun.cli.arguments.prompts import read_text
from llmrun.cli.arguments.serving import ServeFlags
from llmrun.engine.remote.request import is_endpoint
from llmrun.options.settings import model_named, with_model

LISTING = {"heading": "Run models", "place": 12}


@takes_flags(ServeFlags)
def command(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]...",
            help="Models, presets or .gguf files; the first is the default.",
            autocompletion=models,
        ),
    ] = None,
    *,
    flags: ServeFlags,
) -> int:
    settings, given = flags.settings(names or ())
    if serves_upstreams_only := bool(flags.upstream) and flags.model is None and not names:
        given = ()
    for name in map(model_named, given):
        if is_endpoint(name):
            raise UsageError(
                f"model: {name}: already runs on a server", hint="forward requests to that server with --upstream URL"
            )
    template = None if flags.chat_template is None else read_text(flags.chat_template, "--chat-template")
    if given:
        from llmrun.cli.answers.answering import announce_loading

        announce_loading(with_model(settings, given[0]))
    options, limits, upstreams = flags.serving_options(), flags.model_limits(), flags.upstreams()

    from llmrun.serving.http_server import bound_socket, tls_context

    tls = None
    if flags.tls_cert is not None and flags.tls_key is not None:
        tls = tls_context(flags.tls_cert, flags.tls_key)
    with bound_socket(flags.address, flags.port) as listening:  # binding may fail, so it precedes a long download
        from llmrun.cli.answers.answering import tell_of_default_model
        from llmrun.cli.answers.serving import serve_models

        if flags.model is None and not names and not serves_upstreams_only:
            tell_of_default_model(settings)
        serve_models(
            flags=flags,
            settings=settings,
            names=given,
            upstreams=upstreams,
            options=options,
            limits=limits,
            template=template,
            listening=listening,
            tls=tls,
        )
    return 0
