"""Tests of finding RPC servers: names, addresses that are not private, and servers that do not accept connections.

Nothing here leaves the machine: names are resolved by a fake, and only loopback addresses are connected to.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from llmrun.backends.llama import rpc_servers
from llmrun.backends.llama.process import LlamaProcess
from llmrun.backends.llama.rpc_servers import RpcServer, find_servers, lost_connection
from llmrun.base.errors import BackendCrashed, NetworkError, UsageError
from tests.support.servers.rpc_server import closed_port

REFUSAL = "is not private, and llama.cpp's RPC has neither authentication nor encryption"
LOST = "ggml-rpc.cpp:566: Remote RPC server crashed or returned malformed response"


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


@pytest.fixture
def port(listener: socket.socket) -> int:
    port: int = listener.getsockname()[1]
    return port


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the addresses of connections instead of opening them."""
    tried: list[str] = []
    monkeypatch.setattr(rpc_servers, "_connect", lambda address, seconds: tried.append(address))
    return tried


def pretend_names(monkeypatch: pytest.MonkeyPatch, **addresses: list[str]) -> None:
    """Replace the resolver."""
    monkeypatch.setattr(rpc_servers, "resolved", lambda host: addresses[host])


def test_servers_that_listen_are_found(port: int) -> None:
    assert find_servers(f"127.0.0.1:{port}", anyway=False) == [RpcServer(f"127.0.0.1:{port}", f"127.0.0.1:{port}")]


def test_llama_cpp_gets_the_address_that_was_checked(port: int) -> None:
    """If it got the name, it would resolve it again, and the second answer could be another one."""
    assert find_servers(f"localhost:{port}", anyway=False) == [RpcServer(f"localhost:{port}", f"127.0.0.1:{port}")]


@pytest.mark.parametrize(
    "address",
    ["8.8.8.8", "172.32.0.1", "172.15.255.255", "192.169.0.1", "11.0.0.1", "100.64.0.1", "0.0.0.0", "224.0.0.1"],
)
def test_addresses_that_are_not_private_are_refused(address: str, connections: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        find_servers(f"{address}:50052", anyway=False)
    assert str(caught.value) == f"--rpc: {address} {REFUSAL}"
    assert "--rpc-anyway" in caught.value.hint
    assert connections == []


@pytest.mark.parametrize("address", ["10.1.2.3", "172.16.0.1", "172.31.9.9", "192.168.1.1", "169.254.0.9", "127.9.9.9"])
def test_private_addresses_are_accepted(address: str, connections: list[str]) -> None:
    (server,) = find_servers(f"{address}:50052", anyway=False)
    assert server.address == f"{address}:50052"
    assert connections == [server.address]


def test_a_name_for_a_public_address_is_refused(monkeypatch: pytest.MonkeyPatch, connections: list[str]) -> None:
    pretend_names(monkeypatch, box=["10.0.0.2", "203.0.113.7"])
    with pytest.raises(UsageError) as caught:
        find_servers("box:50052", anyway=False)
    assert str(caught.value) == f"--rpc: box has the address 203.0.113.7, which {REFUSAL}"
    assert connections == []


def test_no_server_is_tried_before_all_are_checked(monkeypatch: pytest.MonkeyPatch, connections: list[str]) -> None:
    pretend_names(monkeypatch, near=["10.0.0.2"], far=["203.0.113.7"])
    with pytest.raises(UsageError, match=r"203\.0\.113\.7"):
        find_servers("near:1,far:1", anyway=False)
    assert connections == []


def test_rpc_anyway_allows_public_addresses(monkeypatch: pytest.MonkeyPatch, connections: list[str]) -> None:
    pretend_names(monkeypatch, far=["203.0.113.7"])
    assert find_servers("far:50052", anyway=True) == [RpcServer("far:50052", "203.0.113.7:50052")]
    assert connections == ["203.0.113.7:50052"]


def test_the_first_address_that_answers_is_used(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    pretend_names(monkeypatch, box=["127.0.0.2", "127.0.0.1"])
    (server,) = find_servers(f"box:{port}", anyway=False)
    assert server.address == f"127.0.0.1:{port}"


def test_unknown_names_are_a_network_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(host: str) -> list[str]:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(rpc_servers, "resolved", refuse)
    with pytest.raises(NetworkError) as caught:
        find_servers("nosuch.example:50052", anyway=False)
    assert str(caught.value) == "--rpc: cannot resolve the host name nosuch.example: Name or service not known"


def test_a_name_with_a_label_that_is_too_long_is_a_network_error() -> None:
    with pytest.raises(NetworkError, match=r"the host name a{70}\.example: the name is invalid"):
        find_servers(f"{'a' * 70}.example:1", anyway=False)


def test_a_resolver_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc_servers, "_RESOLVE_S", 0.1)
    monkeypatch.setattr(rpc_servers, "resolved", lambda host: time.sleep(2))
    with pytest.raises(NetworkError, match=r"cannot resolve the host name box: no answer within 0\.1 s"):
        find_servers("box:1", anyway=False)


def test_a_closed_port_is_a_network_error() -> None:
    port = closed_port()
    with pytest.raises(NetworkError) as caught:
        find_servers(f"127.0.0.1:{port}", anyway=False)
    assert str(caught.value) == f"cannot connect to the RPC server 127.0.0.1:{port}: Connection refused"
    assert caught.value.hint == f"start it on that machine: ggml-rpc-server --host ADDRESS --port {port}"
    assert caught.value.exit_code == 5


def test_a_host_that_drops_packets_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(address: str, seconds: float) -> None:
        raise TimeoutError("timed out")

    monkeypatch.setattr(rpc_servers, "_connect", late)
    with pytest.raises(NetworkError, match=r"cannot connect to the RPC server 10\.0\.0\.2:1: no answer within 3 s"):
        find_servers("10.0.0.2:1", anyway=False)


@pytest.mark.parametrize(
    ("second", "names"),
    [("127.0.0.1", "127.0.0.1:{port}"), ("localhost", "127.0.0.1:{port} and localhost:{port}")],
)
def test_a_server_that_is_listed_twice_is_refused(port: int, second: str, names: str) -> None:
    with pytest.raises(UsageError) as caught:
        find_servers(f"127.0.0.1:{port},{second}:{port}", anyway=False)
    assert str(caught.value) == f"--rpc: {names.format(port=port)}: the same server is listed twice"


def test_more_servers_than_llama_cpp_can_use_are_refused(connections: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        find_servers(",".join(f"10.0.0.{number}:50052" for number in range(100)), anyway=False)
    assert str(caught.value) == "--rpc: 100 servers are listed, but llama.cpp can use at most 15"
    assert connections == []


def test_the_server_that_is_gone_is_named(port: int) -> None:
    servers = [RpcServer("box:1", f"127.0.0.1:{port}"), RpcServer("other:2", f"127.0.0.1:{closed_port()}")]
    assert lost_connection(servers, LOST) == "the connection to the RPC server other:2 was lost"


def test_servers_that_are_all_gone_are_all_named() -> None:
    servers = [RpcServer(name, f"127.0.0.1:{closed_port()}") for name in ("box:1", "other:2")]
    assert lost_connection(servers, LOST) == "the connection to the RPC servers box:1 and other:2 was lost"


def test_servers_that_accept_connections_again_are_suspects(port: int) -> None:
    """A supervisor may have restarted the server that was lost."""
    servers = [RpcServer(name, f"127.0.0.1:{port}") for name in ("box:1", "other:2")]
    one_of_them = "the connection to one of the RPC servers box:1 and other:2 was lost"
    assert lost_connection(servers, LOST) == one_of_them
    assert lost_connection(servers[:1], LOST) == "the connection to the RPC server box:1 was lost"


def test_other_crashes_are_not_blamed_on_servers(port: int) -> None:
    assert lost_connection([RpcServer("box:1", f"127.0.0.1:{port}")], "GGML_ASSERT(n > 0) failed") == ""


def test_a_crash_because_of_a_server_is_told_as_such(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The servers are tried only once, even if several requests report the crash."""
    process = LlamaProcess()
    process.rpc_servers = [RpcServer("box:1", f"127.0.0.1:{port}")]
    process._child._stderr.tail = LOST.encode()
    process.kill()
    tried: list[str] = []
    monkeypatch.setattr(rpc_servers, "_connect", lambda address, seconds: tried.append(address))
    for doing in ("loading m.gguf", "running m.gguf"):
        with pytest.raises(BackendCrashed) as caught:
            process.ask("rest", doing)
        assert str(caught.value) == f"the connection to the RPC server box:1 was lost while {doing}"
        assert caught.value.hint == "check that ggml-rpc-server runs on each machine, then try again"
        assert caught.value.exit_code == 3
    assert tried == [f"127.0.0.1:{port}"]
    process.close()
