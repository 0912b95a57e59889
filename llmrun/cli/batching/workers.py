"""Parses the flag --workers and opens the workers that it names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from llmrun.base.errors import NetworkError, UsageError
from llmrun.cli.answers.answering import model_files, smaller_ones_named, tell_of_too_many_threads
from llmrun.cli.console.output import out
from llmrun.cli.console.progress import HubReporter
from llmrun.engine.remote.request import is_endpoint, parse_endpoint
from llmrun.jobs.batching.workers.ray_address import check_ray, is_ray

if TYPE_CHECKING:
    from llmrun.cli.answers.loading import ModelLoading
    from llmrun.cli.arguments.options import AnswerFlags
    from llmrun.engine.child.messages import Open
    from llmrun.jobs.batching.run import Batch
    from llmrun.jobs.batching.workers.base import Worker
    from llmrun.options.settings import Settings

LOCAL: Final = "local"
_KINDS: Final = "use local, URLs of servers, ray or ray:HOST:PORT, separated by commas"


@dataclass(frozen=True, slots=True)
class WorkersWanted:
    """The requested workers.

    names      local, URLs of servers, or a Ray cluster
    parallel   the maximum number of answers that a worker generates at a time
    kv_tokens  the size of a local worker's KV cache in tokens, or None for what fits
    template   the source of a chat template for local workers, or None
    images     True if any line has an image. Batches of text run without the projector
    """

    names: Sequence[str]
    parallel: int
    kv_tokens: int | None
    template: str | None
    images: bool = False

    @property
    def needs_model(self) -> bool:
        """True if the model must be on this machine, because a worker opens or receives a local file."""
        return any(name == LOCAL or is_ray(name) for name in self.names)


def parse_workers(text: str | None, model: str) -> list[str]:
    """Parse the value of --workers. A model that is a URL counts as a worker. Raises UsageError.

    model  the model's name or URL
    """
    names = [name.strip() for name in (text or "").split(",") if name.strip()]
    if is_endpoint(model):
        if names:
            raise UsageError(
                "--workers: cannot be combined with a model on a server",
                hint="list all servers in --workers, and leave out --model",
            )
        names = [model]
    for name in names:
        if is_ray(name):
            check_ray(name)
        elif name != LOCAL and not is_endpoint(name):
            raise UsageError(f"--workers: {name!r:.80} is not a worker", hint=_KINDS)
    addresses = [parse_endpoint(name).address if is_endpoint(name) else name for name in names]
    for name, address in zip(names, addresses, strict=True):
        if addresses.count(address) > 1:
            raise UsageError(f"--workers: {name} is given twice")
    if sum(map(is_ray, names)) > 1:
        raise UsageError("--workers: only one Ray cluster can be used")
    return names or [LOCAL]


def refuse_local(flags: AnswerFlags, settings: Settings, kv_tokens: int | None) -> None:
    """Raise UsageError for a flag that applies only to a model on this machine."""
    if flags.model is not None and not is_endpoint(settings.model) and settings.preset is None:
        raise UsageError(
            "--model: has no effect, because all workers are servers", hint="choose a model with --workers URL#MODEL"
        )
    if kv_tokens is not None:
        raise UsageError(
            "--kv-tokens: has no effect, because all workers are servers", hint="set the size when you start the server"
        )
    flags.refuse_local()


def as_begun(batch: Batch, settings: Settings) -> Settings:
    """Return the settings with the context size of the interrupted run, unless the user gave a size.

    The default context size depends on the free memory, which differs between runs.
    """
    from llmrun.jobs.batching.journal import recorded_header

    header = None if batch.force else recorded_header(batch.output)
    context = None if header is None else header.get("context_size")
    if settings.ctx_size is not None or type(context) is not int or context < 1:
        return settings
    return replace(settings, ctx_size=context)


@contextmanager
def workers_of(wanted: WorkersWanted, settings: Settings) -> Iterator[list[Worker]]:
    """Yield the workers before they are opened. If a worker needs a local model, finds or downloads that model."""
    servers = [_server(name, wanted, settings) for name in wanted.names if is_endpoint(name)]
    if not wanted.needs_model:
        yield servers
        return
    from llmrun.cli.answers.answering import to_open

    clusters = [*filter(is_ray, wanted.names)]
    with ExitStack() as held:
        files = held.enter_context(model_files(settings, sequences=wanted.parallel, images=wanted.images))
        held.enter_context(smaller_ones_named(files.found.entry))
        opening = to_open(
            settings, files, parallel=wanted.parallel, kv_tokens=wanted.kv_tokens, template=wanted.template
        )
        found: list[Worker] = []
        if LOCAL in wanted.names:
            from llmrun.jobs.batching.workers.local import LocalWorker

            tell_of_too_many_threads(settings)
            found.append(LocalWorker(opening, loading=files.loading, note=out.note, detail=out.detail))
        for name in clusters:
            found += held.enter_context(_on_ray(name, opening, settings, files.loading))
        yield [*found, *servers]


def _server(name: str, wanted: WorkersWanted, settings: Settings) -> Worker:
    from llmrun.jobs.batching.workers.endpoint import EndpointWorker

    endpoint = parse_endpoint(name)
    if settings.offline and not endpoint.is_loopback:
        raise NetworkError(f"endpoint: {endpoint.host}: not available offline, because it is on another machine")
    return EndpointWorker(endpoint, slots=2 * wanted.parallel, note=out.note)


@contextmanager
def _on_ray(name: str, opening: Open, settings: Settings, loading: ModelLoading) -> Iterator[Sequence[Worker]]:
    """Yield the workers of a Ray cluster, and disconnect from the cluster at the end."""
    from llmrun.jobs.batching.workers.ray_cluster import ModelToSend, RayCluster, Shows

    out.progress(f"connecting to {name}")
    cluster = RayCluster.connect(name, offline=settings.offline)
    try:
        model = ModelToSend.of(opening, HubReporter())
        yield cluster.workers(model, Shows(loading=loading, note=out.note, detail=out.detail))
    finally:
        cluster.kill()
