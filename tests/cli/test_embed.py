"""Tests of `llmrun embed` and `llmrun rerank` as users type them."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmrun.backends.scripted import HIDDEN_SIZE
from llmrun.base.errors import Cancelled, DoesNotFit, UsageError
from llmrun.cli.arguments.embedding import EmbedFlags
from llmrun.cli.embedding import Input, check_output, open_embedder, read_texts, write_vectors
from llmrun.engine.embedding import Embedder
from llmrun.options.settings import Settings
from tests.support.cli.commands import llmrun
from tests.support.hub.small_disks import mounted_disk
from tests.support.models.tiny_encoders import TINY_ENCODERS, TINY_RERANKERS, tiny_encoder

EMBED = ("embed", "-m", "model", "--backend", "scripted")


def lines_of(*arguments: str, **options: Any) -> list[dict[str, Any]]:
    done = llmrun(*EMBED, *arguments, **options)
    assert done.returncode == 0, done.stderr.decode()
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_each_text_gets_a_line_with_a_vector_of_length_1() -> None:
    first, second = lines_of("one text", "another")
    assert (first["index"], second["index"]) == (0, 1)
    assert len(first["embedding"]) == HIDDEN_SIZE
    assert np.linalg.norm(first["embedding"]) == pytest.approx(1.0)
    assert first["embedding"] != second["embedding"]


@pytest.mark.push
def test_texts_come_from_arguments_lines_and_json_lines(tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("a text\n\nb\n")
    (tmp_path / "texts.jsonl").write_text('{"text": "a text", "id": "x"}\n"b"\n')
    plain, lines = tmp_path / "texts.txt", tmp_path / "texts.jsonl"
    assert read_texts(["a text", "b"], None) == [Input("a text", "text 1"), Input("b", "text 2")]
    assert read_texts([], plain) == [Input("a text", f"{plain}:1"), Input("b", f"{plain}:3")]
    assert read_texts([], lines) == [Input("a text", f"{lines}:1", "x"), Input("b", f"{lines}:2")]
    first, second = lines_of(stdin=b'{"input": "a text", "custom_id": "x"}\n{"document": "b"}\n')
    assert (first["id"], second.get("id")) == ("x", None)
    assert lines_of("-", stdin=b"a text\nb\n") == lines_of("a text", "b")


@pytest.mark.push
def test_vectors_are_written_as_an_array_or_as_lines(tmp_path: Path) -> None:
    expected = [line["embedding"] for line in lines_of("a", "b")]
    assert llmrun(*EMBED, "a", "b", "-o", str(tmp_path / "v.npy")).returncode == 0
    array = np.load(tmp_path / "v.npy", allow_pickle=False)
    assert (array.dtype, array.shape) == (np.float32, (2, HIDDEN_SIZE))
    np.testing.assert_array_equal(array, np.array(expected, np.float32))
    (tmp_path / ".v.jsonl.llmrun-0123456789abcdef").write_text("left by a killed run")
    write_vectors([*array], [Input("a", "text 1", "one"), Input("b", "text 2")], tmp_path / "v.jsonl")
    assert {path.name for path in tmp_path.iterdir()} == {"v.npy", "v.jsonl"}
    assert [json.loads(line) for line in (tmp_path / "v.jsonl").read_text().splitlines()] == [
        {"index": 0, "id": "one", "embedding": expected[0]},
        {"index": 1, "embedding": expected[1]},
    ]


@pytest.mark.push
def test_dimensions_and_length_are_as_asked() -> None:
    [line] = lines_of("aab", "--dimensions", "3", "--no-normalize")
    assert len(line["embedding"]) == 3
    [whole] = lines_of("aab", "--no-normalize")
    assert sum(whole["embedding"]) > 1.5
    assert whole["embedding"][:3] == line["embedding"]


@pytest.mark.push
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("text", "--file", "x.txt"), "the texts were given twice"),
        (("text", "-o", "vectors.csv"), "must end in .npy or .jsonl"),
        (("text", "--dimensions", str(HIDDEN_SIZE + 1)), f"must be 1 to {HIDDEN_SIZE}"),
    ],
)
def test_mistakes_are_errors_of_one_line(arguments: tuple[str, ...], words: str) -> None:
    done = llmrun(*EMBED, *arguments)
    assert done.returncode == 2
    assert words in done.stderr.decode()
    assert "Traceback" not in done.stderr.decode()


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"missing\.txt: No such file"):
        read_texts([], tmp_path / "missing.txt")
    with pytest.raises(UsageError, match="there is no folder"):
        check_output(tmp_path / "no" / "v.npy", None)
    with pytest.raises(UsageError, match="--pooling: 'max' is not one of mean, cls, last"):
        EmbedFlags(pooling="max").chosen_pooling  # noqa: B018  it raises


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"no": "text"}', "no text: must be a string, or an object with text, "),
        ('{"text": 5}', "no text"),
        ("null", "no text"),
        ('{"text": "a"', "not valid JSON: "),
        ('{"text": "a", "id": NaN}', "not valid JSON: NaN is not a JSON number"),
        ("9" * 5000, "not valid JSON: an integer has 5,000 digits"),
        ("[" * 200_000, "the JSON is nested too deeply"),
        (r'{"text": "a", "id": "\ud800"}', "a string has an unpaired surrogate"),
    ],
)
def test_json_lines_without_a_text_are_named(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text(f'"a"\n{line}\n')
    with pytest.raises(UsageError) as caught:
        read_texts([], path)
    assert str(caught.value).startswith(f"{path}:2: {message}")


def test_empty_lines_are_counted_aloud(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The rows of an array would otherwise be taken for those of the file."""
    path = tmp_path / "texts.txt"
    path.write_text("a\n\n \nb\n")
    assert [each.text for each in read_texts([], path)] == ["a", "b"]
    assert "texts.txt: 2 empty lines left out" in capfd.readouterr().err
    path.write_text("a\nb\n")
    assert [each.text for each in read_texts([], path)] == ["a", "b"]
    assert capfd.readouterr().err == ""


def test_only_line_feeds_end_lines(tmp_path: Path) -> None:
    """JSON strings may contain U+2028, and texts may contain form feeds."""
    (tmp_path / "texts.txt").write_bytes("a\x0cb\u2028c\r\n\nd".encode())
    path = tmp_path / "texts.txt"
    assert read_texts([], path) == [Input("a\x0cb\u2028c", f"{path}:1"), Input("d", f"{path}:3")]
    (tmp_path / "texts.jsonl").write_bytes('{"text": "a\u2028b", "id": 7}\r\n{"text": "c", "id": "\x7f"}'.encode())
    path = tmp_path / "texts.jsonl"
    assert read_texts([], path) == [Input("a\u2028b", f"{path}:1", "7"), Input("c", f"{path}:2", "\x7f")]


def test_names_with_control_characters_stay_the_same(capfd: pytest.CaptureFixture[str]) -> None:
    write_vectors([np.zeros(1, np.float32)], [Input("text", "text 1", "\x7f\u009b\u202e")], None)
    line = capfd.readouterr().out
    assert json.loads(line)["id"] == "\x7f\u009b\u202e"
    assert "\x7f" not in line


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("texts.jsonl", "the output must not be the input"),
        ("link.jsonl", "the output must not be the input"),
        ("folder.npy", "not a file"),
        ("pipe.npy", "not a file"),
        ("loop.npy", "the symbolic links form a loop"),
    ],
)
def test_outputs_that_would_lose_something_are_refused(name: str, message: str, tmp_path: Path) -> None:
    if sys.platform == "win32":
        pytest.skip("needs named pipes")
    (tmp_path / "texts.jsonl").write_text('"precious"')
    (tmp_path / "link.jsonl").symlink_to("texts.jsonl")
    (tmp_path / "loop.npy").symlink_to("loop.npy")
    (tmp_path / "folder.npy").mkdir()
    os.mkfifo(tmp_path / "pipe.npy")
    with pytest.raises(UsageError, match=message):
        check_output(tmp_path / name, tmp_path / "texts.jsonl")


@pytest.mark.parametrize("name", ["v.npy", "v.jsonl"])
def test_a_full_disk_keeps_the_old_output(name: str, tmp_path: Path) -> None:
    vectors = [np.ones(3000, np.float32)] * 30
    with mounted_disk(tmp_path / "disk", 1 << 20, room=64 << 10) as disk:
        (disk.folder / "old").write_text("old")
        (disk.folder / name).symlink_to("old")
        with pytest.raises(DoesNotFit, match="full, "):
            write_vectors(vectors, [Input("text", "text 1")] * 30, disk.folder / name)
        assert (disk.folder / name).read_text() == "old"
        assert sorted(path.name for path in disk.folder.iterdir()) == sorted(["ballast", name, "old"])


@pytest.mark.push
def test_models_without_pooling_get_a_note() -> None:
    assert "probably not trained for embeddings" in llmrun(*EMBED, "text").stderr.decode()
    assert "trained" not in llmrun(*EMBED, "text", "--pooling", "mean").stderr.decode()


@pytest.mark.push
def test_texts_that_are_too_long_fail_or_are_truncated_aloud() -> None:
    long = "x" * 100
    done = llmrun(*EMBED, "a", long, "-c", "32")
    assert done.returncode == 8
    assert "text 2 does not fit in the context: 101 tokens exceed the limit of 32" in done.stderr.decode()
    done = llmrun(*EMBED, "a", long, "-c", "32", "--truncate")
    assert done.returncode == 0
    assert "1 of 2 texts truncated to 32 tokens" in done.stderr.decode()
    assert len(done.stdout.splitlines()) == 2


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interruptions_are_silent(
    number: signal.Signals,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def interrupted(self: Embedder) -> None:
        os.kill(os.getpid(), number)
        raise Cancelled("generation stopped")

    monkeypatch.setattr(Embedder, "step", interrupted)
    with open_embedder(Settings(model="model", backend="scripted")) as opened:
        capfd.readouterr()  # the note about pooling
        with pytest.raises(SystemExit) as caught:
            opened.vectors([Input("a text", "text 1")], dimensions=None, normalize=True, truncate=False)
    assert caught.value.code == code
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["embed", "a text"], 'llmrun embed -m hf:Qwen/Qwen3-Embedding-0.6B-GGUF "The sky is blue."'),
        (["embed"], 'llmrun embed -m hf:Qwen/Qwen3-Embedding-0.6B-GGUF "The sky is blue."'),
        (["embed", "and/or"], 'llmrun embed -m hf:Qwen/Qwen3-Embedding-0.6B-GGUF "The sky is blue."'),
        (["embed", "--truncate", "m.gguf", "a text"], "llmrun embed --truncate -m m.gguf 'a text'"),
        (["embed", "qwen3:4b", "a text"], "llmrun embed -m qwen3:4b 'a text'"),
        (["rerank", "hf:a/b-GGUF", "why?", "a.txt"], "llmrun rerank -m hf:a/b-GGUF 'why?' a.txt"),
        (
            ["rerank", "why?", "a.txt"],
            'llmrun rerank -m hf:ggml-org/Qwen3-Reranker-0.6B-Q8_0-GGUF "Why is the sky blue?" docs/*.txt',
        ),
    ],
    ids=str,
)
def test_a_missing_model_gets_a_command_that_works(arguments: list[str], hint: str) -> None:
    """Earlier versions took the first argument for the model, so the hint rewrites such a command."""
    done = llmrun(*arguments)
    assert (done.stderr.decode(), done.returncode) == (f"error: -m: the model is missing\nhint: {hint}\n", 2)


@pytest.mark.parametrize(("scores", "kind"), [(True, "embeddings"), (False, "rankings")])
def test_unsuitable_models_are_refused_by_their_header(
    scores: bool, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = TINY_ENCODERS["bert"] if kind == "embeddings" else TINY_RERANKERS["bert"]
    path = tiny_encoder(tmp_path, tiny)
    monkeypatch.setattr("llmrun.backends.cpu.backend.CpuBackend", None)  # the backend would read the weights
    with (
        pytest.raises(UsageError, match="cannot rank documents" if scores else "does not compute embeddings"),
        open_embedder(Settings(model=str(path), backend="cpu"), scores=scores),
    ):
        pass


@pytest.mark.parametrize(
    ("query", "documents", "words"),
    [
        ("why?", ["no-such-file"], "document: no-such-file: No such file"),
        ("why?", ["a.txt", "empty.txt"], "empty.txt: the document is empty"),
        ("why?", ["empty.jsonl"], "empty.jsonl:1: the document is empty"),
        ("why?", [], "no documents given"),
        (" ", ["a.txt"], "QUERY: the query is empty"),
    ],
)
def test_rerank_complains_before_it_looks_for_a_model(
    query: str, documents: list[str], words: str, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("a document")
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "empty.jsonl").write_text('""\n')
    done = llmrun("rerank", "-m", "no-such-model", query, *documents, cwd=tmp_path)
    assert words in done.stderr.decode()
    assert done.returncode == 2


def test_servers_are_pointed_to_their_routes() -> None:
    done = llmrun("embed", "-m", "http://127.0.0.1:1/v1", "text")
    assert done.returncode == 2
    assert "/v1/embeddings" in done.stderr.decode()


def test_models_that_rank_nothing_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a document")
    done = llmrun("rerank", "-m", "model", "a query", str(tmp_path / "a.txt"), "--backend", "scripted")
    assert done.returncode == 2
    assert "cannot rank documents" in done.stderr.decode()


@pytest.mark.push
def test_documents_are_ranked(tmp_path: Path) -> None:
    model = str(tiny_encoder(tmp_path, TINY_RERANKERS["bert"]))
    (tmp_path / "one.txt").write_text("in the on")
    (tmp_path / "more.jsonl").write_text('{"text": "re he", "id": "b"}\n"the the the"\n')
    files = (str(tmp_path / "one.txt"), str(tmp_path / "more.jsonl"))
    done = llmrun("rerank", "-m", model, "the", *files, "--json")
    assert done.returncode == 0, done.stderr.decode()
    results = json.loads(done.stdout)["results"]
    scores = [result["relevance_score"] for result in results]
    assert scores == sorted(scores, reverse=True)
    assert {result["document"] for result in results} == {files[0], "b", f"{files[1]}:2"}
    best = llmrun("rerank", "-m", model, "the", *files, "--top", "1").stdout.decode()
    assert best.split() == [f"{scores[0]:.4f}", results[0]["document"]]


@pytest.mark.push
def test_encoders_refuse_to_chat(tmp_path: Path) -> None:
    model = str(tiny_encoder(tmp_path, TINY_ENCODERS["bert"]))
    done = llmrun("generate", "-m", model, "--raw", "hello")
    assert done.returncode == 2
    assert "computes embeddings and generates no text" in done.stderr.decode()
    assert "llmrun embed" in done.stderr.decode()
    done = llmrun("chat", "-m", model, stdin=b"")
    assert done.returncode == 2, "before the first question"
    done = llmrun("eval", model, stdin=b"a text " * 100)
    assert done.returncode == 2
    assert "computes embeddings and predicts no text" in done.stderr.decode()
