"""The doctor's check of the network. An unreachable network is only a note because local models run without it."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from llmrun.base.amounts import format_seconds
from llmrun.hub.remote.ping import Ping, ping_hub
from llmrun.jobs.doctor.findings import NOTE, OK, Finding
from llmrun.jobs.doctor.machine import Machine

SECTION = "Network"


def look_at_hub(machine: Machine) -> Iterator[Finding]:
    reach = ping_hub(offline=machine.offline)
    yield _hub(reach)
    words = "a Hugging Face token is set up" if reach.token else "no Hugging Face token; only gated models need one"
    yield Finding(SECTION, "token", OK, words, facts={"present": reach.token})


def _hub(reach: Ping) -> Finding:
    facts = {
        "endpoint": reach.endpoint or None,
        "reachable": reach.seconds is not None,
        "seconds": reach.seconds,
        "offline": reach.offline,
        "trouble": reach.trouble or None,
        "proxies": list(reach.proxies),
    }
    name = urlsplit(reach.endpoint).netloc or "the Hugging Face Hub"
    proxies = [variable for variable in reach.proxies if not variable.lower().startswith("no_")]
    through = f" through {proxies[0]}" if proxies else ""
    if reach.seconds is not None:
        return Finding(SECTION, "hub", OK, f"{name} answers in {format_seconds(reach.seconds)}{through}", facts=facts)
    if reach.offline:
        return Finding(SECTION, "hub", NOTE, f"{name} was not contacted: offline mode", facts=facts)
    words = f"{name} cannot be reached{through}: {reach.trouble}"
    advice = "Downloads do not work, but the models on this machine do."
    return Finding(SECTION, "hub", NOTE, words, advice, facts=facts)
