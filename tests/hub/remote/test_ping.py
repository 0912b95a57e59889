"""Tests that checking whether the Hub answers is quick, and that its result is short and holds no secret."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from llmrun.hub.remote import huggingface
from llmrun.hub.remote.huggingface import hub_token, ping_hub
from llmrun.hub.remote.network_errors import without_secrets
from tests.support.hub.fake_hub import FakeHub, fake_hub


@pytest.fixture(scope="module")
def hub() -> Iterator[FakeHub]:
    with fake_hub() as running:
        yield running


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*huggingface._PROXIES, "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", os.devnull)


def at(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)


def test_a_hub_that_answers_is_reached_and_sent_no_token(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    at(monkeypatch, hub.url)
    monkeypatch.setenv("HF_TOKEN", "hf_secretsecret")
    found = ping_hub(offline=False, patience=60)
    assert (found.endpoint, found.trouble, found.offline, found.token) == (hub.url, "", False, True)
    assert found.seconds is not None
    assert found.seconds > 0
    assert hub.asked
    assert {request.authorization for request in hub.asked} == {""}


def test_offline_nothing_is_asked(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    at(monkeypatch, hub.url)
    seen = len(hub.asked)
    assert ping_hub(offline=True).offline
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    found = ping_hub(offline=False)
    assert (found.offline, found.seconds, len(hub.asked)) == (True, None, seen)


def test_a_hub_that_is_not_there_is_told_in_a_few_words(monkeypatch: pytest.MonkeyPatch) -> None:
    at(monkeypatch, "http://name:password@127.0.0.1:1")
    found = ping_hub(offline=False)
    assert found.seconds is None
    assert found.trouble == "unreachable (Connection refused)"
    assert found.endpoint == "http://127.0.0.1:1"


@pytest.mark.push
def test_a_hub_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        at(monkeypatch, f"http://127.0.0.1:{silent.getsockname()[1]}")
        found = ping_hub(offline=False, patience=0.5)
    assert found.seconds is None
    assert found.trouble in ("no answer within 0.5 s", "timed out")  # depends on which of the two timeouts fires first


def test_a_resolver_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface, "_response_time", lambda endpoint, patience: time.sleep(5))
    assert ping_hub(offline=False, patience=0.2).trouble == "no answer within 0.2 s"


def test_a_server_in_trouble_is_not_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    class Session:
        def head(self, url: str, **options: object) -> object:
            class Answer:
                status_code = 503

            return Answer()

    monkeypatch.setattr(huggingface_hub, "get_session", Session)
    found = ping_hub(offline=False)
    assert (found.seconds, found.trouble) == (None, "server error (HTTP 503)")


def test_an_endpoint_that_is_no_url_is_trouble_and_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    at(monkeypatch, "http://[::1")
    found = ping_hub(offline=False)
    assert found.seconds is None
    assert found.trouble
    assert found.endpoint == "(not a URL)"


def test_proxies_are_told_by_the_names_of_their_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://name:password@127.0.0.1:9")
    found = ping_hub(offline=True)
    assert found.proxies == ("HTTPS_PROXY",)
    assert "password" not in repr(found)


def test_the_token_is_known_to_who_must_hide_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hub_token() is None
    monkeypatch.setenv("HF_TOKEN", "hf_secretsecret")
    assert hub_token() == "hf_secretsecret"


def test_a_token_that_cannot_be_read_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path))  # a folder
    assert hub_token() is None
    assert not ping_hub(offline=True).token


@pytest.mark.parametrize(
    ("url", "safe"),
    [
        ("https://huggingface.co", "https://huggingface.co"),
        ("https://me:pw@host:8/path", "https://host:8/path"),
        ("https://me@pw@host", "https://host"),
    ],
)
def test_a_url_is_shown_without_name_and_password(url: str, safe: str) -> None:
    assert without_secrets(url) == safe


def test_a_client_that_cannot_be_imported_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    found = ping_hub(offline=False)
    assert (found.seconds, found.endpoint) == (None, "")
    assert found.trouble.startswith("huggingface_hub cannot be imported: ")


def test_a_password_in_the_endpoint_is_not_told_by_an_error() -> None:
    assert without_secrets("https://user:secret@mirror.example/hf") == "https://mirror.example/hf"
