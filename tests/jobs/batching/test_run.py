"""Tests of whole runs with workers that are slow, lost, foreign or different."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from llmrun.base.errors import DoesNotFit, LlmrunError, ModelNotFound, NetworkError, UsageError
from llmrun.jobs.batching import driver, intake
from llmrun.jobs.batching.journal import Journal
from llmrun.jobs.batching.requests import CallOptions
from llmrun.jobs.batching.run import Batch, Outcome, run_batch
from llmrun.jobs.batching.workers.base import RefusedWorker, Reply, Worker, WorkerLost
from tests.support.batching.fake_workers import CARD, Failing, FakeWorker, Told, asked_by

FOREIGN = {"id": "foreign-model", "owned_by": "llamacpp"}
PROMPTS = [{"prompt": f"{'a' if number % 2 else 'b'} {number}"} for number in range(60)]
MIXED_LINES: list[Any] = [
    *PROMPTS,
    {"prompt": "b 0", "custom_id": "copy"},
    {"prompt": "refused"},
    {"prompt": "refused too"},
    {"prompt": "refused three times"},
]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_PAUSES_S", (0.001,))


class Files:
    """The files of a run in a folder."""

    def __init__(self, folder: Path, lines: Iterable[Any] = MIXED_LINES) -> None:
        self.source, self.output = folder / "in.jsonl", folder / "out.jsonl"
        self.partial = folder / "out.jsonl.partial"
        self.write(lines)
        self.told = Told()

    def write(self, lines: Iterable[Any]) -> None:
        self.source.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def run(
        self, *workers: Worker, stop_at: int | None = None, options: CallOptions | None = None, **flags: Any
    ) -> Outcome:
        """Run a batch until it is over, or until so many lines are done."""

        async def running() -> Outcome:
            stop = asyncio.Event()
            batch = Batch(self.source, self.output, options or CallOptions(), **flags)
            if stop_at is not None:
                task = asyncio.create_task(self._stop_at(stop, stop_at))
            outcome = await run_batch(batch, workers, self.told, stop)
            if stop_at is not None:
                task.cancel()
            return outcome

        return asyncio.run(running())

    async def _stop_at(self, stop: asyncio.Event, count: int) -> None:
        while not self.partial.exists() or self.partial.read_bytes().count(b"\n") <= count:
            await asyncio.sleep(0.001)
        stop.set()

    def answers(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.output.read_bytes().splitlines()]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def reference(folder: Path, lines: Iterable[Any] = MIXED_LINES) -> bytes:
    """Return the output of a run with one worker that answers one call at a time."""
    (folder / "reference").mkdir()
    files = Files(folder / "reference", lines)
    files.run(FakeWorker(slots=1))
    return files.output.read_bytes()


def test_the_output_has_a_line_for_each_request(files: Files) -> None:
    outcome = files.run(FakeWorker())
    answers = files.answers()
    assert outcome.is_complete
    assert [answer["custom_id"] for answer in answers[:3]] == ["line-1", "line-2", "line-3"]
    first = answers[0]
    assert first["error"] is None
    assert first["response"]["status_code"] == 200
    body = first["response"]["body"]
    assert body["model"] == "a-model"
    assert body["choices"][0]["message"]["content"].startswith("[{'role': 'user', 'content': 'b 0'}], seed ")
    assert body["created"] == 0
    assert "timings" not in body
    assert body["usage"] == {"prompt_tokens": 10, "completion_tokens": 3}
    assert answers[61]["response"]["status_code"] == 400
    assert answers[61]["response"]["body"]["error"]["message"] == "refused"
    assert len({answer["id"] for answer in answers}) == len(answers) == 64
    tally = outcome.tally
    assert (tally.lines, tally.done, tally.failed, tally.copied, tally.calls) == (64, 64, 3, 1, 60)
    assert not files.partial.exists()


def test_equal_requests_run_once(files: Files) -> None:
    files.write([{"prompt": "same"}, {"prompt": "other"}] * 20)
    worker = FakeWorker(delay_s=0.01)
    files.run(worker)
    assert len(worker.asked) == 2
    answers = files.answers()
    assert len({json.dumps(answer["response"]) for answer in answers}) == 2
    assert len({answer["id"] for answer in answers}) == 40


def test_an_equal_line_gets_the_record_it_would_have_got_alone(files: Files, tmp_path: Path) -> None:
    alone = reference(tmp_path, [{"prompt": "other"}, {"prompt": "same"}]).splitlines()[1]
    files.write([{"prompt": "same"}, {"prompt": "same"}])
    files.run(FakeWorker())
    assert files.output.read_bytes().splitlines()[1] == alone


@pytest.mark.parametrize("n_workers", [1, 2, 5])
def test_the_output_does_not_depend_on_the_workers(files: Files, tmp_path: Path, n_workers: int) -> None:
    workers = [FakeWorker(f"w{n}", slots=n + 1, delay_s=0.002 * n) for n in range(n_workers)]
    files.run(*workers)
    assert files.output.read_bytes() == reference(tmp_path)


def test_nothing_is_lost_or_repeated_when_workers_are_lost(files: Files, tmp_path: Path) -> None:
    workers = [FakeWorker("w0", dies_after=7), FakeWorker("w1", dies_after=11, delay_s=0.001), FakeWorker("w2")]
    files.run(*workers)
    assert files.output.read_bytes() == reference(tmp_path)
    assert sorted(asked_by(workers)) == sorted({*asked_by(workers)})  # each answered once
    assert any("w0: gone; the worker is lost, and its requests will run again" in note for note in files.told.notes)


def test_a_worker_that_never_comes_back_is_not_needed(files: Files, tmp_path: Path) -> None:
    files.run(FakeWorker("w0", dies_after=3, opens=1, delay_s=0.001), FakeWorker("w1", delay_s=0.001))
    assert files.output.read_bytes() == reference(tmp_path)


def test_a_run_ends_when_no_worker_is_left(files: Files, tmp_path: Path) -> None:
    with pytest.raises(NetworkError, match="no worker is left: fake: nobody is there") as caught:
        files.run(FakeWorker(dies_after=10, opens=1, slots=1))
    assert caught.value.hint == "run the same command again to continue"
    files.run(FakeWorker())
    assert files.output.read_bytes() == reference(tmp_path)


def test_a_request_that_loses_every_worker_is_an_error(files: Files) -> None:
    files.write([{"prompt": "deadly"}, *PROMPTS])

    class Dying(FakeWorker):
        async def answer(self, url: str, body: Mapping[str, Any]) -> Any:
            if "deadly" in str(body):
                self.is_open = False
            return await super().answer(url, body)

    outcome = files.run(Dying(slots=1))
    assert (outcome.tally.done, outcome.tally.failed) == (61, 1)
    assert files.answers()[0]["error"]["code"] == "worker_lost"


@pytest.mark.push
@pytest.mark.parametrize("stop_at", [0, 1, 5, 30, 60])
def test_a_stopped_run_continues(files: Files, tmp_path: Path, stop_at: int) -> None:
    first, second = FakeWorker(delay_s=0.01), FakeWorker()
    outcome = files.run(first, stop_at=stop_at)
    assert not outcome.is_complete
    assert not first.is_open
    assert not files.output.exists()
    resumed = files.run(second)
    assert resumed.tally.resumed == outcome.tally.done >= stop_at
    assert files.output.read_bytes() == reference(tmp_path)
    assert len(first.asked) + len(second.asked) <= 63 + first.slots


def test_a_run_that_was_killed_at_its_very_end_is_complete(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(journal: Journal) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "remove", killed)
        with pytest.raises(ZeroDivisionError):
            files.run(FakeWorker())
    before = files.output.read_bytes()
    assert files.partial.exists()
    worker = FakeWorker()
    outcome = files.run(worker)
    assert (outcome.is_complete, outcome.tally.done, outcome.tally.failed, worker.started) == (True, 64, 3, 0)
    assert files.output.read_bytes() == before
    assert not files.partial.exists()


def test_a_copy_of_a_finished_line_is_not_run_again(files: Files) -> None:
    files.write([{"prompt": "a"}])
    files.run(FakeWorker(), stop_at=None)
    record = files.output.read_bytes()
    files.output.unlink()
    files.write([{"prompt": "a"}, {"prompt": "a"}])
    worker = FakeWorker()
    files.run(worker)
    assert files.output.read_bytes().splitlines()[0] == record.rstrip(b"\n")
    assert len(worker.asked) == 1


def stopped(files: Files) -> None:
    files.run(FakeWorker(delay_s=0.01), stop_at=30)


def finished_lines(files: Files) -> list[int]:
    return [int(line.split(b" ")[0]) for line in files.partial.read_bytes().splitlines()[1:]]


def test_a_changed_line_is_refused(files: Files) -> None:
    stopped(files)
    changed = finished_lines(files)[3]
    lines = [*MIXED_LINES]
    lines[changed - 1] = {"prompt": "something else"}
    files.write(lines)
    with pytest.raises(UsageError, match=f"in.jsonl: line {changed} was changed after an earlier run had answered it"):
        files.run(FakeWorker())


def test_a_missing_line_is_refused(files: Files) -> None:
    stopped(files)
    last = max(finished_lines(files))
    files.write(MIXED_LINES[: last - 1])
    with pytest.raises(UsageError, match=f"line {last} is missing, although an earlier run has answered it"):
        files.run(FakeWorker())


def test_lines_can_be_added(files: Files, tmp_path: Path) -> None:
    stopped(files)
    longer = [*MIXED_LINES, {"prompt": "one more"}]
    files.write(longer)
    files.run(FakeWorker())
    assert files.output.read_bytes() == reference(tmp_path, longer)


@pytest.mark.push
@pytest.mark.parametrize(
    ("card", "options", "words"),
    [
        ({"id": "b-model"}, CallOptions(), "used a different model: a-model before, b-model now"),
        ({"system_fingerprint": "fp_2"}, CallOptions(), "with a different fingerprint: bits_"),
        ({"max_model_len": 5}, CallOptions(), "used a different context size: 4096 before, 5 now"),
        ({"default_sampling": {}}, CallOptions(), "with a different fingerprint: bits_"),
        ({}, CallOptions(seed=1), "used a different seed: 0 before, 1 now"),
        ({}, CallOptions(system="x"), "used different options: --system"),
    ],
)
def test_another_run_is_refused(files: Files, card: Mapping[str, Any], options: CallOptions, words: str) -> None:
    stopped(files)
    before = files.partial.read_bytes()
    with pytest.raises(UsageError, match=words) as caught:
        files.run(FakeWorker(card={**CARD, **card}), options=options)
    assert caught.value.hint.endswith("or add --force to start over")
    assert files.partial.read_bytes() == before
    files.run(FakeWorker(card={**CARD, **card}), options=options, force=True)
    assert len(files.answers()) == 64


def test_errors_are_run_again_on_request(files: Files, tmp_path: Path) -> None:
    class Moody(FakeWorker):
        """A worker that refuses every third call."""

        async def answer(self, url: str, body: Mapping[str, Any]) -> Any:
            reply = await super().answer(url, body)
            if self.asked and len(self.asked) % 3 == 0:
                return type(reply)(500, {"error": {"message": "moody"}})
            return reply

    assert files.run(Moody()).tally.failed > 20
    before = files.output.read_bytes()
    with pytest.raises(UsageError, match="the file exists"):
        files.run(FakeWorker())
    assert files.output.read_bytes() == before
    worker = FakeWorker()
    outcome = files.run(worker, retry_errors=True)
    assert outcome.tally.failed == 3
    assert 20 <= len(worker.asked) <= 25
    assert files.output.read_bytes() == reference(tmp_path)


def test_a_refused_retry_changes_nothing(files: Files) -> None:
    """However often it is repeated."""
    files.run(FakeWorker())
    before = files.output.read_bytes()
    for _ in range(2):
        with pytest.raises(UsageError, match="not made from"):
            files.run(FakeWorker(), retry_errors=True, options=CallOptions(seed=5))
        assert files.output.read_bytes() == before
        assert not files.partial.exists()
    worker = FakeWorker()
    assert files.run(worker, retry_errors=True).is_complete
    assert len(worker.asked) == 3


def test_retrying_the_errors_of_nothing_is_a_run(files: Files, tmp_path: Path) -> None:
    files.run(FakeWorker(), retry_errors=True)
    assert files.output.read_bytes() == reference(tmp_path)


def test_a_stopped_retry_continues(files: Files, tmp_path: Path) -> None:
    class Refusing(FakeWorker):
        async def answer(self, url: str, body: Mapping[str, Any]) -> Any:
            reply = await super().answer(url, body)
            return type(reply)(500, {"error": {"message": "no"}}) if self.asked else reply

    files.run(Refusing())
    broken = files.output.read_bytes()
    outcome = files.run(FakeWorker(delay_s=0.01), stop_at=20, retry_errors=True)
    assert not outcome.is_complete
    assert files.output.read_bytes() == broken
    worker = FakeWorker()
    files.run(worker, retry_errors=True)
    assert len(worker.asked) <= 60 - 20 + 8
    assert files.output.read_bytes() == reference(tmp_path)


def test_a_stopped_start_again_continues_without_force(files: Files, tmp_path: Path) -> None:
    files.run(FakeWorker())
    outcome = files.run(FakeWorker(delay_s=0.01), stop_at=30, force=True, options=CallOptions(seed=5))
    assert not outcome.is_complete
    with pytest.raises(UsageError, match="used a different seed"):
        files.run(FakeWorker())
    resumed = files.run(FakeWorker(), options=CallOptions(seed=5))
    assert resumed.tally.resumed >= 30
    assert files.output.read_bytes() != reference(tmp_path)
    with pytest.raises(UsageError, match="the file exists"):
        files.run(FakeWorker())


@pytest.mark.push
def test_an_output_that_appears_during_a_run_is_kept(files: Files) -> None:
    class Writing(FakeWorker):
        async def close(self) -> None:
            await super().close()

        async def answer(self, url: str, body: Mapping[str, Any]) -> Any:
            files.output.write_text("precious")
            return await super().answer(url, body)

    with pytest.raises(LlmrunError, match="another program has changed this file in the meantime"):
        files.run(Writing())
    with pytest.raises(UsageError, match="the file exists"):
        files.run(FakeWorker())
    assert files.output.read_text() == "precious"
    files.output.unlink()
    worker = FakeWorker()
    assert files.run(worker).is_complete
    assert worker.asked == []


@pytest.mark.parametrize("dies_after", [8, 20])
def test_no_window_is_lost_with_a_worker(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_after: int
) -> None:
    """A slot may be cancelled while it waits for the lines that a thread reads."""
    expected = reference(tmp_path)
    monkeypatch.setattr(intake, "_LINES", 7)
    read = intake.Intake.next_window

    def slow(self: intake.Intake) -> Any:
        time.sleep(0.002)
        return read(self)

    monkeypatch.setattr(intake.Intake, "next_window", slow)
    files.run(*(FakeWorker(f"w{n}", dies_after=dies_after, delay_s=0.001) for n in range(3)))
    assert files.output.read_bytes() == expected


def test_a_run_without_an_answer_for_a_line_is_not_complete(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake.Intake, "next_window", lambda self: [])
    with pytest.raises(LlmrunError, match="bug in llmrun: 64 lines have no answer"):
        files.run(FakeWorker())
    assert not files.output.exists()


def test_a_worker_that_answers_nothing_is_given_up(files: Files) -> None:
    with pytest.raises(WorkerLost, match="no worker is left: fake: gone; the worker is lost"):
        files.run(FakeWorker(dies_after=0))


def test_a_worker_that_refuses_all_calls_is_of_no_use(files: Files, tmp_path: Path) -> None:
    class Denied(FakeWorker):
        async def answer(self, url: str, body: Mapping[str, Any]) -> Any:
            if "three machines" in str(body):
                return await super().answer(url, body)
            raise RefusedWorker("not authorized", hint="set the key")

    with pytest.raises(RefusedWorker, match="not authorized"):
        files.run(Denied())
    files.run(Denied("denied"), FakeWorker("one", delay_s=0.002))
    assert "not authorized; set the key" in files.told.notes
    assert files.output.read_bytes() == reference(tmp_path)


def test_a_mixed_run_continues_only_with_the_model_that_was_asked_for(files: Files) -> None:
    files.run(FakeWorker(delay_s=0.01), stop_at=30, mixed=True, model="one")
    with pytest.raises(UsageError, match="used a different model: one before, other now"):
        files.run(FakeWorker(), mixed=True, model="other")
    assert files.run(FakeWorker(card=FOREIGN), mixed=True, model="one").is_complete


def test_records_are_emitted_in_order_while_the_run_lasts(files: Files, tmp_path: Path) -> None:
    """No output is written, and answers that come too early wait for those of earlier lines."""
    emitted: list[bytes] = []
    outcome = files.run(FakeWorker(delay_s=0.02, slots=3), emit=emitted.append)
    assert outcome.is_complete
    assert b"".join(emitted) == reference(tmp_path)
    assert sum(map(bool, emitted)) > 1
    assert not files.output.exists()
    assert not files.partial.exists()


def test_a_reader_that_is_gone_ends_the_run(files: Files) -> None:
    def emit(data: bytes) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        files.run(FakeWorker(delay_s=0.01), emit=emit)


def test_errors_of_an_unfinished_run_are_run_again(files: Files, tmp_path: Path) -> None:
    files.write([{"prompt": "refused"}, *PROMPTS])
    files.run(FakeWorker(delay_s=0.002, slots=1), stop_at=61)
    worker = FakeWorker()
    files.run(worker, retry_errors=True)
    assert any("refused" in text for text in asked_by([worker]))


@pytest.mark.parametrize(
    "data", [b"a text\n", b"{}\n", b'{"id": "batch_req_1", "response": null, "error": null}\n', b"[" * 200_000]
)
def test_errors_of_another_output_are_not_run_again(files: Files, data: bytes) -> None:
    files.output.write_bytes(data)
    with pytest.raises(UsageError, match=r"not an output|not made from"):
        files.run(FakeWorker(), retry_errors=True)
    assert files.output.read_bytes() == data


def test_the_end_does_not_wait_for_a_worker_that_never_opens(files: Files) -> None:
    class Endless(FakeWorker):
        async def start(self) -> Mapping[str, Any]:
            await asyncio.Event().wait()
            raise AssertionError

    assert files.run(FakeWorker("one"), Endless("two")).is_complete


def test_a_worker_with_another_context_size_is_refused(files: Files, tmp_path: Path) -> None:
    other = FakeWorker("other", card={**CARD, "max_model_len": 2048})
    files.run(FakeWorker("one", delay_s=0.002), other)
    (note,) = files.told.notes
    assert "a-model, 2,048 tokens of context, fingerprint bits_" in note
    assert "expected a-model, 4,096 tokens of context, fingerprint bits_" in note
    assert other.asked == []
    assert files.output.read_bytes() == reference(tmp_path)


def test_a_worker_that_cannot_prove_its_bits_is_refused(files: Files) -> None:
    class Tiny(FakeWorker):
        error: Mapping[str, Any] | None = {"message": "too long"}

        async def answer(self, url: str, body: Mapping[str, Any]) -> Any:
            return Reply(400, {"error": self.error})

    with pytest.raises(RefusedWorker, match="rejected the test prompt: too long"):
        files.run(Tiny())
    Tiny.error = None
    with pytest.raises(RefusedWorker, match="rejected the test prompt: HTTP 400"):
        files.run(Tiny())


def test_a_worker_with_other_bits_is_refused(files: Files, tmp_path: Path) -> None:
    other = FakeWorker("other", card={**CARD, "system_fingerprint": "fp_other"})
    files.run(FakeWorker("one", delay_s=0.002), other)
    assert any("other: answers would differ from the first worker's" in note for note in files.told.notes)
    assert other.asked == []
    assert files.output.read_bytes() == reference(tmp_path)


INVARIANT_NOT = {**CARD, "batch_invariant": False}


def test_a_foreign_server_needs_mixed(files: Files) -> None:
    with pytest.raises(RefusedWorker, match="the server is not llmrun"):
        files.run(FakeWorker(card=FOREIGN))
    files.run(FakeWorker("one", delay_s=0.001), FakeWorker("two", card=FOREIGN, delay_s=0.001), mixed=True)
    answers = [answer for answer in files.answers() if answer["response"]]
    assert {answer["fingerprint"].partition("_")[0] for answer in answers} == {"bits", "foreign"}
    assert answers[0]["response"]["body"]["model"] == "what the worker says"


def test_a_backend_whose_answers_depend_on_company_works_only_alone(files: Files) -> None:
    with pytest.raises(RefusedWorker, match="depend on concurrent requests"):
        files.run(FakeWorker("one", card=INVARIANT_NOT), FakeWorker("two", card=INVARIANT_NOT))
    assert files.run(FakeWorker(card=INVARIANT_NOT)).is_complete


def test_the_first_worker_that_opens_decides(files: Files) -> None:
    files.run(Failing(NetworkError("nobody is there")), FakeWorker("one"), FakeWorker("two"))
    assert files.told.notes[0] == "nobody is there; continuing with the other workers"
    assert len(files.answers()) == 64


def test_a_model_that_cannot_be_opened_is_the_error(files: Files) -> None:
    with pytest.raises(ModelNotFound, match="no such model"):
        files.run(Failing(ModelNotFound("no such model")))
    assert not files.partial.exists()


def test_a_full_disk_ends_the_run(files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = itertools.count()
    add = Journal.add

    def full(journal: Journal, number: int, record: bytes) -> None:
        if next(counter) == 20:
            raise DoesNotFit("disk: full")
        add(journal, number, record)

    monkeypatch.setattr(Journal, "add", full)
    worker = FakeWorker(delay_s=0.001)
    with pytest.raises(DoesNotFit):
        files.run(worker)
    assert not worker.is_open
    assert 20 <= len(finished_lines(files)) < 30  # calls that ended in the same moment are kept
    files.run(FakeWorker())
    assert files.output.read_bytes() == reference(tmp_path)


def test_a_bug_in_a_worker_ends_the_run(files: Files) -> None:
    class Buggy(FakeWorker):
        async def answer(self, url: str, body: Mapping[str, Any]) -> Any:
            if len(self.asked) == 5:
                raise ZeroDivisionError
            return await super().answer(url, body)

    with pytest.raises(ZeroDivisionError):
        files.run(Buggy())


def test_an_input_without_lines_is_complete_at_once(files: Files) -> None:
    files.write([])
    assert files.run(FakeWorker()).is_complete
    assert files.answers() == []


def test_the_files_are_checked_first(files: Files, tmp_path: Path) -> None:
    def refused(source: Path, output: Path, words: str) -> None:
        with pytest.raises(LlmrunError, match=words):
            asyncio.run(run_batch(Batch(source, output, CallOptions()), [FakeWorker()], files.told, asyncio.Event()))

    refused(tmp_path / "nothing.jsonl", files.output, "no such file")
    refused(tmp_path, files.output, "not a file")
    refused(files.source, files.source, "the output must not be the input")
    refused(files.source, tmp_path / "no-folder" / "out.jsonl", "does not exist")
    refused(files.source, tmp_path, "not a file")


def test_names_of_other_models_are_reported(files: Files) -> None:
    body: dict[str, Any] = {"messages": []}
    line = {"method": "POST", "url": "/v1/chat/completions"}
    files.write(
        [
            {"custom_id": "1", **line, "body": {**body, "model": "gpt"}},
            {"custom_id": "2", **line, "body": {**body, "model": "a-model", "n": 1}},
        ]
    )
    assert files.run(FakeWorker()).foreign_models == ["gpt"]
