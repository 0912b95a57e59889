"""Finds llama.cpp's RPC servers by name, and refuses addresses that are not private.

All checks come before llama.cpp connects, because llama.cpp aborts its process if it cannot connect. llama.cpp receives
the checked addresses rather than the names, so that a name cannot resolve to another address later.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llmrun.backends.base import MOST_DEVICES, parse_rpc_servers
from llmrun.base.errors import NetworkError, UsageError, shown

SERVER_PROGRAM = "ggml-rpc-server"
LOST_HINT = f"check that {SERVER_PROGRAM} runs on each machine, then try again"

_RESOLVE_S = 5.0
_CONNECT_S = 3.0
_STILL_THERE_S = 1.0
# These are the loopback, private (RFC 1918) and link-local networks. `ipaddress.is_private` also includes networks
# for documentation and benchmarks, and its list has changed between versions of Python.
_PRIVATE = [
    ipaddress.IPv4Network(network)
    for network in ("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16")
]


@dataclass(frozen=True, slots=True)
class RpcServer:
    """A server that accepts connections.

    name     HOST:PORT as the user wrote it
    address  HOST:PORT with an IPv4 address
    """

    name: str
    address: str


def find_servers(text: str, *, anyway: bool) -> list[RpcServer]:
    """Resolve the names in a list of servers, check their addresses, and try to connect to each of them.

    anyway  allow addresses that are not private
    Raises UsageError for an address that is not private, a server that is listed twice and too many servers. Raises
    NetworkError if a name cannot be resolved or a server cannot be reached.
    """
    names = parse_rpc_servers(text)
    if len(names) > MOST_DEVICES:
        raise UsageError(f"--rpc: {len(names)} servers are listed, but llama.cpp can use at most {MOST_DEVICES}")
    addresses = {name: _addresses_of(name) for name in dict.fromkeys(names)}
    if not anyway:
        for name, found in addresses.items():
            _check_private(name, found)
    servers = [RpcServer(name, _reachable(name, addresses[name])) for name in names]
    known: dict[str, str] = {}
    for server in servers:
        if server.address in known:
            both = dict.fromkeys((known[server.address], server.name))
            raise UsageError(f"--rpc: {' and '.join(both)}: the same server is listed twice")
        known[server.address] = server.name
    return servers


def lost_connection(servers: Sequence[RpcServer], reason: str) -> str:
    """Return which connection was lost, or "" if something else made llama.cpp crash.

    Call this function only once after a crash. A server accepts the next connection only after detecting that its
    client is gone, so a few attempts in a row fill the server's queue, and the server also seems to be gone.

    reason  the last fatal error that llama.cpp printed
    """
    if "RPC server" not in reason and "Failed to connect" not in reason:
        return ""
    gone = [server for server in servers if not _accepts(server.address, _STILL_THERE_S)]
    names = " and ".join(server.name for server in gone or servers)
    if len(servers) > 1 and not gone:
        return f"the connection to one of the RPC servers {names} was lost"
    return f"the connection to the RPC server{'s' if len(gone) > 1 else ''} {names} was lost"


def resolved(host: str) -> list[str]:
    """Return the IPv4 addresses of a host. Raises OSError."""
    found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[4][0]) for address in found))


def _addresses_of(name: str) -> list[str]:
    """Resolve a server's host name within a few seconds. The system itself may wait much longer for name servers."""
    host = name.rpartition(":")[0]
    answers: list[list[str] | OSError] = []
    asking = threading.Thread(target=_attempt, args=(lambda: resolved(host), answers), daemon=True)
    asking.start()
    asking.join(_RESOLVE_S)
    answer = answers[0] if answers else OSError(f"no answer within {_RESOLVE_S:g} s")
    if isinstance(answer, OSError):
        raise NetworkError(
            f"--rpc: cannot resolve the host name {shown(host)}: {answer.strerror or answer}",
            hint="check the name, or use the server's IPv4 address",
        )
    return answer


def _attempt(work: Callable[[], list[str]], answers: list[list[str] | OSError]) -> None:
    try:
        answers.append(work())
    except (OSError, UnicodeError) as error:  # A UnicodeError means that a label of the name is too long.
        answers.append(error if isinstance(error, OSError) else OSError("the name is invalid"))


def _check_private(name: str, addresses: Sequence[str]) -> None:
    host = name.rpartition(":")[0]
    for address in addresses:
        if not any(ipaddress.IPv4Address(address) in network for network in _PRIVATE):
            what = address if host == address else f"{host} has the address {address}, which"
            raise UsageError(
                f"--rpc: {what} is not private, and llama.cpp's RPC has neither authentication nor encryption",
                hint="use a private network or a VPN, or add --rpc-anyway if nobody else can reach the server",
            )


def _reachable(name: str, addresses: Sequence[str]) -> str:
    """Return the first of a server's addresses that accepts a connection, with its port. Raises NetworkError."""
    port = name.rpartition(":")[2]
    problem = ""
    for address in addresses:
        try:
            _connect(f"{address}:{port}", _CONNECT_S)
        except OSError as error:
            late = isinstance(error, TimeoutError)
            problem = f"no answer within {_CONNECT_S:g} s" if late else error.strerror or str(error)
        else:
            return f"{address}:{port}"
    raise NetworkError(
        f"cannot connect to the RPC server {name}: {problem}",
        hint=f"start it on that machine: {SERVER_PROGRAM} --host ADDRESS --port {port}",
    )


def _accepts(address: str, seconds: float) -> bool:
    try:
        _connect(address, seconds)
    except OSError:
        return False
    return True


def _connect(address: str, seconds: float) -> None:
    """Open a connection and close it again. Raises OSError."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host, int(port)), seconds).close()
