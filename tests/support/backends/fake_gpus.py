"""A machine with GPUs, as far as this package can tell: what llama.cpp's process answers is made up."""

from __future__ import annotations

from typing import Any

import pytest

from llmrun.backends.kind import Gpus
from llmrun.backends.llama import probe
from llmrun.backends.llama.process import LlamaProcess

GIB = 1 << 30


def pretend_gpus(monkeypatch: pytest.MonkeyPatch, *free: int, total: int = 80 * GIB) -> None:
    """A GPU for each number of free bytes. Layers given to them run on the CPU in truth: the build has no GPU."""
    names = tuple(f"GPU {index}" for index in range(len(free)))
    devices = [{"description": name, "free": n, "total": total} for name, n in zip(names, free, strict=True)]
    ask = LlamaProcess.ask

    def answered(process: LlamaProcess, operation: str, doing: str, **fields: Any) -> dict[str, Any]:
        if operation == "devices":
            return {"offloads": True, "devices": devices}
        return ask(process, operation, doing, **fields)

    monkeypatch.setattr(LlamaProcess, "ask", answered)
    monkeypatch.setattr(probe, "gpus", lambda progress=None: Gpus(names))


def pretend_answers(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """llama.cpp's answer to opening a model, with some fields of it made up; `log` is added to its own."""
    answer = LlamaProcess.answer

    def changed(process: LlamaProcess, number: int, *others: Any) -> dict[str, Any]:
        given = answer(process, number, *others)
        if "log" in given:
            given |= changes | {"log": [*given["log"], *changes.get("log", ())]}
        return given

    monkeypatch.setattr(LlamaProcess, "answer", changed)
