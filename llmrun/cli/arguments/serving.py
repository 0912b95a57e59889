"""The flags of `llmrun serve`, and the checks that do not require a model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmrun.base.amounts import parse_duration
from llmrun.base.errors import UsageError
from llmrun.base.folders import prefixes_folder
from llmrun.cli.arguments import options
from llmrun.cli.arguments.options import all_models, given_by
from llmrun.cli.arguments.usage import under
from llmrun.cli.console.output import out
from llmrun.engine.remote.request import is_loopback, parse_endpoint
from llmrun.options.settings import Settings, load_settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmrun.engine.remote.request import Endpoint
    from llmrun.serving.models.registry import ModelLimits
    from llmrun.serving.options import ServingOptions
    from llmrun.serving.upstreams.upstream import Upstream

_KEEP_STORED_S = 300.0  # seconds, as in Ollama
_SECURITY = "see docs/serving.md"

_access_option = under("Access")
_upstream_option = under("Other servers")
_request_option = under("Requests")


@dataclass(frozen=True, slots=True)
class ServeFlags:
    """The values of the flags, in the order of --help. None or False means that the flag was not given."""

    model: options.LocalModel = None
    keep_loaded: Annotated[
        str | None,
        typer.Option(
            "--keep-alive",
            metavar="TIME",
            help="Unload models idle for TIME, such as 30s; -1: never.  [default: 5m; never for MODEL arguments]",
        ),
    ] = None
    max_memory: Annotated[
        float | None,
        options.speed_option(
            "--max-memory", metavar="GB", min=0.1, help="Maximum memory of all models.  [default: free memory]"
        ),
    ] = None
    host: Annotated[str, typer.Option("--host", metavar="ADDRESS", help="Address to listen on.")] = "127.0.0.1"
    port: Annotated[
        int, typer.Option("--port", metavar="N", min=0, max=65535, help="Port to listen on; 0 picks a free one.")
    ] = 8080
    api_key_file: Annotated[
        Path | None, typer.Option("--api-key-file", metavar="FILE", help="Accept only these API keys, one per line.")
    ] = None
    no_auth: Annotated[bool, _access_option("--no-auth", help="Serve other machines without API keys.")] = False
    allowed_host: Annotated[
        list[str] | None,
        _access_option("--allowed-host", metavar="NAME", help="Accept this name in Host headers. Repeatable."),
    ] = None
    cors: Annotated[
        list[str] | None,
        _access_option("--cors", metavar="ORIGIN", help="Let web pages of this origin use the server. Repeatable."),
    ] = None
    tls_cert: Annotated[
        Path | None, _access_option("--tls-cert", metavar="FILE", help="Certificate chain for HTTPS, in PEM.")
    ] = None
    tls_key: Annotated[
        Path | None, _access_option("--tls-key", metavar="FILE", help="Private key of the certificate, in PEM.")
    ] = None
    upstream: Annotated[
        list[str] | None,
        _upstream_option("--upstream", metavar="URL", help="Forward requests for other models to URL. Repeatable."),
    ] = None
    upstream_key_file: Annotated[
        Path | None,
        _upstream_option(
            "--upstream-key-file", metavar="FILE", help="API keys for upstreams: URL KEY, or one KEY for all."
        ),
    ] = None
    parallel: Annotated[
        int,
        typer.Option(
            "--parallel", metavar="N", min=1, max=256, help="Maximum number of answers to generate at a time."
        ),
    ] = 16
    ctx_size: options.ContextSize = None
    kv_tokens: Annotated[
        int | None,
        options.speed_option(
            "--kv-tokens", metavar="N", min=1, help="KV cache for all requests, in tokens.  [default: what fits]"
        ),
    ] = None
    kv_type: options.KVType = None
    lora: options.Lora = None
    mmproj: options.Mmproj = None
    no_mmproj: options.NoMmproj = False
    image_min_tokens: options.ImageMinTokens = None
    image_max_tokens: options.ImageMaxTokens = None
    overcommit: Annotated[
        bool, options.speed_option("--overcommit", help="Run more requests; redo some if the KV cache gets full.")
    ] = False
    max_wait: Annotated[
        float,
        _request_option(
            "--max-wait", metavar="S", min=0, help="Refuse requests that would wait longer than S seconds."
        ),
    ] = 60.0
    max_queue: Annotated[
        int, _request_option("--max-queue", metavar="N", min=1, help="Maximum number of waiting requests.")
    ] = 256
    drain: Annotated[
        float,
        _request_option("--drain", metavar="S", min=0, help="Seconds that running answers get when the server stops."),
    ] = 30.0
    share_prefixes: Annotated[
        bool, _access_option("--share-prefixes", help="Share cached prefixes between API keys.")
    ] = False
    save_prefixes: Annotated[
        bool, options.speed_option("--save-prefixes", help="Save long prefixes on disk for later runs, per API key.")
    ] = False
    prefix_log: Annotated[
        bool | None,
        _request_option(
            "--prefix-log/--no-prefix-log", help="Record why prefixes were not reused.  [default: prefix-log]"
        ),
    ] = None
    open_metrics: Annotated[bool, _access_option("--open-metrics", help="Serve /metrics without an API key.")] = False
    threads: options.Threads = None
    chat_template: options.ChatTemplate = None
    backend: options.Backend = None
    gpu_layers: options.GpuLayers = None
    tensor_split: options.TensorSplit = None
    split_mode: options.SplitMode = None
    main_gpu: options.MainGpu = None
    rpc: options.Rpc = None
    rpc_anyway: options.RpcAnyway = None
    speculate: options.Speculate = None
    leases: Annotated[Path | None, typer.Option("--leases", hidden=True)] = None  # for `llmrun launch`
    offline: options.Offline = False
    quiet: options.Quiet = False
    verbose: options.Verbose = False

    @property
    def address(self) -> str:
        """The address or name to listen on, without the brackets that URLs need. Raises UsageError."""
        inside, bracket, port = self.host.removeprefix("[").partition("]")
        if not bracket and self.host.count(":") == 1:
            inside, _, port = self.host.partition(":")
        if port or not inside or "//" in self.host:
            hint = "example: --host 127.0.0.1 --port 8080"
            raise UsageError(f"--host: {self.host!r} is not an address or a host name alone", hint=hint)
        return inside

    def settings(self, names: Sequence[str]) -> tuple[Settings, Sequence[str]]:
        """Load the settings for this run and configure `out` with them. Raises UsageError.

        The settings of presets are left out because each request names its preset.

        names  the models that were given as arguments; the settings are for the first model. The second result
               contains these names, or else the name in --model or the settings
        """
        all_models(names, [self.model] if self.model else None)
        if len(names) > 1 and self.lora:
            raise UsageError("--lora: cannot be used with several models", hint="serve one model")
        if len(names) > 1 and self.mmproj is not None:
            raise UsageError("--mmproj: cannot be used with several models", hint="serve one model")
        if len(names) > 1 and self.chat_template is not None:
            raise UsageError("--chat-template: cannot be used with several models", hint="serve one model")
        given = given_by(self) | ({"model": names[0]} if names else {})
        settings = load_settings(given)
        if settings.preset is not None:
            names = names or [settings.preset.name]
            settings = load_settings({**given, "model": settings.preset.model})
        out.quiet, out.verbose, out.color = settings.quiet, self.verbose, settings.color
        return replace(settings, loras=tuple(self.lora or ())), names or [settings.model]

    def upstreams(self) -> list[Upstream]:
        """Check the flags for upstreams, read their keys and print notes about risks. Raises UsageError."""
        if not self.upstream:
            if self.upstream_key_file is not None:
                raise UsageError("--upstream-key-file: there is no upstream", hint="add --upstream URL")
            return []
        from llmrun.serving.gate import UPSTREAM_FLAG, read_upstream_keys
        from llmrun.serving.upstreams.upstream import Upstream

        endpoints = list(map(_upstream_endpoint, self.upstream))
        bases = [endpoint.base for endpoint in endpoints]
        if len(set(bases)) < len(bases):
            raise UsageError("--upstream: the same server is given twice", hint="give each URL once")
        keys: dict[str, str] = {}
        if self.upstream_key_file is not None:
            keys = read_upstream_keys(self.upstream_key_file, bases)
            _tell_if_others_can_read(UPSTREAM_FLAG, self.upstream_key_file)
        for endpoint in endpoints:
            if not endpoint.is_loopback and endpoint.base.startswith("http:"):
                out.note(f"--upstream: prompts and keys are sent to {endpoint.host} unencrypted; use https if possible")
        return [Upstream(number, one, keys.get(one.base)) for number, one in enumerate(endpoints)]

    def model_limits(self) -> ModelLimits:
        """Return the limits that apply to all models together. Raises UsageError."""
        from llmrun.base.machine.memory import free_memory
        from llmrun.serving.models.registry import FOREVER, ModelLimits

        keep_s = None
        if self.keep_loaded is not None:
            try:
                keep_s = parse_duration(self.keep_loaded)
            except ValueError:
                words = f"--keep-alive: {self.keep_loaded!r} is not a duration"
                raise UsageError(words, hint="examples: 30s, 5m, 1h, or -1 for never") from None
        return ModelLimits(
            memory=free_memory() if self.max_memory is None else int(self.max_memory * 1e9),
            keep_s=_KEEP_STORED_S if keep_s is None else keep_s,
            keep_given_s=FOREVER if keep_s is None else keep_s,
            most_waiting=self.max_queue,
        )

    def serving_options(self) -> ServingOptions:
        """Check the access flags, read the API keys and print notes about risks. Raises UsageError."""
        from llmrun.serving.gate import kept_secret, read_keys
        from llmrun.serving.options import ServingOptions

        if self.no_auth and self.api_key_file is not None:
            raise UsageError("--no-auth: cannot be combined with --api-key-file", hint="use only one")
        is_local = is_loopback(self.address)
        if not is_local and self.api_key_file is None and not self.no_auth:
            raise UsageError(
                f"--host: {self.address} is reachable from other machines, so clients need API keys",
                hint="add --api-key-file FILE, or --no-auth to serve everyone",
            )
        if (self.tls_cert is None) != (self.tls_key is None):
            raise UsageError("--tls-cert and --tls-key: only one is given", hint="give both or neither")
        origins = frozenset(_checked_origin(origin) for origin in self.cors or ())
        keys = () if self.api_key_file is None else read_keys(self.api_key_file)
        if self.api_key_file is not None:
            _tell_if_others_can_read("--api-key-file", self.api_key_file)
        if not is_local and self.tls_cert is None:
            out.note(f"without --tls-cert, prompts and API keys are sent unencrypted; {_SECURITY}")
        if "*" in origins and not keys:
            out.note("--cors '*': every web page that a browser on this machine opens can use the server")
        return ServingOptions(
            keys=keys,
            allowed_hosts=frozenset(self.allowed_host or ()),
            origins=origins,
            open_metrics=self.open_metrics,
            secret=kept_secret(prefixes_folder()) if self.save_prefixes else b"",
        )


def _tell_if_others_can_read(flag: str, path: Path) -> None:
    from llmrun.serving.gate import others_can_read

    if others_can_read(path):
        out.note(f"{flag}: other users of this machine can read the file; run chmod 600 {path}")


def _upstream_endpoint(url: str) -> Endpoint:
    """Parse the URL of an upstream, which has no model. Raises UsageError."""
    endpoint = parse_endpoint(url)
    if endpoint.model:
        raise UsageError(f"--upstream: {url}: names a model", hint=f"use {endpoint.base}; requests name the model")
    return endpoint


def _checked_origin(origin: str) -> str:
    """Return an origin in the form that browsers send. Raises UsageError."""
    scheme, _, rest = origin.removesuffix("/").lower().partition("://")
    if origin != "*" and (not scheme or not rest or "/" in rest):
        raise UsageError(f"--cors: {origin!r} is not an origin", hint="example: --cors https://app.example:8443")
    return origin.removesuffix("/").lower()
