"""Tests of `llmrun generate --samples`, with the real process on the scripted backend."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.support.cli.commands import llmrun, on_terminal, screen_of, script_file, scripted
from tests.support.engine.thinking_models import ANSWER, THOUGHT, thinking_script

pytestmark = pytest.mark.push


def noise(folder: Path, **options: object) -> str:
    """Return a script whose answers are random characters, which depend on the seed."""
    return script_file(folder, [("a cue that never comes", "")], **options)


def test_samples_are_the_answers_of_their_seeds(tmp_path: Path) -> None:
    flags = ("-q", "-m", noise(tmp_path), "-n", "30", "hello")
    alone = [scripted(*flags, "--seed", str(seed)).stdout for seed in (7, 8, 9)]
    together = scripted(*flags, "--seed", "7", "--samples", "3").stdout
    assert together == b"".join(
        b"--- sample %d of 3, seed %d\n%s" % (index + 1, 7 + index, answer) for index, answer in enumerate(alone)
    )
    assert scripted(*flags, "--seed", "7", "--samples", "3", "-0").stdout == b"".join(
        answer.removesuffix(b"\n") + b"\0" for answer in alone
    )


def test_json_lists_all_samples(tmp_path: Path) -> None:
    flags = ("-m", noise(tmp_path), "-n", "30", "--json", "--logprobs", "1", "hello")
    body = json.loads(scripted(*flags, "--seed", "7", "--samples", "3").stdout)
    assert (body["object"], body["best"]) == ("llmrun.samples", None)
    for index, sample in enumerate(body["samples"]):
        alone = json.loads(scripted(*flags, "--seed", str(7 + index)).stdout)
        [choice] = alone["choices"]
        assert (sample["index"], sample["seed"]) == (index, alone["seed"])
        assert sample["text"] == choice["message"]["content"]
        assert sample["finish_reason"] == choice["finish_reason"] == "length"
        assert sample["logprobs"] == choice["logprobs"]
        values = [token["logprob"] for token in choice["logprobs"]["content"]]
        assert sample["mean_logprob"] == pytest.approx(sum(values) / 30)
        assert sample["usage"]["completion_tokens"] == 30
    prompt_tokens = body["samples"][0]["usage"]["prompt_tokens"]
    cached = [sample["usage"]["prompt_tokens_details"]["cached_tokens"] for sample in body["samples"]]
    assert cached == [0, prompt_tokens - 1, prompt_tokens - 1]
    assert body["timings"]["tokens_per_second"] > 0


def test_logprobs_are_computed_only_if_they_are_needed() -> None:
    flags = ("--samples", "1", "--json", "hello")
    [plain] = json.loads(scripted(*flags).stdout)["samples"]
    assert (plain["logprobs"], plain["mean_logprob"]) == (None, None)
    [chosen] = json.loads(scripted(*flags, "--best-of", "mean-logprob").stdout)["samples"]
    assert chosen["logprobs"] is None
    assert chosen["mean_logprob"] < 0


def test_best_of_mean_logprob_prints_the_likeliest_sample(tmp_path: Path) -> None:
    flags = ("-m", noise(tmp_path), "-n", "12", "--seed", "3", "--samples", "5", "hello")
    samples = json.loads(scripted(*flags, "--json", "--logprobs", "0").stdout)["samples"]
    best = max(samples, key=lambda sample: float(sample["mean_logprob"]))
    done = scripted(*flags, "--best-of", "mean-logprob", "-v")
    assert done.stdout.decode().removesuffix("\n") == best["text"]
    assert f"best seed {best['seed']} (mean logprob {best['mean_logprob']:.2f})" in done.stderr.decode()
    told = json.loads(scripted(*flags, "--best-of", "mean-logprob", "--json").stdout)["best"]
    assert told == {
        "rule": "mean-logprob",
        "index": best["index"],
        "seed": best["seed"],
        "text": best["text"],
        "mean_logprob": best["mean_logprob"],
        "votes": None,
    }


def test_best_of_vote_prints_the_most_frequent_answer(tmp_path: Path) -> None:
    ends = {257: -100.0}
    flags = ["-m", noise(tmp_path), "-n", "1", "--seed", "1", "--samples", "16", "--temp", "0.7"]
    flags += [f"--logit-bias={token}={bias}" for token, bias in ends.items()]
    body = json.loads(scripted(*flags, "--json", "--best-of", "vote", "hello").stdout)
    texts = [sample["text"].strip() for sample in body["samples"]]
    assert [sample["votes"] for sample in body["samples"]] == [texts.count(text) for text in texts]
    most = max(map(texts.count, texts))
    first = next(index for index, text in enumerate(texts) if texts.count(text) == most)
    assert (body["best"]["index"], body["best"]["votes"]) == (first, most)
    done = scripted(*flags, "--best-of", "vote", "hello")
    assert done.stdout.decode().removesuffix("\n") == body["samples"][first]["text"]


def test_the_closing_line_counts_all_samples() -> None:
    short = scripted("--samples", "3", "--seed", "5", "hello").stderr.decode()
    assert re.fullmatch(r"3 samples, 48 tokens in [\d.]+ s, [\d,.]+ tok/s\n", short)
    line = scripted("--stats", "--samples", "3", "--seed", "5", "hello").stderr.decode()
    assert line.count("\n") == 1
    assert "3 samples  48 out " in line
    assert "seed 5 to 7" in line


def test_equal_samples_are_a_note() -> None:
    note = b"note: temperature 0 makes all samples equal"
    assert note in scripted("--samples", "2", "--temp", "0", "hello").stderr
    assert b"note:" not in scripted("--samples", "2", "hello").stderr
    assert b"note:" not in scripted("--samples", "1", "--temp", "0", "hello").stderr


def test_cut_off_samples_are_a_note_on_a_terminal(tmp_path: Path) -> None:
    run = ("generate", "--backend", "scripted", "-n", "2", "--samples", "3", "hello")
    assert "note: 3 of 3 answers were cut off (--max-tokens sets the limit)" in screen_of(*run, NO_COLOR="1")[0]
    full = script_file(tmp_path, [("assistant\n", "x" * 500)])
    done = scripted("-m", full, "-c", "200", "--samples", "2", "hello")
    assert b"note: 2 of 2 answers were cut off: the context is full" in done.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--samples", "65"), "--samples"),
        (("--best-of", "vote"), "--best-of: needs --samples N"),
        (("-0",), "--null: needs --samples N"),
        (("--samples", "2", "--best-of", "luck"), "choose from mean-logprob, vote"),
        (("--samples", "2", "-0", "--json"), "--null: cannot be combined with --json"),
        (("--samples", "2", "--seed", str(2**64 - 1)), "--seed: the last of 2 seeds"),
    ],
)
def test_flags_that_make_no_sense_are_refused(flags: tuple[str, ...], words: str) -> None:
    done = scripted(*flags, "hello")
    assert (done.returncode, done.stdout) == (2, b"")
    assert words in done.stderr.decode()


def test_thinking_is_shown_before_each_sample(tmp_path: Path) -> None:
    flags = ("-m", thinking_script(tmp_path), "--samples", "2", "Is it so?")
    done = scripted(*flags, "-0")
    assert done.stdout.decode() == f"{ANSWER}\0" * 2
    assert done.stderr.decode().count(f"thinking:\n{THOUGHT}\ndone thinking\n") == 2
    assert THOUGHT not in scripted(*flags, "--hide-thinking").stderr.decode()
    samples = json.loads(scripted(*flags, "--json").stdout)["samples"]
    assert [sample["reasoning"].strip() for sample in samples] == [THOUGHT] * 2


def test_samples_in_a_small_cache_are_the_same(tmp_path: Path) -> None:
    flags = ("-q", "-n", "30", "--seed", "2", "--samples", "4", "-0", "hello")
    roomy, small = tmp_path / "roomy", tmp_path / "small"
    roomy.mkdir()
    small.mkdir()
    expected = scripted("-m", noise(roomy), *flags)
    assert expected.stdout.count(b"\0") >= 4
    assert scripted("-m", noise(small, capacity=120, context_size=100), *flags).stdout == expected.stdout


@pytest.mark.parametrize("complete", [0, 1])
def test_ctrl_c_prints_the_samples_that_are_complete(tmp_path: Path, complete: int) -> None:
    """The cache has room for one sample of a full context at a time."""
    script = noise(tmp_path, step_seconds=0.005, context_size=200, capacity=200)
    never = ("--logit-bias", "257=-inf", "--logit-bias", "259=-inf")
    run = ("generate", "--backend", "scripted", "-m", script, "--samples", "2", *never, "hello")
    process = on_terminal(*run, NO_COLOR="1")
    process.expect(f"samples    {complete} of 2 complete")
    process.sendintr()
    rest = process.read().decode()
    process.close()
    assert process.exitstatus == 130
    assert f"note: stopped when {complete} of 2 samples were complete" in rest
    assert "2 samples" in rest
    assert "sample 2 of 2" not in rest


@pytest.mark.night
def test_every_printed_sample_is_logged(tmp_path: Path) -> None:
    env = os.environ | {"LLMRUN_DATA_DIR": str(tmp_path)}
    for flags in (("--seed", "1"), ("--seed", "11", "--json"), ("--seed", "21", "--best-of", "vote")):
        scripted("-q", "--log", "--samples", "2", *flags, "hello", env=env)
    entries = json.loads(llmrun("logs", "--json", env=env).stdout)
    assert [entry["seed"] for entry in entries] == [1, 2, 11, 12, 21]
