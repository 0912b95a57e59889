"""Tests of which server responses are trusted, and of where a request may go."""

from __future__ import annotations

import contextlib
import email.utils
import time
from collections.abc import Iterator

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.base.errors import LlmrunError, NetworkError
from llmrun.hub.names import RemoteFile, UrlSource
from llmrun.hub.remote import http_ranges
from llmrun.hub.remote.http_ranges import Remote, TryAgain, file_name, pin, remote_file, validator_of
from tests.support.hub.fake_hub import MODEL, SHA256, FakeHub, Fault, fake_hub


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with fake_hub() as running:
        yield running


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "*")


def at(url: str) -> Remote:
    return Remote(RemoteFile("model.gguf", len(MODEL), SHA256), lambda: (url, {"authorization": "Bearer x"}))


@pytest.mark.parametrize(
    ("headers", "validator"),
    [
        ({"etag": '"abc"'}, '"abc"'),
        ({"etag": 'W/"abc"', "last-modified": "Sat, 01 Jan 2022 00:00:00 GMT"}, "Sat, 01 Jan 2022 00:00:00 GMT"),
        ({"etag": "abc"}, ""),
        ({"etag": '"' + "a" * 300 + '"'}, ""),
        ({"etag": '"\x1b"'}, ""),
        ({"etag": '"ä"'}, ""),
        ({}, ""),
    ],
)
def test_only_what_promises_the_same_bytes_names_a_version(headers: dict[str, str], validator: str) -> None:
    assert validator_of(headers) == validator


@pytest.mark.parametrize(
    ("location", "leads_to"),
    [
        ("/other", "https://hub.example/other"),
        ("https://store.example/x?sig=1", "https://store.example/x?sig=1"),
        ("//store.example/x", "https://store.example/x"),
        ("http://127.0.0.1:8000/x", "http://127.0.0.1:8000/x"),
        ("http://localhost/x", "http://localhost/x"),
        ("https:///x", "https://hub.example/x"),
    ],
)
def test_a_redirect_is_followed_where_it_is_safe(location: str, leads_to: str) -> None:
    assert http_ranges._next_address("https://hub.example/a/b", location) == leads_to


@pytest.mark.parametrize(
    "location",
    [
        "http://store.example/x?sig=secret",
        "http://127.0.0.1.evil.example/x",
        "ftp://store.example/x",
        "file:///etc/passwd",
        "https://user:word@store.example/x",
        "https://store.example:99999/x",
        "http://[::1/x",
        "javascript:alert(1)",
        "https://\u2028.example/x",
    ],
)
def test_a_redirect_that_is_not_safe_is_refused_and_no_signature_is_told(location: str) -> None:
    with pytest.raises(NetworkError, match="refused a redirect") as caught:
        http_ranges._next_address("https://hub.example/a/b", location)
    assert "secret" not in str(caught.value)


@given(location=st.text(max_size=60) | st.from_regex(r"[a-z]{0,5}:?/{0,3}[\w.:@\[\]-]*/?.*", fullmatch=True))
def test_no_location_does_anything_but_lead_to_the_web_or_be_refused(location: str) -> None:
    try:
        target = http_ranges._next_address("https://hub.example/a/b", location)
    except NetworkError as error:
        told = str(error)
    else:
        assert target.startswith(("https://", "http://"))
        told = http_ranges._origin(target)[1] or "\n"
    assert told.isprintable()


def test_an_address_that_has_expired_is_asked_for_anew(hub: FakeHub) -> None:
    source = Remote(
        RemoteFile("model.gguf", len(MODEL), SHA256), lambda: (f"{hub.url}/org/repo/resolve/main/m.gguf", {})
    )
    hub.add("org/repo", {"m.gguf": MODEL})
    for _ in range(2):
        with source.open(0, 10, "") as answer:
            assert b"".join(answer.pieces) == MODEL[:10]
        hub.expire()
    assert [(asked.at, asked.status) for asked in hub.asked] == [
        ("hub", 302),
        ("storage", 206),
        ("storage", 403),
        ("hub", 302),
        ("storage", 206),
    ]


@pytest.mark.parametrize("fault", [Fault(status=503, skip=1), Fault(cut_after=5, skip=1)])
def test_a_host_that_fails_is_not_asked_again_without_the_hub(hub: FakeHub, fault: Fault) -> None:
    source = Remote(
        RemoteFile("model.gguf", len(MODEL), SHA256), lambda: (f"{hub.url}/org/repo/resolve/main/m.gguf", {})
    )
    hub.add("org/repo", {"m.gguf": MODEL})
    hub.faults.append(Fault(**vars(fault)))
    for failing in (False, True, False):
        with (
            pytest.raises(TryAgain) if failing else contextlib.nullcontext(),
            source.open(0, 10, "") as answer,
        ):
            assert b"".join(answer.pieces) == MODEL[:10]
    assert [asked.at for asked in hub.asked] == ["hub", "storage", "storage", "hub", "storage"]


def test_an_origin_is_scheme_host_and_port() -> None:
    assert http_ranges._origin("https://Hub.example/x") == http_ranges._origin("https://hub.example:443/y")
    assert http_ranges._origin("https://hub.example") != http_ranges._origin("https://hub.example:8443")
    assert http_ranges._origin("https://hub.example") != http_ranges._origin("http://hub.example:443")


@pytest.mark.parametrize(
    ("text", "seconds"), [("7", 7.0), ("", 0.0), ("soon", 0.0), ("-5", 0.0), ("9" * 400, 999_999_999.0)]
)
def test_a_time_to_wait_is_understood_or_nothing(text: str, seconds: float) -> None:
    assert http_ranges._seconds(text) == seconds


def test_a_time_to_wait_may_be_a_date() -> None:
    assert 50 < http_ranges._seconds(email.utils.formatdate(time.time() + 60, usegmt=True)) < 61
    assert http_ranges._seconds("Sat, 01 Jan 2022 00:00:00 GMT") == 0.0


def test_nobody_there_may_pass_and_a_wrong_certificate_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TryAgain, match="unreachable"), at("http://127.0.0.1:9/x").open(0, 1, ""):
        pass

    def refuse(*_: object, **__: object) -> None:
        raise httpx2.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] certificate has expired")

    monkeypatch.setattr(httpx2.Client, "send", refuse)
    with pytest.raises(NetworkError, match="CERTIFICATE") as caught, at("https://hub.example/x").open(0, 1, ""):
        pass
    assert not isinstance(caught.value, TryAgain)


def test_who_waits_for_bytes_can_be_woken(hub: FakeHub) -> None:
    hub.faults.append(Fault(stall_after=1000))
    with at(hub.public(MODEL)).open(0, len(MODEL), "") as answer:
        pieces = answer.pieces
        assert next(pieces) == MODEL[:1000]
        answer.hang_up()
        with pytest.raises(TryAgain):
            list(pieces)
        answer.hang_up()
    http_ranges.RangeResponse(True, "", iter(()), None).hang_up()


# --- addresses --------------------------------------------------------------------------------------------------------


def test_a_file_of_a_web_server_is_measured(hub: FakeHub) -> None:
    source = UrlSource(hub.public(MODEL))
    artifact = pin(source, (), name="a name")
    assert (artifact.name, artifact.files) == ("a name", (RemoteFile("model.gguf", len(MODEL), None),))
    assert [(asked.method, asked.authorization) for asked in hub.asked] == [("HEAD", "")]


@pytest.mark.parametrize(
    "fault",
    [
        Fault(status=405),
        Fault(status=501),
        Fault(headers={"Content-Length": ""}),
        Fault(headers={"Content-Length": "0"}),
        Fault(headers={"Content-Length": str(1 << 60)}),
    ],
)
def test_a_server_without_head_is_measured_by_a_range(hub: FakeHub, fault: Fault) -> None:
    hub.faults.append(Fault(**vars(fault)))
    assert at(hub.public(MODEL)).measure() == len(MODEL)
    assert hub.asked[-1].range == "bytes=0-0"


def test_a_server_without_ranges_is_measured_by_its_length(hub: FakeHub) -> None:
    hub.faults += [Fault(status=405), Fault(ignore_range=True)]
    assert at(hub.public(MODEL)).measure() == len(MODEL)


@pytest.mark.parametrize("told", ["*", "0", "9" * 5000, str(1 << 60)])
def test_a_server_that_tells_no_size_is_refused(hub: FakeHub, told: str) -> None:
    unmeasured = {"Content-Length": "", "Content-Range": f"bytes 0-0/{told}", "Connection": "close"}
    hub.faults += [Fault(status=405), Fault(headers=unmeasured)]
    with pytest.raises(NetworkError, match="does not report the file size"):
        at(hub.public(MODEL)).measure()


@pytest.mark.parametrize("fault", [Fault(status=404), Fault(status=403), Fault(status=503)])
def test_an_address_of_no_use_is_one_sentence(hub: FakeHub, fault: Fault) -> None:
    hub.faults.append(Fault(**vars(fault)))
    with pytest.raises(LlmrunError, match=f"HTTP {fault.status}"):
        at(hub.public(MODEL)).measure()


def test_the_shards_of_an_address_lie_beside_it() -> None:
    source = UrlSource("https://x.example/a%20b/m-00001-of-00002.gguf?download=1")
    assert file_name(source) == "m-00001-of-00002.gguf"
    second = remote_file(source, RemoteFile("m-00002-of-00002.gguf", 0, None))
    assert second._address() == ("https://x.example/a%20b/m-00002-of-00002.gguf?download=1", {})
    assert remote_file(source, RemoteFile("m-00001-of-00002.gguf", 0, None))._address()[0] == source.url
