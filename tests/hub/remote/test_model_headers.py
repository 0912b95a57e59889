"""Tests of reading headers of remote models, from a Hub and from any web server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from llmrun.base.errors import BadGGUF, LlmrunError, ModelNotFound, NetworkError, UnsupportedModel
from llmrun.formats.gguf.reader import GGUFFile, open_gguf
from llmrun.hub.names import Artifact, HubSource, PypiSource, RemoteFile, UrlSource
from llmrun.hub.remote import http_ranges, huggingface, model_headers
from llmrun.hub.remote.http_ranges import RangeResponse, TryAgain
from llmrun.hub.remote.model_headers import read_header, read_headers
from tests.support.gguf.gguf_files import tiny_llama
from tests.support.gguf.gguf_memory import read_gguf
from tests.support.gguf.gguf_shards import split_by_gguf_py
from tests.support.hub.fake_hub import FakeHub, Fault, fake_hub
from tests.support.hub.hub_client import at_hub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setattr(http_ranges, "FIRST_WAIT_S", 0.001)
    with fake_hub() as running:
        at_hub(monkeypatch, running.url)
        yield running


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("models")
    return {
        f"m-{weight_type}.gguf": tiny_llama(folder / weight_type, weight_type=weight_type, layers=2).read_bytes()
        for weight_type in ("Q8_0", "Q4_0")
    }


def pinned(file: str) -> Artifact:
    return huggingface.pin(HubSource("o/n", file), (), name="m")


def assert_same_tensors(file: GGUFFile, data: bytes) -> None:
    whole = read_gguf(data, Path("whole.gguf"))
    assert (file.tensors, file.file_bytes) == (whole.tensors, whole.file_bytes)


def sent(hub: FakeHub) -> int:
    return sum(asked.sent for asked in hub.asked if asked.at == "storage")


def test_a_header_comes_from_the_hub_by_its_range(hub: FakeHub, models: dict[str, bytes]) -> None:
    hub.add("o/n", models)
    assert_same_tensors(read_header(pinned("m-Q8_0.gguf")), models["m-Q8_0.gguf"])
    assert all(asked.range for asked in hub.asked if asked.at == "storage")


def test_a_sibling_is_read_beside_one_that_is_known(hub: FakeHub, models: dict[str, bytes]) -> None:
    hub.add("o/n", models)
    known = read_header(pinned("m-Q8_0.gguf"))
    assert_same_tensors(read_header(pinned("m-Q4_0.gguf"), known), models["m-Q4_0.gguf"])


def test_a_model_in_shards_is_read_from_all_of_them(hub: FakeHub, tmp_path: Path) -> None:
    whole = tiny_llama(tmp_path / "whole.gguf", layers=2)
    first = split_by_gguf_py(whole, tmp_path, tensors_each=4)
    hub.add("o/n", {path.name: path.read_bytes() for path in sorted(tmp_path.glob("split-*.gguf"))})
    file, local = read_header(pinned(first.name)), open_gguf(first)
    assert (file.tensors, file.file_bytes) == (local.tensors, local.file_bytes)


def test_a_shard_that_the_listing_lacks_is_named(hub: FakeHub, tmp_path: Path) -> None:
    whole = tiny_llama(tmp_path / "whole.gguf", layers=2)
    first = split_by_gguf_py(whole, tmp_path, tensors_each=4)
    hub.add("o/n", {path.name: path.read_bytes() for path in sorted(tmp_path.glob("split-*.gguf"))})
    artifact = pinned(first.name)
    with pytest.raises(ModelNotFound, match="split-00002-of"):
        read_header(replace(artifact, files=artifact.files[:1]))


@pytest.mark.parametrize("fault", [Fault(cut_after=10), Fault(status=503), Fault(ignore_range=True)])
def test_what_passes_is_waited_for(hub: FakeHub, models: dict[str, bytes], fault: Fault) -> None:
    hub.add("o/n", models)
    hub.faults.append(fault)
    assert_same_tensors(read_header(pinned("m-Q8_0.gguf")), models["m-Q8_0.gguf"])


def test_a_server_that_never_recovers_is_given_up(hub: FakeHub, models: dict[str, bytes]) -> None:
    hub.add("o/n", models)
    artifact = pinned("m-Q8_0.gguf")
    hub.faults.append(Fault(status=503, times=100))
    with pytest.raises(NetworkError, match="HTTP 503"):
        read_header(artifact)


def test_a_server_that_gives_no_parts_is_not_read_from_front_to_end(
    hub: FakeHub, models: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_headers, "_MOST_SKIPPED", 5)
    hub.add("o/n", models)
    artifact = pinned("m-Q8_0.gguf")
    hub.faults.append(Fault(ignore_range=True, times=100))
    source = model_headers._ranges(artifact, artifact.files[0])
    with pytest.raises(NetworkError, match="does not support range requests"):
        source.fetch(6, 12)


def test_bytes_that_are_no_model_are_a_broken_file(hub: FakeHub) -> None:
    hub.add("o/n", {"m.gguf": b"<html>" + bytes(1000)})
    with pytest.raises(BadGGUF):
        read_header(pinned("m.gguf"))


def test_an_address_of_any_server_will_do(hub: FakeHub, models: dict[str, bytes]) -> None:
    made = hub.add("o/n", models)
    source = UrlSource(f"{hub.url}/o/n/resolve/{made.commit}/m-Q8_0.gguf")
    assert_same_tensors(read_header(http_ranges.pin(source, (), name="m")), models["m-Q8_0.gguf"])


def test_a_wheel_cannot_be_looked_into() -> None:
    artifact = Artifact("m", PypiSource("p", "1", 5), (RemoteFile("m.gguf", 5, "0" * 64),))
    with pytest.raises(UnsupportedModel, match="wheel"):
        read_header(artifact)


def test_a_file_that_is_gone_is_one_of_our_errors(hub: FakeHub, models: dict[str, bytes]) -> None:
    hub.add("o/n", models)
    artifact = replace(pinned("m-Q8_0.gguf"), commit="0" * 40)
    with pytest.raises(LlmrunError):
        read_header(artifact)


class Told:
    def __init__(self) -> None:
        self.done: list[tuple[int, int]] = []

    def note(self, line: str) -> None:
        raise AssertionError(line)

    def progress(self, label: str, done: int, total: int) -> None:
        self.done.append((done, total))


def test_several_headers_are_read_in_their_order_and_what_fails_is_an_error(
    hub: FakeHub, models: dict[str, bytes]
) -> None:
    files = {"m-Q5_0.gguf": b"GGUF" + bytes(500), **models, "m-Q6_K.gguf": b"GGUF" + bytes(400)}
    hub.add("o/n", files)
    told = Told()
    first, second, third, fourth = read_headers([pinned(name) for name in files], told)
    assert isinstance(first, BadGGUF)
    assert isinstance(second, GGUFFile)
    assert isinstance(third, GGUFFile)
    assert_same_tensors(third, models["m-Q4_0.gguf"])
    assert isinstance(fourth, BadGGUF)
    assert told.done[-1] == (4, 4)


def test_headers_none_of_which_can_be_read_are_as_many_errors(hub: FakeHub) -> None:
    hub.add("o/n", {"a.gguf": b"GGUF" + bytes(500), "b.gguf": b"GGUF" + bytes(400)})
    found = read_headers([pinned("a.gguf"), pinned("b.gguf")], Told())
    assert all(isinstance(one, BadGGUF) for one in found)


def test_an_answer_that_ends_too_early_is_asked_for_again(hub: FakeHub, models: dict[str, bytes]) -> None:
    hub.add("o/n", models)
    artifact = pinned("m-Q8_0.gguf")
    hub.faults.append(Fault(ignore_range=True, cut_after=1))
    assert_same_tensors(read_header(artifact), models["m-Q8_0.gguf"])


def test_an_answer_of_fewer_bytes_may_be_tried_again() -> None:
    with pytest.raises(TryAgain, match="the connection closed after 3 of 5 bytes"):
        model_headers._bytes_of(RangeResponse(False, "", iter([b"abc"]), None), 0, 5)
