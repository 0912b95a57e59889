"""Replaces and corrects forecasts by the speeds that real runs have reached on this machine (run_speeds.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Final

from llmrun.backends.base import OpenOptions
from llmrun.backends.cpu.speeds.forecast import REQUEST_S, Forecast
from llmrun.backends.registry import backend_named
from llmrun.backends.run_speeds import CONFIRMED, Run, RunKey, kept_runs
from llmrun.base.errors import LlmrunError
from llmrun.formats.gguf.reader import open_gguf

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llmrun.backends.cpu.speeds.machine import Speeds

# The origins of a speed.
PREDICTED: Final = "prediction"
CORRECTED: Final = "corrected prediction"
RUNS: Final = "runs"
ESTIMATED: Final = "catalogue"

_FAR: Final = 1.5  # predictions count as far off if real speeds differ from them by more than this factor
_COMPARED: Final = 3  # the number of recent models with which predictions are compared


@dataclass(slots=True)
class Experience:
    """The real speeds with one number of threads, and how far predictions were off."""

    threads: int
    speeds: Speeds
    runs: Mapping[RunKey, Run] = field(default_factory=kept_runs)
    _factors: tuple[float, float] | None = None  # None until computed

    def adjusted(self, key: RunKey, forecast: Forecast | None, prompt: int) -> tuple[Forecast | None, str, str]:
        """Return the speeds to expect of a model file, and the origins of its decode and its prefill speed.

        forecast  the model's forecast, or None if its backend has none
        prompt    length of the prompt in tokens, for the TTFT
        """
        run = self.runs.get(key, Run(*key))
        if forecast is None:
            if not run.decode:
                return None, "", ""
            ttft = REQUEST_S + prompt / run.prefill if run.prefill else None
            return Forecast(run.decode, run.prefill or None, ttft), RUNS, RUNS if run.prefill else ""
        decode, decode_origin = self._adjusted(run, run.decode, forecast.decode_per_second, 0)
        prefill, prefill_origin = self._adjusted(run, run.prefill, forecast.prefill_per_second, 1)
        ttft = forecast.ttft_s
        if prefill and prefill_origin != PREDICTED:
            ttft = REQUEST_S + prompt / prefill
        return Forecast(decode, prefill, ttft), decode_origin, prefill_origin

    def _adjusted(self, run: Run, real: float, predicted: float | None, part: int) -> tuple[float | None, str]:
        if _is_believed(run, real, predicted):
            return real, RUNS
        factor = self.factors()[part]
        return (predicted, PREDICTED) if predicted is None or factor == 1.0 else (factor * predicted, CORRECTED)

    def factors(self) -> tuple[float, float]:
        """Return the factors by which predictions of the decode and the prefill speed must be multiplied.

        Predictions are compared with the real speeds of the models that have run most recently. Only ops whose speeds
        are known already take part, so the comparison measures nothing new.
        """
        if self._factors is None:
            recent = [run for run in self.runs.values() if run.threads == self.threads and not run.gpu_layers]
            recent.sort(key=lambda run: -run.at)
            ratios = [self._ratios(run) for run in recent[:_COMPARED]]
            self._factors = _factor([decode for decode, _ in ratios]), _factor([prefill for _, prefill in ratios])
        return self._factors

    def _ratios(self, run: Run) -> tuple[float, float]:
        """Return the real decode and prefill speeds divided by the predicted ones, 0.0 if unknown."""
        entry = backend_named(run.backend)
        try:
            with self.speeds.only_known(), open_gguf(run.file) as file:
                options = OpenOptions(threads=self.threads)
                found = entry.kind().forecast(file, options, self.speeds, _PROMPT) if entry is not None else None
        except (LlmrunError, LookupError, OSError):
            return 0.0, 0.0  # the model is gone, or ops that it needs have not been measured
        if found is None:
            return 0.0, 0.0
        pairs = (run.decode, found.decode_per_second), (run.prefill, found.prefill_per_second)
        decode, prefill = (
            real / predicted if predicted and _is_believed(run, real, predicted) else 0.0 for real, predicted in pairs
        )
        return decode, prefill


_PROMPT: Final = 512  # tokens, a typical prompt


def _is_believed(run: Run, real: float, predicted: float | None) -> bool:
    """Return whether a real speed counts. A speed far below the prediction must be confirmed by several runs."""
    return real > 0 and (real * _FAR >= (predicted or 0.0) or run.count >= CONFIRMED)


def _factor(ratios: Sequence[float]) -> float:
    """Return the median of the known ratios if it is far from 1, or else 1."""
    known = [ratio for ratio in ratios if ratio]
    middle = median(known) if known else 1.0
    return middle if not 1 / _FAR <= middle <= _FAR else 1.0
