"""The doctor's check of the RPC servers that the settings name."""

from __future__ import annotations

from collections.abc import Iterator

from llmrun.backends.llama.rpc.connecting import build_problem, devices_with
from llmrun.base.amounts import format_bytes
from llmrun.base.errors import LlmrunError
from llmrun.jobs.doctor.findings import NOTE, OK, Finding, advice_of
from llmrun.jobs.doctor.graphics import LLAMA
from llmrun.jobs.doctor.machine import Machine
from llmrun.options.settings import load_sound_settings

_NAME = "rpc_servers"


def look_at_rpc(machine: Machine) -> Iterator[Finding]:
    """Check whether llama.cpp can use the servers. Without servers in the settings, nothing is missing."""
    settings, _ = load_sound_settings()
    servers = settings.rpc_servers
    if not servers:
        return
    facts = {"servers": servers.split(",")}
    problem = build_problem()
    if problem is not None:
        words = f"RPC servers cannot be used: {problem.words}"
        yield Finding(LLAMA, _NAME, NOTE, words, "To use the RPC servers in the settings:", problem.command, facts)
        return
    if machine.offline:
        yield Finding(
            LLAMA, _NAME, OK, "llama.cpp was built with RPC; offline: the RPC servers were not tried", facts=facts
        )
        return
    try:
        devices = devices_with(servers, anyway=settings.rpc_anyway)
    except LlmrunError as error:
        yield Finding(LLAMA, _NAME, NOTE, str(error), advice_of(error), facts=facts)
        return
    found = ", ".join(f"{device['description']} ({format_bytes(device['free'])} free)" for device in devices)
    yield Finding(LLAMA, _NAME, OK, f"with the RPC servers, llama.cpp can use {found}", facts=facts)
