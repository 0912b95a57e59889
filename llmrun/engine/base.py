"""The common interface of local and remote engines, the status of an engine, and the timings of a request.

The metrics are defined as in vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from llmrun.base.errors import UsageError
from llmrun.base.types import Timings

if TYPE_CHECKING:
    from llmrun.base.types import ModelInfo
    from llmrun.engine.requests import Event, PrefillProgress, Request, StatePlace


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """The state of an engine between two steps.

    free_tokens       tokens for which the KV cache has room, if it drops all prefixes that no running request uses
    prompt_tokens     prompt tokens of all requests that have begun since the engine was opened
    cached_tokens     how many of these prompt tokens were reused from the KV cache
    generated_tokens  tokens of all answers since the engine was opened
    preemptions       how often a running request had to return to the queue
    """

    running: int
    waiting: int
    free_tokens: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    preemptions: int


def request_timings(
    *,
    load_s: float,
    submitted: float,
    prefill_started: float,
    step_times: Sequence[float],
    ended: float,
    prompt_tokens: int,
    cached_tokens: int,
    generated_tokens: int,
    steps: int = 0,
    drafted_tokens: int = 0,
    accepted_tokens: int = 0,
    forced_tokens: int = 0,
    encoded_images: int = 0,
    encode_s: float = 0.0,
    image_wait_s: float = 0.0,
) -> Timings:
    """Return the Timings of one request. All timestamps are in seconds of the same monotonic clock.

    submitted        when the request was submitted, before tokenization
    prefill_started  start of the first forward pass; time in the queue counts toward the TTFT, but not the prefill
    step_times       when each step that generated tokens ended, or when each piece of text arrived
    ended            when the request ended; used only if no token was generated (TTFT and decode time are 0 then)
    steps            number of steps that generated tokens; 0 if unknown (remote)
    encode_s         time for encoding images
    image_wait_s     time in which the prompt could not run because of an image; it counts toward the TTFT, but not the
                     prefill. While other images are encoded by another process, the prompt runs
    """
    first = step_times[0] if step_times else ended
    last = step_times[-1] if step_times else ended
    return Timings(
        load_s=load_s,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        generated_tokens=generated_tokens,
        prefill_s=max(first - prefill_started - image_wait_s, 0.0),
        ttft_s=first - submitted if step_times else 0.0,
        decode_s=last - first,
        total_s=last - submitted,
        gaps_s=tuple(later - earlier for earlier, later in pairwise(step_times)),
        steps=steps,
        drafted_tokens=drafted_tokens,
        accepted_tokens=accepted_tokens,
        forced_tokens=forced_tokens,
        encoded_images=encoded_images,
        encode_s=encode_s,
        image_wait_s=image_wait_s,
    )


def check_generates(info: ModelInfo) -> None:
    """Raise UsageError if the model is an encoder."""
    if not info.has_logits:
        raise UsageError(f"{info.name} computes embeddings and generates no text", hint="use it with `llmrun embed`")


class ShownTemplate(Protocol):
    """A chat template, as commands show it. `engine.templates.chat_template.ChatTemplate` describes the fields."""

    @property
    def source(self) -> str: ...

    @property
    def name(self) -> str: ...

    @property
    def origin(self) -> str: ...


class ShownStyle(Protocol):
    """The tags that enclose a model's thinking. `engine.thinking.ThinkingStyle` describes the fields."""

    @property
    def opening(self) -> str: ...

    @property
    def closing(self) -> tuple[str, ...]: ...


class ThinkingSupport(Protocol):
    """A model's thinking tags and switch. `engine.prompts.ModelThinking` documents the methods."""

    @property
    def style(self) -> ShownStyle | None: ...

    @property
    def has_switch(self) -> bool: ...

    @property
    def can_think(self) -> bool: ...

    def prepare(self) -> None: ...

    def require(self) -> None: ...


def require_thinking(thinking: ThinkingSupport) -> None:
    """Raise UsageError if the model does not support thinking."""
    if not thinking.can_think:
        raise UsageError(
            "thinking cannot be switched on: this model's chat template has no thinking switch, and its thinking "
            "tags are unknown",
            hint="leave thinking off; this model answers directly",
        )


class ToolSupport(Protocol):
    """A model's support for tool calls. `engine.tool_calls.prompting.ModelTools` documents the properties."""

    @property
    def takes_tools(self) -> bool: ...

    @property
    def reads_calls(self) -> bool: ...


class Answering(Protocol):
    """One open model: in this process (`Engine`), in the background (`BackgroundEngine`) or remote (`RemoteEngine`).

    `Engine` and `RemoteEngine` document the methods and the errors they raise.

    load_s    time to open the model, in seconds; 0 if it was open already
    template  the chat template; None if the model has none, or if the server applies its own
    thinking  the model's thinking tags and switch; None for remote models, where only the server knows them
    tools     the model's support for tool calls; None for remote models
    sees_images   True if the model can read images now. Servers refuse images that their models cannot read
    saves_blocks  True if saving a longer version of a sequence adds only new parts; False for remote models
    """

    load_s: float

    @property
    def template(self) -> ShownTemplate | None: ...

    @property
    def info(self) -> ModelInfo: ...

    @property
    def thinking(self) -> ThinkingSupport | None: ...

    @property
    def tools(self) -> ToolSupport | None: ...

    @property
    def takes_chats(self) -> bool: ...

    @property
    def sees_images(self) -> bool: ...

    @property
    def saves_blocks(self) -> bool: ...

    @property
    def idle(self) -> bool: ...

    def prompt_tokens(self, request: Request) -> int | None: ...

    def submit(self, request: Request) -> int: ...

    def step(self) -> list[Event]: ...

    def generate(self, request: Request) -> Iterator[Event]: ...

    def prefill_progress(self) -> list[PrefillProgress]: ...

    def cancel(self, request_id: int) -> None: ...

    def cancel_current(self) -> None: ...

    def use_state(self, place: StatePlace | None, report: Callable[[str], None]) -> None: ...

    def save_state(self, most: int | None = None) -> None: ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
