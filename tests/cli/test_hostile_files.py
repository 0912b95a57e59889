"""Tests that no text from a model file reaches a terminal unescaped, in errors, -v, --json and answers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmrun.base.errors import LlmrunError, shown
from llmrun.cli.console.terminal import visible_json, visible_line
from tests.support.cli.commands import screen_of
from tests.support.cli.terminals import Terminal
from tests.support.gguf.gguf_bytes import STRING, RawTensor, string, u32, whole_file
from tests.support.gguf.gguf_files import tiny_llama, tiny_vocabulary
from tests.support.gguf.gguf_memory import read_gguf
from tests.support.models.model_drafts import Draft, Value, Weights, draft_of
from tests.support.tiers import examples

pytestmark = pytest.mark.push

# Sets the title, clears the screen, sets red (7-bit and 8-bit), overwrites text, and reverses the text direction.
EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\x1b[8m\b\b\r\n\x85\u202eevil\u2066\x7f"
COLOR = re.compile(r"\x1b\[[0-9;]*m")
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]|\r(?!\n)")
# The start of the progress line, which is erased later. The rest of the line is checked like all other text.
PROGRESS = re.compile(r"\r(?=loading \w| +\r|\w+.*: compiling)|(?<= )\r(?!\n)")


def name_it(draft: Draft) -> None:
    draft.keys["general.name"] = Value(STRING, EVIL)


def break_the_architecture(draft: Draft) -> None:
    draft.keys["general.architecture"] = Value(STRING, EVIL)


def break_a_key(draft: Draft) -> None:
    draft.keys[f"llama.{EVIL}"] = Value(STRING, EVIL)
    draft.tensors.append(Weights(EVIL[:40], 0, (1,), bytes(4)))


def break_a_tensors_name(draft: Draft) -> None:
    draft.tensors.append(Weights(EVIL[:40], 0, (1,), bytes(4)))


def break_the_tokenizer(draft: Draft) -> None:
    draft.keys["tokenizer.ggml.model"] = Value(STRING, EVIL)


def break_the_split(draft: Draft) -> None:
    draft.keys["tokenizer.ggml.pre"] = Value(STRING, EVIL)


def break_the_rope(draft: Draft) -> None:
    draft.keys["llama.rope.scaling.type"] = Value(STRING, EVIL)


def break_the_merges(draft: Draft) -> None:
    draft.keys["tokenizer.ggml.merges"] = Value(STRING, [EVIL.replace(" ", "")])


def break_the_template(draft: Draft) -> None:
    draft.keys["tokenizer.chat_template"] = Value(STRING, "{{ messages | " + EVIL + " }}")


def refuse_in_the_template(draft: Draft) -> None:
    source = "{{ raise_exception(messages[0].content + '" + EVIL.replace("\n", "") + "') }}"
    draft.keys["tokenizer.chat_template"] = Value(STRING, source)


def every_token(draft: Draft) -> None:
    """Make every possible token hostile."""
    tokens = [b"%d\x1b[2J\xc2\x9b31m\x07" % index for index in range(len(tiny_vocabulary().tokens))]
    draft.keys["tokenizer.ggml.tokens"] = Value(STRING, tokens)
    draft.keys["tokenizer.ggml.model"] = Value(STRING, b"llama")
    draft.keys["tokenizer.ggml.tokens"].content[:256] = [b"<0x%02X>" % byte for byte in range(256)]
    draft.keys["tokenizer.ggml.token_type"] = Value(5, [6] * 256 + [4] * (len(tokens) - 256))


def hostile_model(folder: Path, change: Callable[[Draft], None]) -> str:
    draft = draft_of(tiny_llama(folder / "base.gguf", layers=1, width=32, heads=2, kv_heads=1, feed_forward=32))
    change(draft)
    path = folder / f"model {EVIL.replace('/', '')}.gguf"
    path.write_bytes(draft.build())
    return str(path)


def assert_harmless(written: str) -> None:
    plain = PROGRESS.sub("", COLOR.sub("", written))
    assert CONTROL.search(plain) is None, repr(plain)
    terminal = Terminal()
    before = terminal.modes()
    terminal.write("above\n" + written)
    assert terminal.modes() == before
    assert terminal.rows()[0] == "above"


RUNS: list[tuple[Callable[[Draft], None], list[str], int]] = [
    (name_it, ["--raw", "-v"], 0),
    (name_it, ["--raw", "-v", "--json"], 0),
    (name_it, ["--raw", "-v", "-c", "2"], 8),
    (break_the_architecture, [], 3),
    (break_the_architecture, ["--debug"], 3),
    (break_a_key, [], 3),
    (break_a_tensors_name, ["-v"], 3),
    (break_the_tokenizer, [], 3),
    (break_the_split, [], 3),
    (break_the_rope, [], 3),
    (break_the_merges, [], 3),
    (break_the_template, ["-v"], 9),
    (refuse_in_the_template, ["--debug"], 9),
    (every_token, ["--raw", "--logprobs", "3"], 0),
    (every_token, ["--raw", "--json", "--logprobs", "3"], 0),
]


@pytest.mark.parametrize(("change", "arguments", "code"), RUNS)
def test_a_hostile_file_leaves_the_terminal_as_it_was(
    change: Callable[[Draft], None], arguments: list[str], code: int, tmp_path: Path
) -> None:
    model = hostile_model(tmp_path, change)
    written, ended = screen_of("generate", "-m", model, "--backend", "cpu", "-n", "3", "--seed", "1", *arguments, "hi")
    assert ended == code, written
    assert_harmless(written)


@pytest.mark.parametrize("change", [name_it, break_a_tensors_name, break_the_split])
def test_a_hostile_file_on_llama_cpp_leaves_it_too(change: Callable[[Draft], None], tmp_path: Path) -> None:
    model = hostile_model(tmp_path, change)
    written, ended = screen_of("generate", "-m", model, "--backend", "llama", "--raw", "-v", "-n", "3", "hi")
    assert ended in (0, 3), written
    assert_harmless(written)


def test_the_check_sees_what_gets_through() -> None:
    for text in (EVIL, "\x1b[2J", "\x9b31m", "\u202e", "a\rb", "\x07"):
        with pytest.raises(AssertionError):
            assert_harmless(text)
    assert_harmless("\x1b[31merror:\x1b[0m plain ünïcode\r\n")


@given(st.text(max_size=100) | st.just(EVIL))
def test_json_means_the_same_when_it_is_fit_for_a_terminal(text: str) -> None:
    line = visible_json(json.dumps({"content": text}, ensure_ascii=False))
    assert CONTROL.search(line) is None
    assert json.loads(line) == {"content": text}


ANYTHING = st.text(st.characters(codec="utf-8"), max_size=60) | st.sampled_from([EVIL, "\x1b[2J", "\x9b\u202e"])


@settings(max_examples=examples(300), deadline=None)
@given(st.tuples(ANYTHING, ANYTHING, ANYTHING), st.sampled_from(["key", "tensor", "value", "architecture"]))
def test_whatever_a_file_says_its_error_is_a_printable_line(texts: tuple[str, str, str], place: str) -> None:
    first, second, path = texts
    raw = whole_file()
    if place == "key":
        raw.keys[first] = u32(99)
    elif place == "tensor":
        raw.tensors.insert(0, RawTensor(first, 99))
    elif place == "value":
        raw.keys["tokenizer.ggml.pre"] = string(first)
        raw.keys["tokenizer.ggml.bos_token_id"] = string(second)
    else:
        raw.keys["general.architecture"] = string(first)
        raw.keys[f"{first}.block_count"] = string(second)
    said = ""
    try:
        read_gguf(raw.build(), Path(path.replace("\0", "")))
    except LlmrunError as error:
        said = f"{error} {error.hint}"
    assert said.isprintable()
    assert CONTROL.search(visible_line(first)) is None
    assert shown(second).isprintable()
