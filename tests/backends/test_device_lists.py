"""Tests of the notation of RPC servers and of a tensor split."""

from __future__ import annotations

import pytest

from llmrun.backends.base import RPC_SERVERS, TENSOR_SPLIT, parse_rpc_servers, parse_tensor_split
from llmrun.base.sampling_texts import ListOfTexts


@pytest.mark.parametrize(
    ("text", "servers"),
    [
        ("10.0.0.2:50052", ("10.0.0.2:50052",)),
        ("10.0.0.2:50052, box:1,my-box.local:65535", ("10.0.0.2:50052", "box:1", "my-box.local:65535")),
        ("a_b:7", ("a_b:7",)),
    ],
)
def test_servers_are_hosts_with_ports(text: str, servers: tuple[str, ...]) -> None:
    assert parse_rpc_servers(text) == servers


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("10.0.0.2", "add the port, as in 10.0.0.2:50052"),
        ("box:1,box2", "add the port, as in box2:50052"),
        ("[::1]:50052", "llama.cpp's RPC supports only IPv4: use a host name or an IPv4 address"),
        ("fe80::1", "llama.cpp's RPC supports only IPv4: use a host name or an IPv4 address"),
        ("box:0", "'box:0' is not HOST:PORT"),
        ("box:65536", "'box:65536' is not HOST:PORT"),
        ("box:٣", "'box:٣' is not HOST:PORT"),
        ("box:port", "'box:port' is not HOST:PORT"),
        (":50052", "':50052' is not HOST:PORT"),
        ("box:1,", "'' is not HOST:PORT"),
        ("user@box:1", "'user@box:1' is not HOST:PORT"),
        ("-box:1", "'-box:1' is not HOST:PORT"),
        ("box:1/path", "'box:1/path' is not HOST:PORT"),
        ("a" * 300 + ":1", f"{'a' * 60!r} is not HOST:PORT"),
    ],
)
def test_anything_else_is_refused_with_advice(text: str, advice: str) -> None:
    assert not is_valid(RPC_SERVERS, text)
    assert RPC_SERVERS.advice(text) == advice


def is_valid(notation: ListOfTexts, text: str) -> bool:
    try:
        notation.parse(text)
    except ValueError:
        return False
    return True


def test_off_is_no_server() -> None:
    assert list(RPC_SERVERS.parse("off")) == []
    assert not is_valid(RPC_SERVERS, "off,box:1")


def test_a_valid_list_needs_no_advice() -> None:
    assert RPC_SERVERS.advice("box:1") == ""


@pytest.mark.parametrize(("text", "split"), [("3,1", (3.0, 1.0)), ("0.5, 0,1e1", (0.5, 0.0, 10.0)), ("1", (1.0,))])
def test_a_split_is_a_list_of_proportions(text: str, split: tuple[float, ...]) -> None:
    assert parse_tensor_split(text) == split
    assert len(TENSOR_SPLIT.parse(text)) == len(split)


@pytest.mark.parametrize("text", ["", "0", "0,0", "-1,2", "nan,1", "inf,1", "3;1", "3,,1", "three"])
def test_other_splits_are_refused(text: str) -> None:
    assert not is_valid(TENSOR_SPLIT, text)
    assert TENSOR_SPLIT.advice(text) == "give one number for each device, not all of them 0"
