"""Recommends up to three models of the catalogue for this machine: a fast one, a balanced one and the best one.

The candidates are the models that the catalogue marks as recommended, in their usual quantization, or in another one
that is on this machine already. No request is made: the sizes, the memory and the speed of a model that is not on this
machine are estimated from the catalogue and the memory bandwidth. docs/memory.md describes the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from llmrun.backends.cpu.speeds.forecast import Forecast, rough_decode_speed
from llmrun.backends.experience import CORRECTED, ESTIMATED, RUNS
from llmrun.backends.fitting import DEFAULT_CONTEXT, Fit, ProjectorHeader, Resources, fit_of
from llmrun.backends.sizing import Footprint, KVBytes
from llmrun.base.errors import LlmrunError
from llmrun.base.machine.system import available_memory
from llmrun.formats.gguf.reader import open_gguf
from llmrun.hub.catalog import load_catalog
from llmrun.hub.estimates import Estimate, active_share, copies, estimated

if TYPE_CHECKING:
    from pathlib import Path

    from llmrun.hub.catalog import CatalogEntry
    from llmrun.hub.upkeep.inventory import Model

# Tokens per second: faster than skimming, as fast as reading, and slow but readable.
FAST: Final = 30.0
BALANCED: Final = 12.0
READABLE: Final = 5.0
_TOY: Final = 0.9e9  # models with fewer weights are only for trying things out
HEADROOM: Final = 0.8  # the share of the free memory that a recommended model may need


@dataclass(frozen=True, slots=True)
class Candidate(Estimate):
    """A model that may be recommended. If `is_here`, its size and its memory are exact.

    The name of a model of Ollama or LM Studio is that of their copy.

    speed   tokens per second, or None on a GPU on which the model has not run yet
    origin  the origin of the speed (backends/experience.py), or ""
    on_gpu  whether the whole model fits on the GPUs
    """

    entry: CatalogEntry
    is_here: bool = False
    speed: float | None = None
    origin: str = ""
    on_gpu: bool = False


@dataclass(frozen=True, slots=True)
class Recommended:
    """A recommended model and its purposes: "fast", "balanced", "best", or several of these."""

    model: Candidate
    purposes: list[str] = field(default_factory=list)


def recommended(resources: Resources) -> list[Recommended]:
    """Return up to three different models for this machine, from the fastest to the best, or [] if none fits.

    Toys are recommended only if no larger model fits.
    """
    fitting = fitting_ones(resources, _is_recommended)
    return chosen([each for each in fitting if (each.entry.weights or 0) >= _TOY] or fitting)


def _is_recommended(entry: CatalogEntry) -> bool:
    return entry.recommended


def fitting_ones(resources: Resources, accept: Callable[[CatalogEntry], bool]) -> list[Candidate]:
    """Return the models of the catalogue that `accept` selects and that fit this machine."""
    if resources.memory is None:
        resources = replace(resources, memory=available_memory())
    return [each for each in candidates(resources, accept) if _fits(each, resources)]


def _fits(model: Candidate, resources: Resources) -> bool:
    return model.on_gpu or resources.memory is None or model.needed <= HEADROOM * resources.memory


def chosen(fitting: Sequence[Candidate]) -> list[Recommended]:
    """Choose among models that fit.

    Each purpose gets the largest model that is fast enough for it. If no model is fast enough for "fast" or "best", the
    fastest model gets this purpose. If no model is fast enough for "balanced", no model gets that purpose. If models
    fit on GPUs, only these models count. Because their speed is not predicted, a balanced model reads at most half as
    many bytes per token as the largest model, and a fast model at most a quarter.
    """
    fitting = [each for each in fitting if each.on_gpu] or fitting
    if not fitting:
        return []
    largest = max(fitting, key=_weights)
    found: dict[str, Recommended] = {}
    for purpose, least, share in (("fast", FAST, 0.25), ("balanced", BALANCED, 0.5), ("best", READABLE, 1.0)):
        enough = [
            each
            for each in fitting
            if (each.read <= share * largest.read if each.on_gpu or each.speed is None else each.speed >= least)
        ]
        if not enough and purpose == "balanced":
            continue
        model = max(enough, key=_weights) if enough else min(fitting, key=lambda each: each.read)
        found.setdefault(model.name, Recommended(model)).purposes.append(purpose)
    return list(found.values())


def _weights(model: Candidate) -> float:
    return model.entry.weights or 0.0


def candidates(resources: Resources, accept: Callable[[CatalogEntry], bool] = _is_recommended) -> list[Candidate]:
    """Return the models of the catalogue that `accept` selects, with their memory and speed on this machine."""
    catalog = load_catalog()
    here = copies(catalog)
    found = []
    for entry in filter(accept, catalog.entries()):
        names = [entry.name_with(quant) for quant in (entry.default, *entry.quants)]
        copy = next((model for name in names if (model := here.get(name.lower()))), None)
        made = _from_header(entry, copy, resources) if copy is not None else None
        made = made or from_catalogue(entry, entry.default, resources)
        found += [made] if made is not None else []
    return found


def from_catalogue(entry: CatalogEntry, quantization: str, resources: Resources) -> Candidate | None:
    """Return a quantization whose memory and speed are estimated, or None if the number of weights is unknown."""
    guess = estimated(entry, quantization)
    if guess is None:
        return None
    on_gpu = guess.needed <= HEADROOM * sum(gpu["free"] for gpu in resources.gpus)
    speed, origin = (None, "") if on_gpu else estimated_speed(guess.read, resources)
    facts = guess.name, guess.size, guess.is_exact, guess.needed, guess.read
    return Candidate(*facts, entry, speed=speed, origin=origin, on_gpu=on_gpu)


def _from_header(entry: CatalogEntry, copy: Model, resources: Resources) -> Candidate | None:
    """Return a model on this machine, whose memory is computed from its header, or None if the file is damaged.

    Its speed is that of real runs if there were any. Otherwise, it is estimated as for other models, because a forecast
    would have to measure many more ops.
    """
    try:
        with open_gguf(copy.path) as file:
            here = Resources(resources.memory, resources.gpus, resources.threads, None, resources.seen)
            fit = fit_of(file, here, projector=_projector_of(copy.path))
    except LlmrunError:
        return None
    read = round(copy.size * active_share(entry))
    on_gpu = 0 < fit.layers == fit.gpu_layers
    speed, origin = fit.forecast.decode_per_second if fit.forecast else None, fit.decode_origin
    if speed is None and not on_gpu:
        speed, origin = estimated_speed(read, resources)
    facts = copy.name, copy.size, True, fit.needed, read
    return Candidate(*facts, entry, is_here=True, speed=speed, origin=origin, on_gpu=on_gpu)


def _projector_of(model: Path) -> ProjectorHeader | None:
    """Return the projector next to a model, or None if there is none that can be used."""
    from llmrun.hub.local.projectors import projector_for
    from llmrun.model.vision.projector import read_projector

    try:
        path = projector_for(model)
        return None if path is None else ProjectorHeader(open_gguf(path), read_projector(path))
    except LlmrunError:  # opening the model reports the error
        return None


def as_fit(model: Candidate, resources: Resources) -> Fit:
    """Return an estimate in the form of a Fit, whose memory is not divided into its parts."""
    layers = 1 if model.on_gpu else 0
    weights = round(model.entry.weights or 1)
    return Fit(
        architecture="",
        file_type="",
        file_bytes=model.size,
        parameters=weights,
        bits=8 * model.size / weights,
        backend="llama" if model.on_gpu else "cpu",
        context=DEFAULT_CONTEXT,
        trained_context=model.entry.context or 0,
        footprint=Footprint(model.needed, KVBytes(0)),
        memory=resources.memory,
        gpu_layers=layers,
        layers=layers,
        forecast=Forecast(model.speed, None, None) if model.speed is not None else None,
        decode_origin=model.origin,
        disturbance=resources.disturbance,
    )


def estimated_speed(read: float, resources: Resources) -> tuple[float | None, str]:
    """Return the decode speed of a model that reads `read` bytes per token, and the speed's origin.

    Raises the same errors as `load_kernels` if the memory bandwidth has to be measured.
    """
    if resources.speeds is None:
        return None, ""
    factor = 1.0
    if resources.seen is not None and resources.speeds.knows_weights:
        factor, _ = resources.seen.factors()
    speed = factor * rough_decode_speed(read, resources.speeds.weights_read())
    return speed, ESTIMATED if factor == 1.0 else CORRECTED


def is_estimate(model: Candidate) -> bool:
    """Return whether a model's speed is only an estimate."""
    return model.origin not in ("", RUNS)
