"""Tests of `llmrun generate` and `llmrun chat` with a remote model, using the real process and various servers."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from tests.support.cli.commands import llmrun, on_terminal
from tests.support.models.downloads import smollm2
from tests.support.servers.hostile_server import (
    DONE,
    HELLO,
    Asked,
    HangUp,
    HostileServer,
    Script,
    counted,
    event,
    response,
    said,
    serving,
    stream_head,
    wait_for_hang_up,
)
from tests.support.servers.llama_server import llama_server

pytestmark = pytest.mark.push

KEY = "sk-very-secret-0123456789"


def with_variables(**variables: str) -> dict[str, str]:
    return {**os.environ, **variables}


# --- generate


def test_an_answer_goes_to_stdout_and_the_closing_line_names_model_and_host() -> None:
    with serving(response(HELLO)) as server:
        done = llmrun("generate", "--stats", "-m", server.url, "-p", "hi", "--seed", "4", "-s", "Be brief.")
    assert (done.stdout, done.returncode) == (b"Hello\n", 0)
    line = done.stderr.decode()
    assert line.startswith(f"tiny @ 127.0.0.1:{server.port}  5 in ")
    assert "3 out" in line
    assert "ctx" not in line
    assert [message["content"] for message in server.asked[0].body["messages"]] == ["Be brief.", "hi"]
    assert server.asked[0].body["seed"] == 4


@pytest.mark.night
@pytest.mark.parametrize(
    "form", ["127.0.0.1:{}", "localhost:{}/v1", "http://127.0.0.1:{}//v1/chat/completions/", "0.0.0.0:{}"]
)
def test_servers_have_several_names(form: str) -> None:
    with serving(response(HELLO)) as server:
        done = llmrun("generate", "-m", f"{form.format(server.port)}#tiny", "hi")
    assert (done.returncode, done.stdout) == (0, b"Hello\n")


def test_a_server_is_sent_only_what_the_user_set(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text("top_k = 7\n")
    with serving(response(HELLO)) as server:
        plain = llmrun("generate", "-m", server.url, "hi")
        llmrun("generate", "-m", server.url, "--temp", "0.8", "hi", env=with_variables(LLMRUN_CONFIG=str(config)))
        llmrun("generate", "-m", server.url, "hi", env=with_variables(LLMRUN_SEED="3", LLMRUN_MAX_TOKENS="9"))
        spoken = llmrun("generate", "-v", "--json", "-m", server.url, "hi")
    bodies = [asked.body for asked in server.asked]
    common = {"model", "messages", "stream", "stream_options"}
    assert [body.keys() - common for body in bodies] == [set(), {"temperature", "top_k"}, {"seed", "max_tokens"}, set()]
    assert (bodies[1]["temperature"], bodies[1]["top_k"]) == (0.8, 7)
    assert b"seed" not in plain.stderr
    assert json.loads(spoken.stdout)["seed"] is None
    assert b"sampling   the server decides" in spoken.stderr


def test_a_chat_sends_a_server_only_what_was_set(tmp_path: Path) -> None:
    lines = b"one\n/set\n/set temperature 0.3\n/set seed 5\ntwo\n/set temperature\n/regen\n"
    with serving(response(HELLO)) as server:
        done = llmrun("chat", "-m", server.url, stdin=lines, env=with_variables(LLMRUN_DATA_DIR=str(tmp_path)))
        again = llmrun("chat", "--continue", stdin=b"three\n", env=with_variables(LLMRUN_DATA_DIR=str(tmp_path)))
    common = {"model", "messages", "stream", "stream_options"}
    said = [{key: asked.body[key] for key in asked.body.keys() - common} for asked in server.asked]
    set_then = {"temperature": 0.3, "seed": 5}
    assert said == [{}, set_then, set_then | {"seed": 6}, set_then]
    assert "Sampling       not set: temperature, top_k, top_p, min_p, seed\n" in done.stderr.decode()
    assert "the server chooses the values of settings that are not set\n" in done.stderr.decode()
    assert (done.returncode, again.returncode) == (0, 0)


def test_json_says_what_answered() -> None:
    with serving(response(HELLO)) as server:
        done = llmrun("generate", "-q", "-m", server.url, "--json", "hi")
    body = json.loads(done.stdout)
    assert body["model"] == "tiny"
    assert body["choices"][0]["message"]["content"] == "Hello"
    assert body["usage"]["prompt_tokens"] == 7
    assert body["run"] == {
        "backend": "remote",
        "endpoint": f"http://127.0.0.1:{server.port}/v1",
        "context_used": 10,
    }


def test_raw_completes_a_text_and_verbose_describes_the_endpoint() -> None:
    with serving(response(event({"choices": [{"text": " time", "finish_reason": "stop"}]}) + DONE)) as server:
        done = llmrun("generate", "-v", "-m", server.url, "--raw", "Once upon a")
    assert done.stdout == b" time\n"
    assert server.asked[0].path == "/v1/completions"
    assert f"endpoint   http://127.0.0.1:{server.port}/v1".encode() in done.stderr


@pytest.mark.parametrize(
    "flag",
    [
        "--ctx-size=100",
        "--threads=2",
        "--kv-type=q8_0",
        "--gpu-layers=1",
        "--chat-template=LICENSE",
        "--backend=cpu",
        "--speculate=off",
    ],
)
@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_flag_that_cannot_be_meant_is_a_usage_error_and_nothing_is_sent(command: str, flag: str) -> None:
    with serving(response(HELLO)) as server:
        done = llmrun(command, "-m", server.url, flag, stdin=b"hi")
    assert (done.stdout, done.returncode) == (b"", 2)
    assert done.stderr.startswith(f"error: {flag.partition('=')[0]}: not supported for models on a server".encode())
    assert server.asked == []


def test_the_same_settings_in_the_environment_are_for_other_models() -> None:
    variables = {"LLMRUN_THREADS": "2", "LLMRUN_CTX_SIZE": "100", "LLMRUN_KV_TYPE": "q8_0", "LLMRUN_BACKEND": "cpu"}
    variables["LLMRUN_SPECULATE"] = "auto"
    with serving(response(HELLO)) as server:
        done = llmrun("generate", "-q", "hi", env=with_variables(**variables, LLMRUN_MODEL=server.url))
    assert (done.stdout, done.stderr, done.returncode) == (b"Hello\n", b"", 0)


@pytest.mark.parametrize(
    ("answer", "code", "words"),
    [
        (response(b"", status="500 Oh"), 5, "the server failed"),
        (response(b'{"error": {"message": "no model `tiny`"}}', status="404 X"), 4, "model: tiny: not found at"),
        (stream_head() + said("Hel"), 5, "answer was cut"),
        (response(event(b"\x1b[2Jowned")), 5, r"\x1b[2Jowned"),
    ],
)
def test_trouble_is_one_line_and_its_exit_code(answer: bytes, code: int, words: str) -> None:
    with serving(answer) as server:
        done = llmrun("generate", "-m", server.url, "hi")
    error, *rest = done.stderr.decode().splitlines()
    assert error.startswith("error: ")
    assert words in error
    assert b"\x1b" not in done.stderr
    assert [line.partition(":")[0] for line in rest] in ([], ["hint"])
    assert done.returncode == code


def test_offline_another_machine_is_refused_and_this_one_is_not() -> None:
    done = llmrun("generate", "--offline", "-m", "http://llm.example/v1#tiny", "hi")
    assert (done.stdout, done.returncode) == (b"", 5)
    assert done.stderr.startswith(
        b"error: endpoint: llm.example: not available offline, because it is on another machine\n"
    )
    with serving(response(HELLO)) as server:
        assert llmrun("generate", "-q", "--offline", "-m", server.url, "hi").stdout == b"Hello\n"


def test_an_answer_that_the_server_cut_short_says_so() -> None:
    with serving(response(said("Hel", "length") + counted(7, 3) + DONE)) as server:
        assert b"the answer was cut off by 127.0.0.1" in llmrun("generate", "-m", server.url, "hi").stderr
        assert b"cut" not in llmrun("generate", "-m", server.url, "-n", "3", "hi").stderr


def test_ctrl_c_keeps_the_text_reports_and_hangs_up() -> None:
    def script(asked: Asked, connection: socket.socket) -> None:
        connection.sendall(stream_head() + said("Hello there") + said(", you "))
        wait_for_hang_up(server, connection)

    with serving(script) as server:
        process = on_terminal("generate", "-m", server.url, "hi", NO_COLOR="1")
        process.expect_exact("Hello there")
        process.sendintr()
        rest = process.read().decode()
        process.close()
        assert server.hung_up.wait(10)
    assert process.exitstatus == 130
    assert ", you" in rest
    assert "stopped after 2 tokens in " in rest
    assert "Traceback" not in rest


def test_ctrl_c_before_the_answer_ends_the_wait_which_was_shown() -> None:
    with serving(lambda asked, connection: wait_for_hang_up(server, connection)) as server:
        process = on_terminal("generate", "-m", server.url, "hi", NO_COLOR="1")
        process.expect_exact("waiting for the server")
        process.sendintr()
        rest = process.read().decode()
        process.close()
        assert server.hung_up.wait(10)
    assert process.exitstatus == 130
    assert "stopped before the answer began, after" in rest


# --- the API key


def echoing(asked: Asked, connection: socket.socket) -> None:
    said_back = json.dumps({"error": {"message": f"wrong key: {asked.headers['authorization']}"}})
    connection.sendall(response(said_back.encode(), status="401 Unauthorized"))
    raise HangUp


def garbling(asked: Asked, connection: socket.socket) -> None:
    connection.sendall(f"HTTP/1.1 {asked.headers['authorization']}\r\n\r\n".encode())
    raise HangUp


@pytest.mark.parametrize("script", [response(HELLO), echoing, garbling, response(b"", status="302 X", Location=KEY)])
@pytest.mark.parametrize("flags", [["--debug"], ["-v", "--json"]])
def test_the_key_is_sent_and_never_shown(script: Script | bytes, flags: list[str]) -> None:
    with serving(script) as server:
        done = llmrun("generate", *flags, "-m", server.url, "hi", env=with_variables(LLMRUN_API_KEY=KEY))
    assert server.asked[0].headers["authorization"] == f"Bearer {KEY}"
    assert KEY.encode() not in done.stdout + done.stderr
    assert done.returncode in (0, 5)


def test_a_key_that_cannot_be_sent_and_a_password_in_the_url_are_not_shown_either() -> None:
    done = llmrun(
        "generate", "--debug", "-m", "http://127.0.0.1:9#m", "hi", env=with_variables(LLMRUN_API_KEY=f"{KEY}é")
    )
    assert KEY.encode() not in done.stdout + done.stderr
    assert done.returncode == 2
    done = llmrun("generate", "--debug", "-m", f"http://me:{KEY}@127.0.0.1:9#m", "hi")
    assert KEY.encode() not in done.stdout + done.stderr
    assert done.returncode == 2


def test_samples_are_requests_with_seeds_in_order() -> None:
    with serving(response(HELLO)) as server:
        done = llmrun("generate", "-m", server.url, "--samples", "3", "--seed", "4", "-0", "hi")
        best = llmrun("generate", "-m", server.url, "--samples", "2", "--best-of", "mean-logprob", "hi")
        unseeded = llmrun("generate", "-m", server.url, "--samples", "2", "--json", "hi")
    assert done.stdout == b"Hello\0" * 3
    assert sorted(asked.body["seed"] for asked in server.asked[:3]) == [4, 5, 6]
    assert best.returncode != 0
    assert b"error: --best-of mean-logprob: 127.0.0.1" in best.stderr
    assert [sample["seed"] for sample in json.loads(unseeded.stdout)["samples"]] == [None, None]
    assert all("logprobs" not in asked.body and "seed" not in asked.body for asked in server.asked[5:])


# --- chat


def conversing(server_of: list[HostileServer], *, fails_on: str = "") -> Script:
    """Return a server script that answers "N messages", and fails on the question `fails_on`."""

    def script(asked: Asked, connection: socket.socket) -> None:
        messages = asked.body["messages"]
        if fails_on and messages[-1]["content"] == fails_on and len(server_of[0].asked) < 3:
            connection.sendall(response(b"", status="503 Busy"))
            return
        connection.sendall(response(said(f"{len(messages)} messages") + said(finish="stop") + counted(9, 3) + DONE))

    return script


def in_folder(folder: Path) -> dict[str, str]:
    return with_variables(LLMRUN_DATA_DIR=str(folder))


def test_a_chat_sends_all_that_was_said_and_its_commands_cope(tmp_path: Path) -> None:
    turns = b"one\ntwo\n/show\n/show template\n/set ctx_size\n/stats\n"
    with serving(conversing([])) as server:
        done = llmrun("chat", server.url, stdin=turns, env=in_folder(tmp_path))
    assert (done.stdout, done.returncode) == (b"1 messages\n3 messages\n", 0)
    shown = done.stderr.decode()
    for line in (
        "model       tiny\n",
        f"endpoint    http://127.0.0.1:{server.port}/v1\n",
        "used        12 tokens\n",
        "template    chosen by the server, which does not show it\n",
        "ctx_size not set\n",
        "answers     2\n",
    ):
        assert line in shown


def test_what_only_a_model_here_could_do_is_one_line(tmp_path: Path) -> None:
    with serving(conversing([])) as server:
        done = llmrun("chat", server.url, stdin=b"/set ctx_size 9\n", env=in_folder(tmp_path))
    assert (done.stderr.count(b"\n"), done.returncode) == (1, 2)
    assert done.stderr.startswith(b"error: /set: ctx_size: controlled by 127.0.0.1")


@pytest.mark.night
def test_continue_finds_the_server_again(tmp_path: Path) -> None:
    with serving(conversing([])) as server:
        llmrun("chat", server.url, stdin=b"one\n", env=in_folder(tmp_path))
        done = llmrun("chat", "--continue", stdin=b"two\n", env=in_folder(tmp_path))
    assert done.stdout == b"3 messages\n"


def test_show_does_not_call_unknown_tokens_zero(tmp_path: Path) -> None:
    with serving(response(said("Hello.") + said(finish="stop") + DONE)) as server:
        llmrun("chat", server.url, stdin=b"one\n", env=in_folder(tmp_path))
        done = llmrun("chat", "--continue", stdin=b"/show\n", env=in_folder(tmp_path))
    assert b"used        unknown: the server does not report it\n" in done.stderr


def test_a_person_whose_server_failed_can_ask_again(tmp_path: Path) -> None:
    held: list[HostileServer] = []
    with serving(conversing(held, fails_on="two")) as server:
        held.append(server)
        process = on_terminal("chat", server.url, LLMRUN_DATA_DIR=str(tmp_path), TERM="dumb")
        process.expect_exact(f"tiny @ 127.0.0.1:{server.port}")
        process.sendline("one")
        process.expect_exact("1 messages")
        process.sendline("two")
        process.expect_exact("error: the server failed")
        process.sendline("two")
        process.expect_exact("3 messages")
        process.sendeof()
        process.read()
        process.close()
    assert process.exitstatus == 0


# --- a real server


@pytest.mark.night
def test_a_real_server_says_hello_in_french() -> None:
    with llama_server(smollm2()) as port:
        done = llmrun("generate", "-m", f"http://127.0.0.1:{port}", "--temp", "0", "-n", "6", "Say hello in French.")
    assert done.stdout.startswith(b"Bonjour")
    assert " tokens in " in done.stderr.decode()
    assert done.returncode == 0
