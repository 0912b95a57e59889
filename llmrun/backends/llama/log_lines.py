"""Reads what llama.cpp logs while it loads a model: why it failed, and where the layers run."""

from __future__ import annotations

import re
from collections.abc import Sequence

from llmrun.backends.describe import threads_in_words
from llmrun.base.errors import DoesNotFit, LlmrunError, ModelFileError, UnsupportedModel, UsageError
from llmrun.formats.gguf.problems import shown

_OFFLOADED = re.compile(r"offloaded (\d+/\d+) layers to GPU")
_LOG_PREFIX = re.compile(r"^(llama_\w+: |error loading model: )+")
_DEVICE = re.compile(r"using device \S+ \((.*)\) \([^()]*\) - (\d+) MiB free")


def refusal(path: str, reason: str, log: Sequence[str]) -> LlmrunError:
    """Return the error for a model that llama.cpp failed to load, based on the reason it gave and its log."""
    reason = _LOG_PREFIX.sub("", reason)
    sentence = f"llama.cpp cannot load this model: {path}: {shown(reason, 200)}"
    if "unknown model architecture" in reason or "unknown pre-tokenizer" in reason:
        return UnsupportedModel(
            sentence, hint="a newer llama-cpp-python may support it: pip install -U llama-cpp-python"
        )
    if "does not support split buffers" in reason:
        return UsageError(f"--split-mode row: {shown(reason, 200)}", hint="use --split-mode layer, the default")
    if "allocat" in reason or "out of memory" in reason:
        free = [f"{shown(name)} {int(megabytes):,} MiB" for name, megabytes in _DEVICE.findall("\n".join(log))]
        if free:
            return DoesNotFit(
                f"{sentence}; free GPU memory: {', '.join(free)}",
                hint="try --gpu-layers auto to offload only the layers that fit, or a smaller --ctx-size",
            )
        return DoesNotFit(sentence, hint="try a smaller --ctx-size, or a smaller model")
    return ModelFileError(sentence)


def placement_words(log: Sequence[str], threads: int) -> str:
    """Return where the layers run according to llama.cpp's log, such as "31/31 layers on NVIDIA H200, 2 threads"."""
    layers = offloaded(log)
    if not layers:
        return threads_in_words(threads)
    devices = " and ".join(shown(name) for name, _ in _DEVICE.findall("\n".join(log))) or "GPU"
    return f"{layers} layers on {devices}, {threads_in_words(threads)}"


def offloaded(log: Sequence[str]) -> str:
    """Return the number of offloaded layers and the total, such as "31/31", or "" if no layer is on a GPU."""
    layers = _OFFLOADED.search("\n".join(log))
    return layers[1] if layers and not layers[1].startswith("0/") else ""
