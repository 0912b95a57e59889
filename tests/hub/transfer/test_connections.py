"""Tests of several connections: faster if each is limited, no slower otherwise, and always with the right bytes."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llmrun.base.errors import DoesNotFit, LlmrunError, NetworkError
from llmrun.hub.names import RemoteFile
from llmrun.hub.remote.http_ranges import Growth, Patience, Remote, TryAgain
from llmrun.hub.transfer import file_transfer
from llmrun.hub.transfer.file_transfer import Claim, Connections, fetch
from llmrun.hub.transfer.partial_file import PartialFile
from tests.support.hub.fake_hub import FakeHub, Fault, fake_hub
from tests.support.hub.fetching import Said

DATA = random.Random(2).randbytes(3_000_000)
FILE = RemoteFile("big.gguf", len(DATA), hashlib.sha256(DATA).hexdigest())
PART = 100_000


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 0.5)
    monkeypatch.setattr("llmrun.hub.remote.http_ranges.FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(file_transfer, "PART", PART)
    with fake_hub() as running:
        yield running


@pytest.fixture
def partial(tmp_path: Path) -> Iterator[PartialFile]:
    made = PartialFile(tmp_path / "p", FILE.size, FILE.sha256)
    yield made
    made.close()


def remote(hub: FakeHub, data: bytes = DATA) -> Remote:
    url = hub.public(data)
    return Remote(FILE, lambda: (url, {}))


def always(count: int) -> Callable[..., int]:
    """Return a stand-in for growth that advises `count` connections at once."""

    def advise(*_: object) -> int:
        return count

    return advise


def beyond(partial: PartialFile, received: int) -> Callable[[], bool]:
    return lambda: partial.received > received


def run(made: Connections, until: Callable[[], bool] = lambda: False) -> None:
    end = time.monotonic() + 30
    while made.running and not until():
        assert time.monotonic() < end
        made.wait(0.01)


@pytest.mark.push
def test_what_one_connection_brings_gets_it_another(
    hub: FakeHub, partial: PartialFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The measured rate opens the second connection, not a failure: the first one stalls until the second one asks."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 30)
    monkeypatch.setattr("llmrun.hub.remote.http_ranges.PROBE_S", 0.3)
    monkeypatch.setattr("llmrun.hub.remote.http_ranges.WORTH_S", 0.3)

    def fail(_: Patience, trouble: TryAgain, received: int) -> float:
        raise AssertionError(f"{trouble} after {received} bytes")

    monkeypatch.setattr(Patience, "wait_after", fail)
    hub.faults += [Fault(stall_after=300_000), Fault(first=hub.release.set)]
    assert fetch(remote(hub), partial, "tiny", Said()) == FILE.sha256
    assert hub.faults == []
    assert partial.path.read_bytes() == DATA


@pytest.mark.push
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_the_file_is_right_over_any_number_of_connections(
    hub: FakeHub, partial: PartialFile, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Growth, "advise", always(count))
    hub.bytes_per_second = 10e6
    assert fetch(remote(hub), partial, "tiny", Said()) == FILE.sha256
    assert partial.path.read_bytes() == DATA
    if count > 1:
        assert len({asked.range for asked in hub.asked}) > 5


@pytest.mark.push
def test_they_come_and_go(hub: FakeHub, partial: PartialFile) -> None:
    hub.bytes_per_second = 2e6
    with Connections(remote(hub), partial, Patience("big.gguf", FILE.size, 0)) as made:
        made.resize(1)
        for count in (4, 1, 3, 2, 8):
            made.resize(count)
            before = partial.received
            run(made, beyond(partial, before + 200_000))
        hub.bytes_per_second = None
        run(made)
        made.wait(60)
    assert partial.gaps() == []
    assert made.error is None
    assert partial.path.read_bytes() == DATA


def test_what_is_claimed_next_is_neither_here_nor_claimed(hub: FakeHub, partial: PartialFile) -> None:
    def put(start: int, end: int) -> None:
        run = partial.begin(start)
        partial.write(run, DATA[start:end])
        partial.end(run)

    put(100, 200)
    put(1000, FILE.size)
    made = Connections(remote(hub), partial, Patience("big.gguf", FILE.size, 0))
    made._claims += [Claim(20, 40), Claim(200, 300), Claim(900, 1000)]
    claims = [made._claim_next() for _ in range(4)]
    assert [(claim.start, claim.end) for claim in claims if claim] == [(0, 20), (40, 100), (300, 900)]
    assert claims[3] is None


@pytest.mark.push
def test_one_that_fails_beside_others_is_not_replaced_and_the_file_still_comes(
    hub: FakeHub, partial: PartialFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Growth, "advise", always(4))
    hub.bytes_per_second = 5e6
    hub.faults.append(Fault(status=503, times=3, skip=1))
    said = Said()
    assert fetch(remote(hub), partial, "tiny", said) == FILE.sha256
    assert said.notes == []


@pytest.mark.push
def test_all_of_them_failing_at_once_is_gone_on_from(
    hub: FakeHub, partial: PartialFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Growth, "advise", always(4))
    hub.bytes_per_second = 2e6
    hub.faults += [Fault(cut_after=200_000), *[Fault(cut_after=50_000) for _ in range(7)]]
    assert fetch(remote(hub), partial, "tiny", Said()) == FILE.sha256
    assert hub.faults == []


@pytest.mark.push
def test_another_connection_that_gets_no_range_is_given_up(
    hub: FakeHub, partial: PartialFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Growth, "advise", always(2))
    hub.bytes_per_second = 5e6
    hub.faults.append(Fault(ignore_range=True, skip=1))
    assert fetch(remote(hub), partial, "tiny", Said()) == FILE.sha256
    assert [asked.status for asked in hub.asked].count(200) == 1


@pytest.mark.push
def test_a_server_without_ranges_gets_one_connection(
    hub: FakeHub, partial: PartialFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Growth, "advise", always(8))
    hub.bytes_per_second = 10e6
    hub.faults.append(Fault(ignore_range=True, times=99))
    assert fetch(remote(hub), partial, "tiny", Said()) == FILE.sha256
    assert hub.downloads() == 1


def test_a_server_that_always_has_another_version_is_given_up(hub: FakeHub, tmp_path: Path) -> None:
    url = hub.public(b"GGUF" + DATA[4:])
    unknown = Remote(RemoteFile("big.gguf", len(DATA), None), lambda: (url, {}))
    partial = PartialFile(tmp_path / "unknown", len(DATA), None)
    count = iter(range(10**6))
    for _ in range(100):
        hub.faults.append(Fault(cut_after=1000, headers={"ETag": f'"{next(count)}"'}))
    with pytest.raises(NetworkError, match=r"the file on the server has changed: .* 6 tries"):
        fetch(unknown, partial, "tiny", Said())
    partial.close()


@pytest.mark.push
def test_beside_others_another_version_is_not_believed_at_once(hub: FakeHub, tmp_path: Path) -> None:
    data = b"GGUF" + DATA[4:]
    url = hub.public(data)
    unknown = Remote(RemoteFile("big.gguf", len(DATA), None), lambda: (url, {}))
    hub.bytes_per_second = 5e6
    hub.faults.append(Fault(headers={"ETag": '"other"'}, skip=1))
    partial = PartialFile(tmp_path / "unknown", len(DATA), None)
    with Connections(unknown, partial, Patience("big.gguf", FILE.size, 0)) as made:
        run(made, beyond(partial, 1000))
        made.resize(2)
        run(made)
    assert (made.other_version, made.error, hub.faults) == (False, None, [])
    partial.close()
    assert partial.path.read_bytes() == data


def test_after_a_minute_without_failures_there_may_be_more_again(
    hub: FakeHub, partial: PartialFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Connections(remote(hub), partial, Patience("big.gguf", FILE.size, 0))
    made._claims += [Claim(0, 10), Claim(10, 20)]
    assert not made.refused
    assert not made._may_retry(made._claims[0], TryAgain("busy"))
    assert made.refused
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + file_transfer._HOLD_BACK_S)
    assert not made.refused


@pytest.mark.push
def test_one_failure_does_not_keep_a_download_slow_for_good(
    hub: FakeHub, partial: PartialFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_transfer, "_HOLD_BACK_S", 0.2)
    asked: list[int] = []

    def advise(growth: Growth, *told: float) -> int:
        asked.append(id(growth))
        return 2

    monkeypatch.setattr(Growth, "advise", advise)
    hub.bytes_per_second = 2e6
    hub.faults.append(Fault(status=503, skip=1))
    fetch(remote(hub), partial, "tiny", Said())
    assert len(dict.fromkeys(asked)) == 2  # measured again
    assert len({asked.range for asked in hub.asked}) > 5


def test_an_error_of_the_disk_ends_all_of_them(
    hub: FakeHub, partial: PartialFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Growth, "advise", always(4))
    hub.bytes_per_second = 5e6

    def refuse(*_: object) -> None:
        raise DoesNotFit("disk: x: full")

    monkeypatch.setattr(PartialFile, "begin", refuse)
    with pytest.raises(DoesNotFit, match=r"^disk: x: full$"):
        fetch(remote(hub), partial, "tiny", Said())


def test_a_mistake_of_ours_is_not_swallowed(
    hub: FakeHub, partial: PartialFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(PartialFile, "begin", fail)
    with pytest.raises(ZeroDivisionError):
        fetch(remote(hub), partial, "tiny", Said())


def test_leaving_in_the_middle_ends_every_thread_at_once(
    hub: FakeHub, partial: PartialFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 60)
    hub.faults.append(Fault(stall_after=50_000, times=99))
    with Connections(remote(hub), partial, Patience("big.gguf", FILE.size, 0)) as made:
        made.resize(4)
        run(made, lambda: partial.received == 200_000)
        started = time.monotonic()
    assert time.monotonic() - started < 30  # shorter than the allowed stall
    assert not any(thread.is_alive() for thread in made._threads)
    assert partial.received == 200_000


@pytest.mark.push
def test_an_answer_that_comes_after_the_end_is_not_written(hub: FakeHub, partial: PartialFile) -> None:
    hub.latency = 0.3
    with Connections(remote(hub), partial, Patience("big.gguf", FILE.size, 0)) as made:
        pass
    for thread in made._threads:
        thread.join()
    assert partial.received == 0
    assert made.error is None


def test_what_another_program_cut_off_is_an_error_not_a_loop(hub: FakeHub, partial: PartialFile) -> None:
    partial.write(partial.begin(0), DATA)
    partial.path.write_bytes(b"")
    with pytest.raises(LlmrunError, match="another program truncated the file"):
        fetch(remote(hub), partial, "tiny", Said())


def test_a_long_reading_of_what_was_here_is_told_and_nothing_is_asked(
    hub: FakeHub, partial: PartialFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_transfer, "_TELL_FROM", 1)
    partial.write(partial.begin(0), DATA)
    said = Said()
    assert fetch(remote(hub), partial, "tiny", said) == FILE.sha256
    assert said.labels() == ["downloading tiny", "checking tiny"]
    assert hub.asked == []


@pytest.mark.push
def test_what_came_is_made_safe_from_a_power_cut_now_and_then(
    hub: FakeHub, partial: PartialFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_transfer, "SYNC_BYTES", 500_000)
    hub.bytes_per_second = 10e6
    seen: list[int] = []
    sync = PartialFile.sync

    def watched(self: PartialFile) -> None:
        seen.append(self.received)
        sync(self)

    monkeypatch.setattr(PartialFile, "sync", watched)
    fetch(remote(hub), partial, "tiny", Said())
    assert len(seen) >= 3
    assert seen[-1] == FILE.size


@pytest.mark.push
def test_where_the_line_is_limited_little_is_fetched_twice(
    hub: FakeHub, partial: PartialFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmrun.hub.remote.http_ranges.PROBE_S", 0.1)
    monkeypatch.setattr("llmrun.hub.remote.http_ranges.WORTH_S", 0.3)
    hub.total_per_second = 3e6
    fetch(remote(hub), partial, "tiny", Said())
    assert hub.sent() < 1.3 * FILE.size
