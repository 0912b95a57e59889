"""Tests of `llmrun serve --upstream`, as a process."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cli.commands import TIMEOUT_S, llmrun
from tests.support.servers.rpc_server import closed_port
from tests.support.serving.served import Served, scripted_arguments, serve

pytestmark = pytest.mark.push

KEY = "a-key-that-is-long-enough"


def error_of(*arguments: str) -> str:
    """Return the error of a command line that is refused."""
    done = llmrun("serve", "--port", "0", *arguments)
    assert (done.returncode, done.stdout) == (2, b"")
    return done.stderr.decode()


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Served]:
    """A server with a key and a model that is called "scripted"."""
    keys = tmp_path / "keys"
    keys.write_text(KEY)
    keys.chmod(0o600)
    with serve(*scripted_arguments(tmp_path), "--api-key-file", str(keys), log=tmp_path / "source.log") as server:
        yield server


def chat(server: Served, **fields: object) -> str:
    body = json.dumps({"messages": [{"role": "user", "content": "Hello"}], **fields}).encode()
    url = f"http://127.0.0.1:{server.port}/v1/chat/completions"
    asked = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=TIMEOUT_S) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


def test_a_server_without_a_model_forwards_everything(source: Served, tmp_path: Path) -> None:
    log = tmp_path / "front.log"
    flags = ("--upstream", f"http://127.0.0.1:{source.port}", "--upstream-key-file", str(tmp_path / "keys"))
    with serve(*flags, log=log) as front:
        assert chat(front) == "You said: Hello"
        assert chat(front, model="scripted") == "You said: Hello"
    said = log.read_text()
    assert "forwarding to upstreams: 1 of 1 up\n" in said
    assert f"200  via 127.0.0.1:{source.port}" in said
    assert KEY not in said


def test_a_server_starts_while_its_upstreams_are_down(tmp_path: Path) -> None:
    with serve("--upstream", f"http://127.0.0.1:{closed_port()}", log=tmp_path / "front.log") as front:
        with pytest.raises(urllib.error.HTTPError) as refused:
            chat(front, model="anything")
        assert (refused.value.code, refused.value.headers["Retry-After"]) == (503, "5")
        status, body = front.get("/health")
        assert (status, json.loads(body)["status"]) == (503, "no_upstream")
    assert "down: unreachable" in (tmp_path / "front.log").read_text()


@pytest.mark.night
def test_keys_of_upstreams_that_others_can_read_get_a_note(source: Served, tmp_path: Path) -> None:
    (tmp_path / "keys").chmod(0o644)
    flags = ("--upstream", f"http://127.0.0.1:{source.port}", "--upstream-key-file", str(tmp_path / "keys"))
    with serve(*flags, log=tmp_path / "front.log"):
        assert "--upstream-key-file: other users of this machine can read" in (tmp_path / "front.log").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--upstream", "ten.0.0.5"), "not an http or https URL"),
        (("--upstream", "10.0.0.5:8080#model"), "--upstream: 10.0.0.5:8080#model: names a model"),
        (("--upstream", "http://a#model"), "--upstream: http://a#model: names a model"),
        (("--upstream", "http://user:secret@a"), "must not contain a user name or password"),
        (("--upstream", "http://a", "--upstream", "http://a/v1/"), "the same server is given twice"),
        (("--upstream-key-file", "x", "a.gguf"), "--upstream-key-file: there is no upstream"),
        (("--upstream", "http://a", "--upstream-key-file", "/nothing"), "--upstream-key-file: /nothing: No such file"),
    ],
)
def test_wrong_upstreams_are_refused(arguments: tuple[str, ...], message: str) -> None:
    assert message in error_of(*arguments)
