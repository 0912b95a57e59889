"""A recorded run: everything that decides an answer of the CPU engine, the answer, and digests of its computation."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from llmrun.engine.requests import ChatPrompt, RecordedChat, Request, TokenPrompt
from llmrun.options.sampling_params import SAMPLING

FORMAT: Final = "llmrun-run"
VERSION: Final = 1  # of the file format
TOKENS_A_DIGEST: Final = 32


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A file of a model: its name without folders, and its sha256 in hexadecimal."""

    name: str
    sha256: str


@dataclass(frozen=True, slots=True)
class RecordedAdapter:
    """A LoRA adapter that the model was opened with. `path` is absolute, and `scale` that of the recorded request."""

    name: str
    path: str
    sha256: str
    scale: float


@dataclass(frozen=True, slots=True)
class Opening:
    """The settings that the model was opened with, as far as they affect answers.

    template       the sha256 of the chat template's source; None if the prompt was raw text
    chat_template  the source of the template that replaced the model's own, or None
    thinking_tags  the thinking tags from the catalogue, or None
    """

    kv_type: str
    context_size: int
    template: str | None
    chat_template: str | None
    thinking_tags: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class Output:
    """The answer.

    tokens  token ids, without an end-of-generation token
    finish  why it ended: a FinishReason
    logits  digests of the logits from which tokens were drawn, by the index of the token
    """

    tokens: tuple[int, ...]
    finish: str
    logits: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class Recording:
    """One recorded run.

    numerics       the version of the engine's numerics (layouts/numerics.py)
    llmrun         llmrun's version
    model          the name that the user gave; for a file, its absolute path
    prompt_tokens  the token ids of the rendered prompt
    request        the request, whose prompt has the same token ids
    ops            names and digests of all ops in a step with the first tokens of the prompt (`op_tokens`)
    machine        facts about the machine, for information only
    adapters       the LoRA adapters
    """

    numerics: int
    llmrun: str
    model: str
    files: tuple[ModelFile, ...]
    opening: Opening
    prompt_tokens: tuple[int, ...]
    request: Request
    output: Output
    ops: tuple[tuple[str, str], ...]
    machine: Mapping[str, str]
    adapters: tuple[RecordedAdapter, ...] = ()

    @property
    def op_tokens(self) -> tuple[int, ...]:
        """The first tokens of the prompt, which the step for `ops` runs."""
        return first_tokens(self.prompt_tokens)

    def as_json(self) -> dict[str, Any]:
        """Return the recording in the form of its file."""
        request, prompt = self.request, self.request.prompt
        chat = None
        if isinstance(prompt, ChatPrompt):
            chat = {"messages": [*prompt.messages], "template_kwargs": dict(prompt.template_kwargs)}
        wanted = request.response_format
        return {
            "format": FORMAT,
            "version": VERSION,
            "numerics": self.numerics,
            "llmrun": self.llmrun,
            "model": self.model,
            "files": [asdict(file) for file in self.files],
            **asdict(self.opening),
            **({"adapters": [asdict(adapter) for adapter in self.adapters]} if self.adapters else {}),
            "chat": chat,
            "prompt_tokens": [*self.prompt_tokens],
            "max_tokens": request.max_tokens,
            "stop": [*request.stop],
            "think": request.think,
            "think_budget": request.think_budget,
            "response_format": wanted and asdict(wanted),
            "sampling": {name: getattr(request.sampling, name) for name in SAMPLING},
            "logit_bias": {
                str(token): None if bias == -math.inf else bias for token, bias in request.sampling.logit_bias.items()
            },
            "seed": request.sampling.seed,
            "tokens": [*self.output.tokens],
            "token_digests": [*token_digests(self.output.tokens)],
            "finish": self.output.finish,
            "logits": {str(index): digest for index, digest in self.output.logits.items()},
            "ops": [[*op] for op in self.ops],
            "machine": dict(self.machine),
        }


def prompt_of(chat: Mapping[str, Any] | None, tokens: Sequence[int]) -> RecordedChat | TokenPrompt:
    """Return the prompt of a recorded request. `chat` has messages and template_kwargs, or is None for raw text."""
    if chat is None:
        return TokenPrompt(tokens)
    return RecordedChat(chat["messages"], template_kwargs=chat["template_kwargs"], tokens=tokens)


def first_tokens(prompt: Sequence[int]) -> tuple[int, ...]:
    """Return the tokens of the step whose ops are digested: up to 8, so that the kernels for a few rows run."""
    return tuple(prompt[:8])


def token_digests(tokens: Sequence[int]) -> Iterator[str]:
    """Yield a digest of the tokens up to every 32nd and up to the last one, which reveals edited or damaged files."""
    hashed = hashlib.sha256()
    for start in range(0, len(tokens), TOKENS_A_DIGEST):
        hashed.update(np.array(tokens[start : start + TOKENS_A_DIGEST], "<i4").tobytes())
        yield hashed.hexdigest()[:16]
