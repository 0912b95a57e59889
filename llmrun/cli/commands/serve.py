"""Serve a model over HTTP, with an OpenAI-compatible API.

The server listens on this machine only, and needs no API key there. For other machines, add --host and --api-key-file.
Ctrl-C stops it after the running answers; a second Ctrl-C stops it at once.

Examples:
    llmrun serve qwen3:4b
    llmrun serve -m ./file.gguf --port 9000 --parallel 4
    llmrun serve qwen3:4b --host 0.0.0.0 --api-key-file keys.txt --tls-cert cert.pem --tls-key key.pem
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from llmrun.cli.arguments.flags import takes_flags
from llmrun.cli.arguments.prompt import read_text
from llmrun.cli.arguments.serving import ServeFlags
from llmrun.cli.arguments.values import models
from llmrun.errors import UsageError
from llmrun.remote.url import is_endpoint

if TYPE_CHECKING:
    from llmrun.settings import Settings

LISTING = {"place": 25}


@takes_flags(ServeFlags)
def command(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="A catalogue name or a .gguf file.", autocompletion=models),
    ] = None,
    *,
    flags: ServeFlags,
) -> int:
    settings = flags.settings(name)
    if is_endpoint(settings.model):
        raise UsageError(f"model: {settings.model}: already runs on a server", hint="name a model of this machine")
    template = None if flags.chat_template is None else read_text(flags.chat_template, "--chat-template")
    options = flags.serving_options()

    from llmrun.serving.http_server import bound_socket, tls_context

    tls = None
    if flags.tls_cert is not None and flags.tls_key is not None:
        tls = tls_context(flags.tls_cert, flags.tls_key)
    with bound_socket(flags.host, flags.port) as listening:  # fails now rather than after a long download
        from llmrun.cli.answers.serving import serve_model

        if flags.model is None and name is None:
            _tell_of_default(settings)
        serve_model(flags, settings, options, template, listening, tls)
    return 0


def _tell_of_default(settings: Settings) -> None:
    from llmrun.cli.answers.default_model import tell_of_default_model

    tell_of_default_model(settings, "llmrun serve")
