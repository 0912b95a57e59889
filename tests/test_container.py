"""Tests of Containerfile: its instructions and its health check. scripts/try_container builds and runs the image."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from llmrun.cli.arguments.serving import ServeFlags

ROOT = Path(__file__).resolve().parent.parent
TEXT = re.sub(r"\\\n\s*", "", (ROOT / "Containerfile").read_text(encoding="utf-8"))
PORT = ServeFlags().port
INSTRUCTIONS = re.findall(r"^([A-Z]+) (.*)$", TEXT, re.MULTILINE)
X86 = "llmrun_gguf-0.2.0-py3-none-manylinux_2_17_x86_64.manylinux2014_x86_64.whl"
ARM = "llmrun_gguf-0.2.0-py3-none-manylinux_2_17_aarch64.manylinux2014_aarch64.whl"


def instruction(name: str) -> str:
    """Return the arguments of an instruction that occurs once."""
    found: list[str] = [arguments for each, arguments in INSTRUCTIONS if each == name]
    assert len(found) == 1
    return found[0]


@contextmanager
def server(status: int) -> Iterator[int]:
    """Run a server that answers every request with a status, and yield its port."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        yield listening.server_port
        listening.shutdown()


def test_the_server_runs_as_a_normal_user() -> None:
    assert instruction("USER") == "1000:1000"  # a number, so that orchestrators can see that it is not root
    names = [name for name, _ in INSTRUCTIONS]
    assert "RUN" not in names[names.index("USER") :]


def test_the_home_of_the_user_is_a_volume() -> None:
    assert instruction("ENV") == f"HOME={instruction('VOLUME')}"
    assert f"--owner=llmrun --group=llmrun {instruction('VOLUME')}" in TEXT


def test_the_image_is_slim_and_has_no_compiler() -> None:
    base = re.fullmatch(r"docker\.io/library/python:3\.(\d+)-slim", instruction("FROM"))
    assert base
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    oldest, after_newest = map(int, re.findall(r"3\.(\d+)", project["requires-python"]))
    assert oldest <= int(base[1]) < after_newest
    assert not re.search(
        r"\b(apt|apt-get|gcc|clang|make)\b", " ".join(text for name, text in INSTRUCTIONS if name == "RUN")
    )


def test_other_machines_need_a_key() -> None:
    command = json.loads(instruction("CMD"))
    assert json.loads(instruction("ENTRYPOINT")) == ["llmrun"]
    assert command[:3] == ["serve", "--host", "0.0.0.0"]
    assert "--api-key-file" in command
    assert "--no-auth" not in command


def test_the_port_is_the_default_of_the_server() -> None:
    assert instruction("EXPOSE") == str(PORT)
    assert f"'127.0.0.1', {PORT}, " in instruction("HEALTHCHECK")


@pytest.mark.push
@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_the_health_check_asks_the_server(status: int, code: int) -> None:
    python, *words = json.loads(instruction("HEALTHCHECK").partition(" CMD ")[2])
    assert python == "python"
    with server(status) as port:
        command = [sys.executable, *(word.replace(f" {PORT},", f" {port},") for word in words)]
        done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (code, "")


@pytest.mark.parametrize(("machine", "wheel"), [("x86_64", X86), ("aarch64", ARM)])
def test_the_wheel_of_the_processor_is_installed(machine: str, wheel: str, tmp_path: Path) -> None:
    (tmp_path / "dist").mkdir()
    for name in (X86, ARM, "llmrun_gguf-0.2.0-py3-none-any.whl", "llmrun_gguf-0.2.0-py3-none-win_amd64.whl"):
        (tmp_path / "dist" / name).touch()
    (installed,) = re.findall(r"\$\{LLMRUN:-.*\}", TEXT)
    script = f"uname() {{ echo {machine}; }}; echo {installed}"
    assert subprocess.check_output(["sh", "-c", script], cwd=tmp_path, text=True) == f"dist/{wheel}\n"
    script = f"LLMRUN=llmrun-gguf==0.2.0; {script}"
    assert subprocess.check_output(["sh", "-c", script], cwd=tmp_path, text=True) == "llmrun-gguf==0.2.0\n"
