"""Tests of `llmrun batch --dry-run` from end to end, with the scripted backend and a real model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from llmrun.cli.batching.dry_run import report_json, report_lines
from llmrun.jobs.batching.estimate import Counts, Estimate, Sample, Step
from tests.support.cli.commands import llmrun, on_terminal, script_file
from tests.support.models.downloads import smollm2

LINES = [
    {"prompt": "Hello"},
    {"custom_id": "other", "prompt": "Hello there, how are you?"},
    {"prompt": "Hello"},
    {"prompt": "Say three words.", "max_tokens": 5},
    {"prompt": "twice", "n": 2},
]


def batch_file(folder: Path, lines: Sequence[object]) -> str:
    path = folder / "in.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def predicted(*arguments: str) -> dict[str, Any]:
    done = llmrun("batch", *arguments, "--dry-run", "--json")
    assert done.returncode == 0, done.stderr.decode()
    body: dict[str, Any] = json.loads(done.stdout)
    return body


def usage_of(*arguments: str, output: Path) -> tuple[int, int]:
    """Run a batch, and return the prompt tokens and the generated tokens of its calls."""
    done = llmrun("batch", *arguments, "-o", str(output), "--json")
    body = json.loads(done.stdout)
    return body["prompt_tokens"], body["generated_tokens"]


@pytest.mark.push
def test_counts_equal_the_usage_of_the_run(tmp_path: Path) -> None:
    arguments = [batch_file(tmp_path, LINES), "--backend", "scripted", "-m", "any"]
    body = predicted(*arguments)
    assert list(tmp_path.iterdir()) == [tmp_path / "in.jsonl"]
    prompt_tokens, generated = usage_of(*arguments, output=tmp_path / "out.jsonl")
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    usages = [record["response"]["body"]["usage"] for record in records]
    assert body["prompt_tokens"] == prompt_tokens
    assert body["prompt_tokens_of_all_lines"] == sum(usage["prompt_tokens"] for usage in usages) > prompt_tokens
    assert body["sample"]["generated_tokens"] == generated
    assert (body["lines"], body["failing"], body["calls"]) == (5, 0, 4)
    assert body["sample"]["finished"] == 4


@pytest.mark.push
def test_the_report_is_on_stdout(tmp_path: Path) -> None:
    flags = ["--dry-run", "--backend", "scripted", "-m", "any"]
    done = llmrun("batch", batch_file(tmp_path, [*LINES, {"prompt": "x" * 9000}]), *flags)
    lines = done.stdout.decode().splitlines()
    assert done.returncode == 0
    assert [line[:9].strip() for line in lines] == ["input", "prompts", "sample", "speed", "answers", "time"]
    assert lines[0] == "input      6 lines, 1 cannot be answered, 1 equal to other lines, 4 to answer"
    assert lines[2].startswith("sample     4 requests answered in ")
    assert b"note: 1 line cannot be answered; the first is line 6: " in done.stderr


def estimate(calls: int, unfinished: int = 0) -> Estimate:
    """Return an estimate of answers with 100 tokens, from 125 steps of 50 ms with 16 answers."""
    counts = Counts(lines=calls, calls=calls, prompt_tokens=calls, billed_tokens=calls)
    counts.prefixes.total, counts.prefixes.computed = calls, calls // 4
    return Estimate(counts, Sample([Step(0.05, 0, 16, 16)] * 125, 16, 16, 20 - unfinished, unfinished), 2.0)


def test_the_report_names_what_was_measured() -> None:
    assert report_lines(estimate(30_000, unfinished=1)) == [
        "input      30,000 lines",
        "prompts    30,000 tokens, 75% in shared prefixes",
        "sample     20 of 30,000 requests answered in 6.25 s, 16 at a time, 1 of them only in part",
        "speed      320 generated tok/s",
        "answers    100 tokens on average",
        "time       2.60 hours if all answers are as long as the sample's",
    ]
    assert report_lines(estimate(400))[-1].startswith("time       2 min 07 s if ")
    assert report_lines(estimate(20))[-1] == "time       8.25 s"


def test_json_has_the_same_figures() -> None:
    body = report_json(estimate(400))
    assert (body["calls"], body["prompt_tokens"], body["computed_prompt_tokens"]) == (400, 400, 100)
    assert body["sample"]["generated_tokens_per_second"] == pytest.approx(320)
    assert body["sample"]["prompt_tokens_per_second"] is None
    assert (body["generated_tokens_per_call"], body["seconds"]) == (100, 127)


@pytest.mark.push
def test_one_line_is_enough(tmp_path: Path) -> None:
    done = llmrun("batch", batch_file(tmp_path, LINES[:1]), "--dry-run", "--backend", "scripted", "-m", "any")
    assert done.stdout.startswith(b"input      1 line\n")
    assert b"\nsample     1 request answered in " in done.stdout
    assert done.returncode == 0


@pytest.mark.push
def test_options_for_answers_count(tmp_path: Path) -> None:
    arguments = [batch_file(tmp_path, LINES[:1]), "--backend", "scripted", "-m", "any"]
    longer = predicted(*arguments, "--system", "Be kind.", "-n", "3")
    assert longer["prompt_tokens"] > predicted(*arguments)["prompt_tokens"]
    assert longer["sample"]["generated_tokens"] == 3


@pytest.mark.push
@pytest.mark.parametrize(
    ("lines", "exit_code", "words"),
    [
        ([], 2, "the file has no lines"),
        (["", "  "], 2, "the file has no lines"),
        ([{"prompt": "x" * 9000}], 1, "no line can be answered; line 1: prompt does not fit in the context"),
    ],
)
def test_nothing_to_answer_is_an_error(tmp_path: Path, lines: list[object], exit_code: int, words: str) -> None:
    done = llmrun("batch", batch_file(tmp_path, lines), "--dry-run", "--backend", "scripted", "-m", "any")
    assert done.returncode == exit_code
    assert done.stdout == b""
    assert words in done.stderr.decode()


@pytest.mark.push
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["in.jsonl", "-m", "any"], "-o: no output file was given"),
        (["in.jsonl", "--dry-run", "--machines", "2"], "divide the time that --dry-run prints"),
        (["in.jsonl", "--dry-run", "--compare-price", "1,2"], "multiply the tokens that --dry-run prints"),
        (["in.jsonl", "--dry-run", "--workers", "http://127.0.0.1:9"], "works only for a model on this machine"),
        (["in.jsonl", "--dry-run", "-m", "http://127.0.0.1:9"], "works only for a model on this machine"),
        (["missing.jsonl", "--dry-run", "-m", "any"], "missing.jsonl: no such file"),
    ],
)
def test_usage_errors(arguments: list[str], words: str) -> None:
    done = llmrun("batch", *arguments)
    assert done.returncode == 2
    assert words in done.stderr.decode()
    assert done.stderr.count(b"error: ") == 1


@pytest.mark.push
def test_missing_models_are_reported(tmp_path: Path) -> None:
    done = llmrun("batch", batch_file(tmp_path, LINES), "--dry-run", "-m", str(tmp_path / "no.gguf"))
    assert done.returncode == 4
    assert done.stdout == b""
    assert done.stderr.startswith(b"error: ")


@pytest.mark.push
def test_ctrl_c_stops_the_measurement(tmp_path: Path) -> None:
    script = script_file(tmp_path, [("user", "x" * 5000)], step_seconds=0.05)
    source = batch_file(tmp_path, LINES)
    process = on_terminal("batch", source, "--dry-run", "--backend", "scripted", "-m", script)
    process.expect("measuring: ")
    process.sendintr()
    rest = process.read()
    process.close()
    assert process.exitstatus == 130
    assert b"Traceback" not in rest
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "script.json"}


@pytest.mark.night
def test_counts_of_a_real_model_equal_its_usage(tmp_path: Path) -> None:
    lines = [{"prompt": f"Name {number} animals, please.", "max_tokens": 8} for number in range(12)]
    lines += [{"messages": [{"role": "system", "content": "Be ünkind 🦉."}, {"role": "user", "content": "Hi"}]}]
    arguments = [batch_file(tmp_path, lines), "-m", str(smollm2()), "-n", "20", "--system", "Répondez."]
    body = predicted(*arguments)
    prompt_tokens, generated = usage_of(*arguments, output=tmp_path / "out.jsonl")
    assert body["prompt_tokens"] == prompt_tokens
    assert body["sample"]["generated_tokens"] == generated
    assert body["sample"]["generated_tokens_per_second"] > 0
