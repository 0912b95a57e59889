"""Tests of `llmrun serve`, as a process: usage errors, and a life from the banner to the signal."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli.commands import LLMRUN, ROOT, TIMEOUT_S, llmrun

KEY = "a-key-that-is-long-enough"


def error_of(*arguments: str) -> str:
    """Return what a command line that is refused prints."""
    done = llmrun("serve", "--backend", "scripted", "x", *arguments)
    assert (done.returncode, done.stdout) == (2, b"")
    return done.stderr.decode()


@contextmanager
def served(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """Run a server. Yields its process, its URL and the lines of its banner."""
    command = [*LLMRUN, "serve", "--backend", "scripted", "--port", "0", *arguments]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            banner: list[str] = []
            while not banner or not banner[-1].startswith("ready: "):
                line = process.stderr.readline()
                assert line, banner
                banner.append(line.rstrip("\n"))
            yield process, banner[-1].removeprefix("ready: "), banner
        finally:
            if process.poll() is None:
                process.kill()


def chat(url: str, text: str = "Hello", **headers: str) -> Any:
    body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    asked = urllib.request.Request(f"{url}/chat/completions", body, {"Content-Type": "application/json", **headers})
    with urllib.request.urlopen(asked, timeout=TIMEOUT_S) as answer:
        return json.load(answer)


@pytest.mark.push
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_answers_until_a_signal(number: signal.Signals) -> None:
    with served("my-model") as (process, url, banner):
        answer = chat(url)
        assert answer["choices"][0]["message"]["content"] == "You said: Hello"
        assert answer["model"] == "my-model"
        assert [line for line in banner if line.startswith("try: curl http://127.0.0.1:")]
        assert f"chat in a browser: {url.removesuffix('v1')}" in banner
        process.send_signal(number)
        _, rest = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0
        assert "POST  /v1/chat/completions  200  25+16 tokens" in rest
        assert "Traceback" not in rest


@pytest.mark.night
def test_quiet_servers_log_nothing(tmp_path: Path) -> None:
    free = socket.create_server(("127.0.0.1", 0))
    port = free.getsockname()[1]
    free.close()
    command = [*LLMRUN, "serve", "--backend", "scripted", "--port", str(port), "-q", "x"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE) as process:
        url, answer = f"http://127.0.0.1:{port}/v1", None
        while answer is None and process.poll() is None:
            try:
                answer = chat(url)
            except OSError:  # not ready yet
                continue
        process.terminate()
        _, written = process.communicate(timeout=TIMEOUT_S)
    assert answer is not None
    assert (process.returncode, written) == (0, b"")


@pytest.mark.push
def test_keys_are_required_once_there_is_a_file(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{KEY}\n")
    keys.chmod(0o600)
    with served("x", "--api-key-file", str(keys)) as (_, url, banner):
        assert chat(url, Authorization=f"Bearer {KEY}")["choices"]
        with pytest.raises(urllib.error.HTTPError, match="401"):
            chat(url)
        assert "Bearer $KEY" in "".join(banner)
        assert KEY not in "".join(banner)


def test_other_machines_need_keys_or_a_decision() -> None:
    message = error_of("--host", "0.0.0.0")
    assert message.startswith("error: --host: 0.0.0.0 is reachable from other machines, so clients need API keys\n")
    assert "--no-auth" in message


@pytest.mark.push
@pytest.mark.parametrize(
    ("host", "shown"),
    [
        ("localhost", "localhost"),
        ("127.0.0.1", "127.0.0.1"),
        ("[127.0.0.1]", "127.0.0.1"),
        ("::1", "[::1]"),
        ("[::1]", "[::1]"),
        ("0.0.0.0", "127.0.0.1"),
        ("0", "127.0.0.1"),
        ("::", "[::1]"),
        ("[::]", "[::1]"),
        ("0::0", "[::1]"),
    ],
)
def test_the_url_in_the_banner_works(host: str, shown: str) -> None:
    if ":" in shown and not has_ipv6():
        pytest.skip("no IPv6")
    is_open = host.strip("[]") in ("0.0.0.0", "0", "::", "0::0")
    with served("x", "--host", host, *(["--no-auth"] if is_open else [])) as (_, url, banner):
        assert url.startswith(f"http://{shown}:")
        assert chat(url)["model"] == "x"
        assert any(line.startswith(f"try: curl {url}/") for line in banner)


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.push
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tls-cert", "x.pem"], "--tls-cert and --tls-key: only one is given"),
        (["--tls-cert", "/nothing", "--tls-key", "/nothing"], "--tls-cert: /nothing: No such file"),
        (["--api-key-file", "/nothing"], "--api-key-file: /nothing: No such file"),
        (["--api-key-file", "/nothing", "--no-auth"], "--no-auth: cannot be combined with --api-key-file"),
        (["--cors", "app.example"], "--cors: 'app.example' is not an origin"),
        (["--cors", "https://app.example/path"], "is not an origin"),
        (["-m", "y"], "model: given twice"),
        (["--host", "[::]"], "--host: :: is reachable from other machines"),
        (["--host", "[::1]:8080"], "--host: '[::1]:8080' is not an address or a host name alone"),
        (["--host", "localhost:8080"], "is not an address or a host name alone\n"),
        (["--host", "http://localhost"], "example: --host 127.0.0.1 --port 8080"),
        (["--host", ""], "--host: '' is not an address"),
    ],
)
def test_bad_flags_are_refused_with_one_line(arguments: list[str], words: str) -> None:
    message = error_of(*arguments)
    assert words in message
    assert message.startswith("error: ")
    assert message.count("\n") <= 2  # the error and a hint


def test_a_port_in_use_is_told_before_the_model_is_opened() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = error_of("--port", str(port))
    assert message.startswith(f"error: --port: {port} is in use on 127.0.0.1\n")


@pytest.mark.push
def test_a_model_that_cannot_be_opened_ends_the_server(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + os.urandom(100))
    done = llmrun("serve", str(broken), "--port", "0")
    assert done.returncode == 3
    assert done.stderr.startswith(b"error: ")
    assert b"Traceback" not in done.stderr


def test_models_on_servers_cannot_be_served() -> None:
    done = llmrun("serve", "http://127.0.0.1:1/v1#x")
    assert done.returncode == 2
    assert b"already runs on a server" in done.stderr


@pytest.mark.night
def test_saved_prefixes_outlive_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each API key has its own, which are private. They are saved when the server is idle, or when it stops."""
    monkeypatch.setenv("LLMRUN_CACHE_DIR", str(tmp_path))
    keys, other = tmp_path / "keys", "another-key-that-is-long-enough"
    keys.write_text(f"{KEY}\n{other}\n")
    keys.chmod(0o600)
    text = "the quick brown fox " * 60

    def computed(url: str, key: str) -> int:
        usage = chat(url, text, Authorization=f"Bearer {key}")["usage"]
        tokens: int = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
        return tokens

    folder = tmp_path / "prefixes"
    for first in (True, False, False):
        with served("my-model", "--save-prefixes", "--api-key-file", str(keys)) as (process, url, _):
            assert (computed(url, KEY) > 1) == first
            process.send_signal(signal.SIGTERM)
            assert process.wait(TIMEOUT_S) == 0
        assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
        assert folder.stat().st_mode & 0o777 == 0o700
        assert len(list(folder.glob("*.kv"))) == 5  # of the prompt, and of the answer that repeats it
    with served("my-model", "--save-prefixes", "--api-key-file", str(keys)) as (_, url, _):
        assert computed(url, other) > 1024
    with served("my-model", "--api-key-file", str(keys)) as (_, url, _):
        assert computed(url, KEY) > 1024


@pytest.mark.night
def test_an_idle_server_saves_prefixes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMRUN_CACHE_DIR", str(tmp_path))
    with served("my-model", "--save-prefixes") as (_, url, _):
        chat(url, "the quick brown fox " * 60)
        end = time.monotonic() + 60
        while len(list((tmp_path / "prefixes").glob("*.kv"))) < 2:
            assert time.monotonic() < end
            time.sleep(0.05)
