"""The notation of the options that divide a model among several devices, and the limits of llama.cpp.

This module is apart from the llama.cpp backend because every command reads the settings, which check these values.
"""

from __future__ import annotations

import functools
import math
import re
from typing import Final

from llmrun.base.sampling_texts import ListOfTexts

SPLIT_MODES: Final = ("layer", "row", "none")  # how llama.cpp divides a model among devices; "layer" is the default
MOST_DEVICES: Final = 15  # besides the CPU; ggml's scheduler takes 16 backends (GGML_SCHED_MAX_BACKENDS)
RPC_OFF: Final = "off"  # no servers, which overrides a list in the environment or config.toml
DEFAULT_PORT: Final = 50052  # of llama.cpp's ggml-rpc-server

_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,252}[A-Za-z0-9_.])?")


@functools.lru_cache(maxsize=16)
def parse_rpc_servers(text: str) -> tuple[str, ...]:
    """Return the servers in a list such as "10.0.0.2:50052,box:50052". Raises ValueError with the invalid part."""
    servers = [part.strip(" ") for part in text.split(",")]
    for server in servers:
        host, _, port = server.rpartition(":")
        if not _HOST.fullmatch(host) or not (port.isdecimal() and port.isascii() and 0 < int(port) < 1 << 16):
            raise ValueError(server)
    return tuple(servers)


def _server_advice(text: str) -> str:
    try:
        parse_rpc_servers(text)
    except ValueError as error:
        server = str(error)
        if server.count(":") > 1:
            return "llama.cpp's RPC supports only IPv4: use a host name or an IPv4 address"
        if _HOST.fullmatch(server):
            return f"add the port, as in {server}:{DEFAULT_PORT}"
        return f"{server[:60]!r} is not HOST:PORT"
    return ""


@functools.lru_cache(maxsize=16)
def parse_tensor_split(text: str) -> tuple[float, ...]:
    """Return the proportions in a list such as "3,1". Raises ValueError."""
    parts = tuple(float(part) for part in text.split(","))
    if not all(math.isfinite(part) and part >= 0 for part in parts) or not any(parts):
        raise ValueError(text)
    return parts


RPC_SERVERS: Final = ListOfTexts(
    lambda text: () if text == RPC_OFF else parse_rpc_servers(text),
    f"{RPC_OFF} or a list of servers, as in 10.0.0.2:{DEFAULT_PORT},10.0.0.3:{DEFAULT_PORT}",
    _server_advice,
)
TENSOR_SPLIT: Final = ListOfTexts(
    lambda text: [str(part) for part in parse_tensor_split(text)],
    "a list of proportions, as in 3,1",
    lambda text: "give one number for each device, not all of them 0",
)
