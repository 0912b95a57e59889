"""Tests that runs give the same text, messages and exit codes with a background engine and without one."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence

import pytest

from tests.support.background import BackgroundHome, background_home
from tests.support.cli.chats import words
from tests.support.models.downloads import smollm2

pytestmark = [pytest.mark.push, pytest.mark.night]

SCHEMA = """{"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
"required": ["name", "age"], "additionalProperties": false}"""
PLAIN = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor -%}
<|im_start|>assistant\\n{% if style %}{{ style }}: {% endif %}"""
THINKING = (
    PLAIN + "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}"
    "{% else %}{{ '<think>\\n' }}{% endif %}"
)
TOOLS = f"""
[commands.echo]
description = "Repeat a text."
command = [{sys.executable!r}, "-I", "-S", "-c", "import sys; print('echo of', sys.argv[1])", "{{a}}"]
parameters = {{ type = "object", properties = {{ a = {{ type = "string" }} }}, required = ["a"] }}
safe = true
"""
LONG = "word " * 9000
SENTENCES = "the quick brown fox jumps over the lazy dog. " * 8


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BackgroundHome]:
    folder = tmp_path_factory.mktemp("same")
    with background_home(folder) as home:
        for name, text in {
            "schema.json": SCHEMA,
            "invalid.json": '{"type": "objekt"}',
            "answers.gbnf": 'root ::= "yes" | "no" " maybe"\n',
            "text.txt": "Some text from a file.\n",
            "plain.jinja": PLAIN,
            "thinking.jinja": THINKING,
            "refusing.jinja": "{{ raise_exception('no way') }}",
            "tools.toml": TOOLS,
            "models.toml": f"""
                [presets.translate]
                model = {str(smollm2())!r}
                prompt = "Translate into $language: $input"
                system = "Be $mood."
                temperature = 0.3
                defaults = {{ language = "English" }}
                variables = {{ style = "short" }}
            """,
        }.items():
            (folder / name).write_text(text)
        yield home


GENERATED = {
    "sampled": ["-n", "16", "Name a color."],
    "greedy": ["-n", "16", "--temp", "0", "Name a color."],
    "stop": ["-n", "30", "--stop", ".", "Name a color."],
    "raw": ["-n", "12", "--raw", "The capital of France is"],
    "system and file": ["-s", "Be brief.", "-f", "text.txt", "-n", "8", "Repeat:"],
    "json": ["--json", "-n", "8", "Hi"],
    "logprobs": ["--logprobs", "3", "-n", "4", "Hi"],
    "json logprobs": ["--json", "--logprobs", "2", "-n", "4", "Hi"],
    "bias": ["--logit-bias", "504=-100", "-n", "8", "Hi"],
    "samples": ["--samples", "3", "-n", "8", "Hi"],
    "vote": ["--samples", "3", "--best-of", "vote", "--choice", "red", "--choice", "blue", "Pick a color."],
    "mean logprob": ["--samples", "3", "--best-of", "mean-logprob", "--json", "--raw", "-n", "8", "The sky"],
    "schema": ["--json-schema", "schema.json", "Describe Bob, 12."],
    "cut schema": ["--json-schema", "schema.json", "-n", "3", "Describe Bob, 12."],
    "invalid schema": ["--json-schema", "invalid.json", "Describe Bob, 12."],
    "regex": ["--regex", "[a-c]{3}-[0-9]{2}x", "Say"],
    "invalid regex": ["--regex", "[a-", "Say"],
    "grammar": ["--grammar", "answers.gbnf", "Say"],
    "choice": ["--choice", "red", "--choice", "blue", "Pick a color."],
    "no infill": ["--suffix", "end", "start"],
    "cannot think": ["--think", "-n", "5", "Hi"],
    "no such token": ["--logit-bias", "99999999=1", "-n", "8", "Hi"],
    "too long": ["-n", "5", LONG],
    "too many threads": ["-t", "640", "-n", "5", "Hi"],
    "context full": ["-c", "64", "-n", "100", "Count to one hundred."],
    "template": [
        *("--chat-template", "plain.jinja", "--chat-template-kwargs", '{"style": "short"}'),
        *("-n", "8", "Hi"),
    ],
    "thinking": ["--chat-template", "thinking.jinja", "--think-budget", "6", "-n", "20", "Hi"],
    "thinking in json": ["--chat-template", "thinking.jinja", "--json", "--think-budget", "6", "-n", "20", "Hi"],
    "no thinking": ["--chat-template", "thinking.jinja", "--no-think", "-n", "8", "Hi"],
    "refused": ["--chat-template", "refusing.jinja", "-n", "8", "Hi"],
    "preset": ["-m", "translate", "-P", "mood=kind", "-n", "8", "Good day"],
    "prompt cache": ["--prompt-cache", "book.kv", "-n", "6", SENTENCES],
    "record": ["--record", "run.zip", "-n", "6", "Hi"],
}
CHATS: dict[str, tuple[list[str], list[str]]] = {
    "chat": ([], ["Hi", "Again"]),
    "settings": (
        [],
        ["Hi", "/set temperature 0", "/regen", "/undo", "Bye", "/system Be brief.", "Again", "/clear", "Hi"],
    ),
    "another context": ([], ["Hi", "/set ctx_size 512", "Again"]),
    "forgetting": (["-c", "128"], ["/set on_full forget", *(f"Tell me a fact about {n}." for n in range(5))]),
    "chat with a schema": (["--json-schema", "schema.json"], ["Describe Bob."]),
    "too long a question": ([], [LONG]),
    "no tools": (["--tools", "tools.toml"], ["Echo?"]),
    "thinking chat": (["--chat-template", "thinking.jinja"], ["Hi", "/set think_budget 4", "Again"]),
}


def compared(home: BackgroundHome, command: str, options: Sequence[str], stdin: bytes = b"") -> None:
    """Run a command without a background engine and with one, and check that both runs show the same."""
    model = [] if "-m" in options else ["-m", str(smollm2())]
    shown: list[tuple[int, str, str]] = []
    for kind in ("--no-warm", "--keep-alive=10m"):
        data = home.cache.parent / f"data{len(shown)}"
        data.mkdir(exist_ok=True)
        done = home.llmrun(
            *(command, kind, "--seed", "7", *model, *options),
            stdin=stdin,
            env={"LLMRUN_DATA_DIR": str(data)},
            cwd=home.cache.parent,
        )
        shown.append((done.returncode, _untimed(done.stdout), _untimed(done.stderr)))
    assert shown[1] == shown[0]


_TIMES = (
    *("created", "load_s", "prefill_s", "ttft_s", "decode_s", "tpot_s", "total_s", "first_answer_s"),
    *("prompt_per_second", "decode_per_second", "tokens_per_second", "cached_tokens"),
    # Drafts depend on earlier answers of the same engine, but answers do not depend on drafts.
    *("steps", "tokens_per_step", "drafted_tokens", "accepted_tokens", "forced_tokens"),
)


def _untimed(output: bytes) -> str:
    text = output.decode()
    text = re.sub(r" in [0-9.]+ m?s( \(the first after [0-9.]+ m?s\))?(, [0-9.]+ tok/s)?", " in TIME", text)
    text = re.sub(r"(chatcmpl|samples)-\w+", "ID", text)
    text = re.sub(r'"warm": (true|false)', '"warm": W', text)
    return re.sub(rf'"({"|".join(_TIMES)})": [0-9.e+-]+', r'"\1": N', text)


@pytest.mark.parametrize("name", GENERATED)
def test_generate_says_the_same(home: BackgroundHome, name: str) -> None:
    compared(home, "generate", GENERATED[name])


@pytest.mark.parametrize("name", CHATS)
def test_chat_says_the_same(home: BackgroundHome, name: str) -> None:
    options, turns = CHATS[name]
    compared(home, "chat", ["-n", "12", *options], words(turns).encode())


def test_these_runs_use_an_engine(home: BackgroundHome) -> None:
    """Without engines, the other tests would pass, too."""
    for _ in range(2):  # the first run may start the engine, because each worker of pytest-xdist has a home of its own
        done = home.llmrun("generate", "-v", "-m", str(smollm2()), "-n", "1", "Hi")
    assert b"warm       joined the background engine" in done.stderr
