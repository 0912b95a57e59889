"""Chooses the model and the context for an agent, and refuses models that the agent cannot use."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from llmrun.backends.base import TRAINED_CONTEXT
from llmrun.backends.registry import is_stand_in
from llmrun.base.amounts import format_bytes
from llmrun.base.errors import DoesNotFit, UsageError
from llmrun.base.machine.shell import words
from llmrun.cli.console.output import out
from llmrun.engine.remote.request import is_endpoint
from llmrun.options.settings import Settings, is_set

if TYPE_CHECKING:
    from llmrun.backends.fitting import Resources
    from llmrun.cli.launching.agents import Agent
    from llmrun.hub.recommendation import Candidate

PARALLEL: Final = 4  # an agent sends short requests beside its main one, for example for a title


@dataclass(frozen=True, slots=True)
class AgentModel:
    """The model for an agent.

    path     the first file, or None if the model has not been downloaded
    name     the name that requests use
    lasting  a name that means the same model in any folder
    """

    path: Path | None
    name: str
    lasting: str


def chosen_model(settings: Settings, agent: Agent, given: str | None) -> Settings:
    """Return the settings with the model that the user has chosen, or else with one that suits agents and this machine.

    given  the value of --model
    Raises DoesNotFit if no model of the catalogue suits agents and this machine.
    """
    if is_endpoint(settings.model):
        raise UsageError(f"model: {settings.model}: already runs on a server", hint="name a model on this machine")
    if given is not None or is_set("model") or settings.model != Settings().model or is_stand_in(settings.backend):
        return settings
    found = suitable_model(settings, agent)
    if found is None:
        hint = words(["llmrun", "launch", agent.name, "-m", "MODEL"])
        raise DoesNotFit("no model of the catalogue suits both agents and this machine", hint=hint)
    return replace(settings, model=found.name)


def suitable_model(settings: Settings, agent: Agent) -> Candidate | None:
    """Return the model of the catalogue that suits an agent on this machine best, or None.

    If such models are on this machine already, only these count. Agents read long prompts, so a model that generates at
    a balanced speed is better than the largest one.
    """
    from llmrun.hub.recommendation import chosen, fitting_ones

    out.progress("measuring this machine (once)", at_once=True)
    resources = _resources(settings)
    found = fitting_ones(resources, lambda entry: entry.agents and (entry.context or 0) >= agent.context)
    if resources.speeds is not None:
        resources.speeds.keep()
    out.clear_progress()
    best = chosen([each for each in found if each.is_here] or found)
    return next((each.model for each in best if "balanced" in each.purposes), best[0].model if best else None)


def _resources(settings: Settings) -> Resources:
    from llmrun.backends.cpu.speeds.machine import Speeds
    from llmrun.backends.fitting import Resources
    from llmrun.base.machine.cpu_count import default_threads
    from llmrun.cli.answers.room import idle_memory

    threads = settings.threads or default_threads()
    found = Resources.of_this_machine(threads=threads, speeds=Speeds.of_this_machine(threads))
    return replace(found, memory=None if found.memory is None else found.memory + idle_memory())


def find_model(settings: Settings, *, download: bool) -> AgentModel:
    """Find the model's file, and download it if necessary. May raise any LlmrunError from the hub."""
    from llmrun.cli.answers.answering import lasting_name

    lasting = lasting_name(settings)
    if is_stand_in(settings.backend):
        return AgentModel(None, Path(settings.model).stem, lasting)
    from llmrun.cli.console.progress import HubReporter
    from llmrun.hub.local.stored_models import find
    from llmrun.hub.resolve.model_file import LocalPath, existing, resolve, understand

    meant, path, name = understand(settings.model), None, ""
    if isinstance(meant, LocalPath):
        path, name = existing(meant), meant.title
    elif download:
        found = resolve(settings.model, offline=settings.offline, reporter=HubReporter())
        path, name = found.path, found.name
    else:
        path, name = find(meant, HubReporter()), meant.name
    return AgentModel(path, name if settings.preset is None else settings.preset.name, lasting)


def check_context(asked: int | None, agent: Agent) -> None:
    """Raise UsageError if the user asks for a context that is too small for the agent."""
    if asked is not None and asked != TRAINED_CONTEXT and asked < agent.context:
        hint = f"use {agent.context} or more; the first prompt alone has about {agent.first_prompt:,} tokens"
        raise UsageError(f"--ctx-size: {asked:,} tokens are too few for {agent.title}", hint=hint)


def least_context(settings: Settings, agent: Agent, path: Path | None) -> int:
    """Return the smallest context that a server must have for this run: --ctx-size, or what the agent needs.

    Raises UsageError, with a better model as a hint, for models that the agent cannot use.
    """
    trained = 0 if path is None else _check_model(settings, agent, path)
    asked = trained if settings.ctx_size == TRAINED_CONTEXT else settings.ctx_size
    return asked or agent.context


def _check_model(settings: Settings, agent: Agent, path: Path) -> int:
    """Return the context that the model was trained for, or 0 if unknown. Raises UsageError for unsuitable models."""
    from llmrun.formats.gguf.metadata import check_is_model
    from llmrun.formats.gguf.reader import open_gguf
    from llmrun.model.archs.parts.encoders import is_encoder
    from llmrun.serving.models.known import mentions_tools

    with open_gguf(path) as file:
        check_is_model(file)
        trained = file.integer(f"{file.string('general.architecture')}.context_length", 0, minimum=0)
        template = file.metadata.get("tokenizer.chat_template")
        problem = ""
        if is_encoder(file):
            problem = "it is an embedding model, which generates no text"
        elif not isinstance(template, str):
            problem = "it has no chat template"
        elif agent.tools and not mentions_tools(template):
            problem = "its chat template does not support tools"
        elif trained and trained < agent.context:
            problem = f"it was trained for {trained:,} tokens of context, and {agent.title} needs {agent.context:,}"
    if problem:
        raise unsuitable(settings, agent, problem)
    return trained


def unsuitable(settings: Settings, agent: Agent, problem: str) -> UsageError:
    """Return an error whose hint names a better model for this machine."""
    better = suitable_model(settings, agent)
    hint = ""
    if better is not None and better.name != settings.model:
        hint = f"a model that fits: {words(['llmrun', 'launch', agent.name, '-m', better.name])}"
    return UsageError(f"{settings.model} cannot be used with {agent.title}: {problem}", hint=hint)


def context_for(settings: Settings, least: int, path: Path | None) -> int:
    """Return the context for a new server in tokens: `least`, or the default of `llmrun serve` if that is larger.

    Raises DoesNotFit if there is not enough memory for `least` tokens.
    """
    if path is None or settings.ctx_size is not None:
        return least
    from llmrun.backends.fitting import ProjectorHeader, Resources, fit_of
    from llmrun.backends.sizing import LARGEST_DEFAULT, MemoryNeeds
    from llmrun.cli.answers.vision import projector_of
    from llmrun.formats.gguf.reader import open_gguf

    resources = Resources.of_this_machine(threads=settings.threads)
    projector = None if settings.mmproj is None else projector_of(path, settings)
    with open_gguf(path) as file, contextlib.ExitStack() as opened:
        header = None
        if projector is not None:
            header = ProjectorHeader(opened.enter_context(open_gguf(projector.path)), projector)
        fit = fit_of(file, resources, context=least, kv_type=settings.kv_type, projector=header)
    most = max(least, min(fit.trained_context or LARGEST_DEFAULT, LARGEST_DEFAULT))
    if fit.memory is None or fit.gpu_layers:
        return most
    needs = MemoryNeeds(fit.footprint, fit.memory - fit.footprint.programs - fit.vision)
    if not needs.fits(least):
        raise DoesNotFit(
            f"not enough memory for {least:,} tokens of context: {format_bytes(fit.needed)} needed, "
            f"{format_bytes(fit.memory)} free",
            hint="close other programs, or choose a smaller model with -m",
        )
    return max(least, min(most, needs.comfortable))
