"""Tests of the closing line and the JSON body, from known numbers."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from llmrun.base.types import FinishReason, ModelInfo, Timings, TokenLogprob
from llmrun.cli.answers.report import (
    AnsweredRequest,
    completion_body,
    logprob_fields,
    short_line,
    show_statistics,
    stats_fields,
    stats_lines,
)
from llmrun.cli.console.output import out
from llmrun.engine.requests import Finished, Request, TextPrompt, TokenLogprobs
from llmrun.options.sampling_params import SamplingParams

INFO = ModelInfo(
    path="/models/x.gguf",
    name="x",
    architecture="llama",
    file_type="Q4_1",
    parameters=135_000_000,
    file_bytes=98_000_000,
    vocabulary_size=49152,
    train_context=8192,
    context_size=8192,
    max_sequences=1,
    backend="cpu",
    device="2 threads, avx512vnni",
    threads=2,
)
TIMINGS = Timings(
    load_s=0.2,
    prompt_tokens=38,
    cached_tokens=0,
    generated_tokens=128,
    prefill_s=0.1222,
    ttft_s=0.123,
    decode_s=1.38,
    total_s=1.50,
)


def answer_of(reason: FinishReason = FinishReason.STOP, timings: Timings = TIMINGS) -> AnsweredRequest:
    request = Request(TextPrompt("x"), sampling=SamplingParams(seed=421_123), logprobs=2)
    finished = Finished(0, reason, None, 166, timings)
    token = TokenLogprobs(
        TokenLogprob(5, "ä".encode()[:1], math.log(0.75)),
        (TokenLogprob(5, "ä".encode()[:1], math.log(0.75)), TokenLogprob(6, b" b\x1b", -math.inf)),
    )
    return AnsweredRequest("smollm2:135m", INFO, request, "answer", (token,), finished)


@pytest.mark.parametrize(
    ("reason", "changed", "line"),
    [
        ("stop", {}, "212 tokens in 9.1 s, 23 tok/s"),
        ("length", {"generated_tokens": 1, "decode_s": 0.0, "total_s": 0.31}, "1 token in 0.31 s"),
        ("cancelled", {}, "stopped after 212 tokens in 9.1 s, 23 tok/s"),
        ("cancelled", {"generated_tokens": 0}, "stopped in prefill after 9.1 s"),
        ("stop", {"ttft_s": 35.0, "total_s": 44.1}, "212 tokens in 44 s (the first after 35 s), 23 tok/s"),
        ("stop", {"ttft_s": 1.5, "total_s": 10.5}, "212 tokens in 10 s, 23 tok/s"),
        ("stop", {"ttft_s": 0.2, "decode_s": 0.7, "total_s": 0.9}, "212 tokens in 0.90 s, 301 tok/s"),
    ],
)
def test_an_answer_ends_with_a_short_line(
    capsys: pytest.CaptureFixture[str], reason: str, changed: dict[str, Any], line: str
) -> None:
    timings = replace(TIMINGS, generated_tokens=212, decode_s=9.0, total_s=9.1)
    show_statistics(answer_of(FinishReason(reason), replace(timings, **changed)))
    assert capsys.readouterr().err == f"{line}\n"


def test_the_short_line_counts_thinking_and_warns_of_a_full_context() -> None:
    answer = answer_of()
    finished = structs.replace(answer.finished, thinking_tokens=100, context_used=7800)
    line = short_line(structs.replace(answer, finished=finished))
    assert line == "128 tokens (100 thinking) in 1.5 s, 92 tok/s, context 95% full"
    remote = structs.replace(answer, info=replace(INFO, context_size=0))
    stopped = structs.replace(remote, finished=structs.replace(finished, timings=replace(TIMINGS, generated_tokens=0)))
    assert short_line(stopped) == "stopped before the answer began, after 1.5 s"


@pytest.mark.parametrize("switch", ["stats", "verbose"])
def test_stats_and_verbose_show_all_statistics(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, switch: str
) -> None:
    monkeypatch.setattr(out, switch, True)
    show_statistics(answer_of())
    assert capsys.readouterr().err == "  ".join(stats_fields(answer_of())) + "\n"


def test_every_statistic_has_a_line_of_its_own() -> None:
    drafted = replace(TIMINGS, steps=50, drafted_tokens=96, accepted_tokens=78, cached_tokens=30)
    answer = answer_of(timings=drafted)
    thought = structs.replace(answer.finished, thinking_tokens=100, first_answer_s=1.2)
    assert stats_lines(structs.replace(answer, finished=thought)) == [
        "model       smollm2:135m cpu×2",
        "prompt      8 tokens computed at 65.5 tok/s, 30 cached",
        "answer      128 tokens (100 thinking)",
        "TTFT        123ms; the answer began after 1.20s",
        "decode      92.0 tok/s, TPOT 11ms",
        "drafts      78 of 96 tokens accepted, 2.56 tokens per step",
        "time        1.50s, finish reason stop",
        "context     166 of 8,192 tokens (2.0%)",
        "seed        421123",
    ]
    none = answer_of(FinishReason.CANCELLED, replace(TIMINGS, generated_tokens=0, prompt_tokens=0, decode_s=0.0))
    assert [line.split()[0] for line in stats_lines(none)] == ["model", "time", "context", "seed"]


def test_the_closing_line_says_it_all_in_100_columns() -> None:
    line = "  ".join(stats_fields(answer_of()))
    assert line == (
        "smollm2:135m cpu×2  38 in 311/s  TTFT 123ms  128 out 92.0/s  TPOT 11ms  1.50s  ctx 2.0%  seed 421123"
    )
    assert len(line) <= 100


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        (100, "smollm2:135m cpu×2  38 in 311/s  TTFT 123ms  128 out 92.0/s  TPOT 11ms  1.50s  ctx 2.0%  seed 421123"),
        (80, "smollm2:135m cpu×2  TTFT 123ms  128 out 92.0/s  1.50s  ctx 2.0%  seed 421123"),
        (60, "TTFT 123ms  128 out 92.0/s  1.50s  ctx 2.0%  seed 421123"),
        (50, "TTFT 123ms  128 out 92.0/s  1.50s  seed 421123"),
        (30, "128 out 92.0/s  seed 421123"),
        (10, "128 out 92.0/s  seed 421123"),
    ],
)
def test_the_closing_line_drops_what_matters_least_until_it_fits(columns: int, line: str) -> None:
    assert "  ".join(stats_fields(answer_of(), columns)) == line


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        (110, "smollm2:135m cpu×2  TTFT 123ms  128 out 92.0/s  2.56/step  81% accepted  1.50s  ctx 2.0%  seed 421123"),
        (80, "TTFT 123ms  128 out 92.0/s  2.56/step  81% accepted  1.50s  seed 421123"),
        (50, "TTFT 123ms  128 out 92.0/s  2.56/step  seed 421123"),
        (40, "128 out 92.0/s  2.56/step  seed 421123"),
    ],
)
def test_the_closing_line_tells_what_drafts_gained(columns: int, line: str) -> None:
    drafted = replace(TIMINGS, steps=50, drafted_tokens=96, accepted_tokens=78)
    shown = "  ".join(stats_fields(answer_of(timings=drafted), columns))
    assert shown == line
    assert len(shown) <= columns


def test_drafts_that_saved_no_step_are_not_shown() -> None:
    """A right draft of the last token alone saves no step, so it is not shown either."""
    for accepted in (0, 1):
        wrong = replace(TIMINGS, steps=128, drafted_tokens=9, accepted_tokens=accepted)
        assert stats_fields(answer_of(timings=wrong)) == stats_fields(answer_of())


def test_verbose_counts_the_drafts(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(out, "verbose", True)
    show_statistics(answer_of(timings=replace(TIMINGS, steps=50, drafted_tokens=96, accepted_tokens=78)))
    assert "drafts     78 of 96 tokens accepted; 128 tokens in 50 steps" in capsys.readouterr().err


def test_the_json_body_tells_steps_and_drafts() -> None:
    timings = replace(TIMINGS, steps=50, drafted_tokens=96, accepted_tokens=78)
    told = completion_body(answer_of(timings=timings))["timings"]
    names = ("steps", "tokens_per_step", "drafted_tokens", "accepted_tokens")
    assert [told[name] for name in names] == [50, 2.56, 96, 78]
    unknown = completion_body(answer_of())["timings"]
    assert [unknown[name] for name in names] == [None, None, 0, 0]


def test_the_json_body_tells_whether_the_model_was_open() -> None:
    assert completion_body(answer_of())["run"]["warm"] is False
    assert completion_body(answer_of(timings=replace(TIMINGS, load_s=0.0)))["run"]["warm"] is True
    remote = structs.replace(answer_of(), info=replace(INFO, backend="remote"))
    assert "warm" not in completion_body(remote)["run"]


def test_the_closing_line_says_how_much_of_the_model_a_gpu_runs() -> None:
    answer = answer_of()
    on_gpu = structs.replace(answer, info=replace(answer.info, backend="llama", gpu_layers="31/31"))
    line = "  ".join(stats_fields(on_gpu))
    assert line.startswith("smollm2:135m llama GPU 31/31  38 in 311/s  ")
    assert len(line) <= 110
    assert completion_body(on_gpu)["run"]["gpu_layers"] == "31/31"
    assert completion_body(answer)["run"]["gpu_layers"] is None


def test_the_closing_line_says_that_an_answer_was_stopped() -> None:
    answer = answer_of(FinishReason.CANCELLED)
    assert "stopped" in stats_fields(answer)
    assert "stopped" in stats_fields(answer, 40)
    assert "stopped" not in stats_fields(answer_of(FinishReason.LENGTH))


def test_the_closing_line_claims_no_pace_that_was_not_measured() -> None:
    one = stats_fields(answer_of(timings=replace(TIMINGS, generated_tokens=1, decode_s=0.0)))
    assert one[3:5] == ["1 out", "1.50s"]
    forced = stats_fields(answer_of(timings=replace(TIMINGS, generated_tokens=3, decode_s=0.0, steps=1)))
    assert forced[3] == "3 out"
    assert not any("TPOT" in field for field in forced)
    none = stats_fields(answer_of(FinishReason.CANCELLED, replace(TIMINGS, generated_tokens=0)))
    assert none[1:] == ["stopped in prefill after 1.50s", "seed 421123"]


def test_the_json_body_is_json_whatever_the_model_said() -> None:
    body = json.loads(json.dumps(completion_body(answer_of(FinishReason.CANCELLED)), allow_nan=False))
    token = body["choices"][0]["logprobs"]["content"][0]
    assert token["bytes"] == [0xC3]
    assert token["token"] == "\ufffd"
    assert [top["logprob"] for top in token["top_logprobs"]] == [math.log(0.75), -9999.0]
    assert body["choices"][0]["finish_reason"] == "cancelled"
    assert body["usage"]["completion_tokens"] == 128
    assert body["timings"]["decode_per_second"] == pytest.approx(127 / 1.38)


def test_a_token_is_listed_with_its_probability() -> None:
    assert logprob_fields(answer_of().logprobs[0]) == ["'\\\\xc3' 75.0%", "'\\\\xc3' 75.0%", "' b\\x1b' 0.0%"]
