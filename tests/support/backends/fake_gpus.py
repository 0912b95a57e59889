"""Simulate a machine with GPUs by faking the answers of the llama.cpp child process."""

from __future__ import annotations

from typing import Any

import pytest

from llmrun.backends.llama import probe
from llmrun.backends.llama.process import LlamaProcess
from llmrun.backends.registry import Gpus

GIB = 1 << 30


def pretend_gpus(monkeypatch: pytest.MonkeyPatch, *free: int, total: int = 80 * GIB, name: str = "GPU") -> None:
    """Report one GPU per number of free bytes. Offloaded layers still run on the CPU, because the build has no GPU
    support."""
    names = tuple(f"{name} {index}" for index in range(len(free)))
    devices = [{"description": name, "free": n, "total": total} for name, n in zip(names, free, strict=True)]
    ask = LlamaProcess.ask

    def answered(process: LlamaProcess, operation: str, doing: str, **fields: Any) -> dict[str, Any]:
        if operation == "devices":
            return {"offloads": True, "devices": devices, "why_none": "", "advice": ""}
        return ask(process, operation, doing, **fields)

    monkeypatch.setattr(LlamaProcess, "ask", answered)
    monkeypatch.setattr(probe, "gpus", lambda progress=None: Gpus(names))


def pretend_answers(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Replace fields of llama.cpp's answer to opening a model. A `log` is appended to the real one."""
    answer = LlamaProcess.answer

    def changed(process: LlamaProcess, number: int, *others: Any) -> dict[str, Any]:
        given = answer(process, number, *others)
        if "log" in given:
            given |= changes | {"log": [*given["log"], *changes.get("log", ())]}
        return given

    monkeypatch.setattr(LlamaProcess, "answer", changed)
