"""Tests of requests to the Hub and of its responses, with the real client and a local Hub."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmrun.base.errors import IntegrityError, ModelNotFound, NetworkError, UsageError
from llmrun.hub.names import Expected, HubSource
from llmrun.hub.remote import huggingface, network_errors
from tests.support.hub.fake_hub import FakeHub, Fault, fake_hub
from tests.support.hub.hub_client import at_hub, refuse_import, settled

FILES = {
    "README.md": b"# A model",
    "m-Q4_K_M.gguf": b"GGUF four",
    "m-Q8_0.gguf": b"GGUF eight",
    "m-Q5_K_S.gguf": b"GGUF five",
    "m-Q5_K_M.gguf": b"GGUF five and a bit",
    "big/m-F16-00001-of-00002.gguf": b"GGUF one",
    "big/m-F16-00002-of-00002.gguf": b"two",
    "mmproj-F16.gguf": b"GGUF eyes",
}
SMALL_SHA = "c" * 64


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    monkeypatch.setenv("LLMRUN_CONFIG", str(tmp_path / "config.toml"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    with fake_hub() as running:
        at_hub(monkeypatch, running.url)
        running.add("o/n", FILES)
        yield running


def pin(
    file: str | None = None, quantization: str | None = None, *expected: Expected, repository: str = "o/n"
) -> object:
    source = HubSource(repository, file, quantization)
    return huggingface.pin(source, expected, name="the name")


def test_a_file_is_pinned_by_one_question(hub: FakeHub) -> None:
    made = hub.repositories["o/n"]
    got = huggingface.pin(HubSource("o/n", "m-Q8_0.gguf"), (), name="the name")
    (file,) = got.files
    assert (got.name, got.commit, str(got.source)) == ("the name", made.commit, "hf:o/n/m-Q8_0.gguf")
    assert (file.path, file.size, file.sha256) == ("m-Q8_0.gguf", 10, made.file("m-Q8_0.gguf").sha256)
    assert [(asked.at, asked.method) for asked in settled(hub)] == [("hub", "HEAD")]


@pytest.mark.parametrize(
    ("file", "quantization", "chosen"),
    [
        (None, None, ("m-Q4_K_M.gguf",)),
        (None, "Q5_K_M", ("m-Q5_K_M.gguf",)),
        (None, "F16", ("big/m-F16-00001-of-00002.gguf", "big/m-F16-00002-of-00002.gguf")),
        ("big/m-F16-00001-of-00002.gguf", None, ("big/m-F16-00001-of-00002.gguf", "big/m-F16-00002-of-00002.gguf")),
    ],
)
def test_what_is_left_open_is_chosen_from_the_listing(
    hub: FakeHub, file: str | None, quantization: str | None, chosen: tuple[str, ...]
) -> None:
    made = hub.repositories["o/n"]
    got = huggingface.pin(HubSource("o/n", file, quantization), (), name="x")
    assert tuple(one.path for one in got.files) == chosen
    assert [one.sha256 for one in got.files] == [made.file(path).sha256 for path in chosen]
    assert [one.size for one in got.files] == [len(FILES[path]) for path in chosen]
    assert isinstance(got.source, HubSource)
    assert got.source.file == chosen[0]
    assert [(asked.at, asked.method) for asked in settled(hub)] == [("api", "GET"), ("hub", "HEAD")]


def test_a_revision_is_obeyed_whatever_main_is(hub: FakeHub) -> None:
    first = hub.repositories["o/n"].commit
    hub.add("o/n", {"m-Q4_K_M.gguf": b"GGUF newer"})
    hub.add("o/n", {"m-Q4_K_M.gguf": b"GGUF of a branch"}, branch="v1.0")
    sizes = {
        revision: huggingface.pin(HubSource("o/n", None, None, revision), (), name="x").size
        for revision in (first, "main", "v1.0")
    }
    assert sizes == {first: 9, "main": 10, "v1.0": 16}
    assert huggingface.pin(HubSource("o/n", "m-Q4_K_M.gguf", None, first), (), name="x").commit == first


def test_the_listing_has_every_model_with_size_and_sha256(hub: FakeHub) -> None:
    found = huggingface.listing(HubSource("o/n"))
    assert found.commit == hub.repositories["o/n"].commit
    assert [(model.file, model.quantization, model.size) for model in found.models] == [
        ("big/m-F16-00001-of-00002.gguf", "F16", 11),
        ("m-Q4_K_M.gguf", "Q4_K_M", 9),
        ("m-Q5_K_M.gguf", "Q5_K_M", 19),
        ("m-Q5_K_S.gguf", "Q5_K_S", 9),
        ("m-Q8_0.gguf", "Q8_0", 10),
    ]


@pytest.mark.parametrize(
    ("file", "quantization", "said", "hint"),
    [
        (None, "Q5_K", "the repository has no Q5_K", "did you mean Q5_K_S or Q5_K_M?"),
        (None, "Q2_K", "the repository has no Q2_K", "available: Q4_K_M, Q5_K_S, Q8_0, F16, Q5_K_M"),
        (
            "m-Q4_K.gguf",
            None,
            "no such file (HTTP 404)",
            "did you mean m-Q4_K_M.gguf or m-Q5_K_S.gguf or m-Q5_K_M.gguf?",
        ),
        (
            "big/m-F16-00001-of-00003.gguf",
            None,
            "no such file: big/m-F16-00001-of-00003.gguf",
            "did you mean big/m-F16-00001-of-00002.gguf?",
        ),
        (
            "m-00002-of-00003.gguf",
            None,
            "name the first shard instead",
            "name the first shard (-00001-of-) or only the quantization",
        ),
    ],
)
def test_a_file_that_is_not_there_is_answered_with_what_is(
    hub: FakeHub, file: str | None, quantization: str | None, said: str, hint: str
) -> None:
    with pytest.raises(ModelNotFound) as caught:
        pin(file, quantization)
    assert said in str(caught.value)
    assert caught.value.hint == hint


def test_a_model_that_misses_a_shard_is_told(hub: FakeHub) -> None:
    hub.add("o/n", {"m-Q8_0-00001-of-00002.gguf": b"GGUF", "m-Q4_0.gguf": b"GGUF"})
    with pytest.raises(ModelNotFound, match=r"'m-Q8_0.gguf': some of its shards are missing"):
        pin("m-Q8_0-00001-of-00002.gguf")
    hub.add("o/n", {"m-Q8_0-00001-of-00002.gguf": b"GGUF"})
    with pytest.raises(ModelNotFound, match="no GGUF model") as caught:
        pin()
    assert "some of its shards are missing" in caught.value.hint


def test_a_file_that_is_not_there_is_still_said_when_the_listing_fails(hub: FakeHub) -> None:
    hub.faults.append(Fault(on="api", status=500, times=9))
    with pytest.raises(ModelNotFound, match=r"no such file \(HTTP 404\)") as caught:
        pin("x.gguf")
    assert "/o/n" in caught.value.hint


@pytest.mark.parametrize("file", ["m-Q4_K_M.gguf", None])
def test_a_repository_that_is_not_there_is_told_with_the_nearest_known_one(hub: FakeHub, file: str | None) -> None:
    with pytest.raises(ModelNotFound, match="no such repository") as caught:
        pin(file, repository="HuggingFaceTB/SmolLM2-360M-Instruct-GUF")
    assert "did you mean hf:" in caught.value.hint
    with pytest.raises(ModelNotFound, match="no such repository") as caught:
        pin(file, repository="zzzzzzzz/xxxxxxxxxxxxx")
    assert "did you mean" not in caught.value.hint
    assert caught.value.hint


@pytest.mark.parametrize("file", ["m-Q4_K_M.gguf", None])
def test_a_revision_that_is_not_there_is_told(hub: FakeHub, file: str | None) -> None:
    with pytest.raises(ModelNotFound, match=r"no such revision \(HTTP 404\)") as caught:
        huggingface.pin(HubSource("o/n", file, None, "v9"), (), name="x")
    assert caught.value.hint == f"see the branches and tags at {hub.url}/o/n"


@pytest.mark.parametrize("file", ["m-Q4_K_M.gguf", None])
def test_a_gated_repository_says_where_its_licence_is(hub: FakeHub, file: str | None) -> None:
    hub.add("o/gated", FILES, gated=True)
    with pytest.raises(NetworkError, match="the repository is gated") as caught:
        pin(file, repository="o/gated")
    assert f"{hub.url}/o/gated" in caught.value.hint
    assert "hf auth login" in caught.value.hint
    assert "HF_TOKEN" in caught.value.hint


@pytest.mark.parametrize("file", ["m-Q4_K_M.gguf", None])
def test_a_private_repository_needs_its_token(hub: FakeHub, file: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("o/private", FILES, token="hf_right")
    with pytest.raises(ModelNotFound, match=r"no such repository, or a private one \(HTTP 401\)") as caught:
        pin(file, repository="o/private")
    assert "HF_TOKEN" in caught.value.hint
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(NetworkError, match=r"the token was rejected \(HTTP 401\)") as refused:
        pin(file, repository="o/private")
    assert "hf_wrong" not in str(refused.value) + refused.value.hint
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert pin(file, repository="o/private")


@pytest.mark.parametrize("file", ["m-Q4_K_M.gguf", None])
def test_a_repository_that_was_renamed_is_followed(hub: FakeHub, file: str | None) -> None:
    hub.moved["old/name"] = "o/n"
    got = huggingface.pin(HubSource("old/name", file), (), name="x")
    assert got.commit == hub.repositories["o/n"].commit


@pytest.mark.parametrize(
    ("status", "said", "hint"),
    [
        (403, "access denied (HTTP 403)", "HF_TOKEN"),
        (429, "too many requests (HTTP 429)", "try again later"),
        (500, "refused (HTTP 500)", ""),
        (503, "refused (HTTP 503)", ""),
    ],
)
@pytest.mark.parametrize(("at", "file"), [("hub", "m-Q4_K_M.gguf"), ("api", None)])
def test_a_refusal_is_one_line(hub: FakeHub, status: int, said: str, hint: str, at: str, file: str | None) -> None:
    hub.faults.append(Fault(on=at, status=status, times=9))  # type: ignore[arg-type]
    with pytest.raises(NetworkError) as caught:
        pin(file)
    assert str(caught.value) == said
    assert hint in caught.value.hint


@pytest.mark.parametrize(("at", "file"), [("hub", "m-Q4_K_M.gguf"), ("api", None)])
def test_a_repository_that_the_hub_denies_to_a_known_user_is_not_there(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, at: str, file: str | None
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_mine")
    hub.faults.append(Fault(on=at, status=404, headers={"X-Error-Code": "RepoNotFound"}))  # type: ignore[arg-type]
    with pytest.raises(ModelNotFound, match=r"no such repository \(HTTP 404\)") as caught:
        pin(file)
    assert "owner/name" in caught.value.hint


@pytest.mark.parametrize(("at", "file"), [("hub", "m-Q4_K_M.gguf"), ("api", None)])
def test_a_hub_that_hangs_up_is_one_line(hub: FakeHub, at: str, file: str | None) -> None:
    def hang_up() -> None:
        raise ConnectionResetError

    hub.faults.append(Fault(on=at, first=hang_up, times=9))  # type: ignore[arg-type]
    with pytest.raises(NetworkError, match="disconnected") as caught:
        pin(file)
    assert str(caught.value).isprintable()


def test_another_file_than_the_catalogue_knows_is_refused(hub: FakeHub) -> None:
    sha256 = hub.repositories["o/n"].file("m-Q8_0.gguf").sha256
    assert pin("m-Q8_0.gguf", None, Expected("m-Q8_0.gguf", 10, sha256))
    assert pin("m-Q8_0.gguf", None, Expected("m-Q8_0.gguf"))
    for known in (Expected("m-Q8_0.gguf", 11, sha256), Expected("m-Q8_0.gguf", 10, SMALL_SHA)):
        with pytest.raises(IntegrityError, match="the file on the Hub has changed") as caught:
            pin("m-Q8_0.gguf", None, known)
        assert sha256 in str(caught.value)
    with pytest.raises(IntegrityError, match="1 files, expected 2"):
        pin("m-Q8_0.gguf", None, Expected("a"), Expected("b"))


def test_every_shard_is_held_against_what_the_catalogue_knows(hub: FakeHub) -> None:
    made = hub.repositories["o/n"]
    names = ("big/m-F16-00001-of-00002.gguf", "big/m-F16-00002-of-00002.gguf")
    known = [Expected(name, len(FILES[name]), made.file(name).sha256) for name in names]
    assert pin(names[0], None, *known)
    with pytest.raises(IntegrityError, match="the file on the Hub has changed"):
        pin(names[0], None, known[0], Expected("x", 3, SMALL_SHA))


@pytest.mark.parametrize(
    "headers",
    [
        {"X-Repo-Commit": ""},
        {"X-Repo-Commit": "../../../../outside"},
        {"X-Repo-Commit": "A" * 40},
        {"X-Linked-Etag": "../../x"},
        {"X-Linked-Etag": ""},
        {"X-Linked-Size": "0"},
        {"X-Linked-Size": "-5"},
        {"X-Linked-Size": "9" * 40},
        {"X-Linked-Size": "many"},
        {"X-Linked-Size": ""},
    ],
)
def test_an_answer_that_is_not_a_hubs_is_one_line(hub: FakeHub, headers: dict[str, str]) -> None:
    hub.faults.append(Fault(on="hub", headers=headers))
    with pytest.raises(NetworkError) as caught:
        pin("m-Q8_0.gguf")
    assert str(caught.value).isprintable()
    assert "does not come from a Hugging Face Hub" in str(caught.value) or "reports no size or no sha256" in str(
        caught.value
    )


def test_a_size_that_is_not_told_is_the_catalogues(hub: FakeHub) -> None:
    hub.faults.append(Fault(on="hub", headers={"X-Linked-Size": ""}))
    assert huggingface.pin(HubSource("o/n", "m-Q8_0.gguf"), (Expected("x", 10),), name="x").size == 10


def test_a_hub_that_contradicts_its_own_listing_is_not_believed(hub: FakeHub) -> None:
    hub.faults.append(Fault(on="hub", headers={"X-Linked-Etag": f'"{SMALL_SHA}"'}))
    with pytest.raises(NetworkError, match="responses are inconsistent"):
        pin()


def _siblings(*files: object) -> bytes:
    return json.dumps({"id": "o/n", "sha": "0" * 40, "siblings": files}).encode()


def _file(name: object, size: object = 5, sha256: object = SMALL_SHA) -> dict[str, object]:
    return {"rfilename": name, "size": size, "lfs": {"sha256": sha256, "size": size, "pointerSize": 1}}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>Welcome to the hotel's wireless network</html>",
        b"[]",
        b"null",
        b"5",
        b"{}",
        b'{"id": "o/n"}',
        b'{"id": "o/n", "sha": "x", "siblings": []}',
        b'{"id": "o/n", "sha": 5}',
        b'{"id": "o/n", "sha": "' + b"0" * 40 + b'", "siblings": 7}',
        b'{"id": "o/n", "sha": "' + b"0" * 40 + b'", "siblings": [7]}',
        b'{"id": "o/n", "sha": "' + b"0" * 40 + b'", "siblings": [{"rfilename": "a.gguf", "lfs": {"no": 1}}]}',
        b'{"id": "o/n", "lastModified": "yesterday", "sha": "' + b"0" * 40 + b'"}',
        b"[" * 100_000,
        b"\xff\xfe{",
    ],
)
def test_a_listing_that_is_not_a_hubs_is_one_line(hub: FakeHub, body: bytes) -> None:
    hub.faults.append(Fault(on="api", alter=lambda _: body, headers={"Content-Length": str(len(body))}))
    with pytest.raises(NetworkError) as caught:
        huggingface.listing(HubSource("o/n"))
    assert str(caught.value) == network_errors.NOT_A_HUB
    assert "HF_ENDPOINT" in caught.value.hint


@pytest.mark.parametrize(
    ("file", "said"),
    [
        (_file("../../.bashrc.gguf"), "unsafe file name"),
        (_file("a" * 300 + ".gguf"), "unsafe file name"),
        (_file("x\x1b[2J\r\n.gguf"), "unsafe file name"),
        (_file("a.gguf", 2**62), "invalid size: more than"),
        (_file("a.gguf", -1), "invalid size: -1 bytes"),
        (_file("a.gguf", "5"), "invalid size: '5' bytes"),
        (_file("a.gguf", 5, "../../x"), "reports no sha256"),
        ({"rfilename": "a.gguf", "size": 5}, "reports no sha256"),
        (_file(7), "look for a repository whose name ends in -GGUF"),
    ],
)
def test_a_hostile_listing_offers_nothing_and_says_why(hub: FakeHub, file: dict[str, object], said: str) -> None:
    body = _siblings(file)
    hub.faults.append(Fault(on="api", alter=lambda _: body, headers={"Content-Length": str(len(body))}))
    with pytest.raises(ModelNotFound, match="the repository has no GGUF model") as caught:
        pin()
    assert said in caught.value.hint
    assert caught.value.hint.isprintable()


@pytest.mark.push
@pytest.mark.parametrize(("at", "file"), [("hub", "m-Q4_K_M.gguf"), ("api", None)])
def test_a_hub_that_does_not_answer_is_given_up(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, at: str, file: str | None
) -> None:
    monkeypatch.setattr(network_errors, "ANSWER_SECONDS", 0.2)
    hub.faults.append(Fault(on=at, first=lambda: hub.release.wait(20)))  # type: ignore[arg-type]
    with pytest.raises(NetworkError, match=r"timed out|no answer within 0\.[24] s"):
        pin(file)


def test_what_holds_a_question_up_for_ever_is_given_up() -> None:
    with pytest.raises(NetworkError, match=r"no answer within 0\.05 s"):
        network_errors.answer_within(0.05, lambda: threading.Event().wait(20))


def test_the_users_own_interruption_is_not_swallowed() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        network_errors.answer_within(5, interrupted)


@pytest.mark.parametrize(("at", "file"), [("hub", "m-Q4_K_M.gguf"), ("api", None)])
def test_a_token_that_is_no_text_for_a_header_is_one_line(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, at: str, file: str | None
) -> None:
    del at
    monkeypatch.setenv("HF_TOKEN", "é")
    with pytest.raises(NetworkError, match="network settings: 'ascii' codec can't encode") as caught:
        pin(file)
    assert "HF_TOKEN" in caught.value.hint


def test_a_repository_that_cannot_be_is_a_usage_error(hub: FakeHub) -> None:
    with pytest.raises(UsageError, match="repository: Cannot have --"):
        pin(repository="a--b/c")


def test_a_port_where_nobody_listens_is_unreachable(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    at_hub(monkeypatch, "http://127.0.0.1:9")
    for file in ("m-Q4_K_M.gguf", None):
        with pytest.raises(NetworkError, match=r"unreachable \("):
            pin(file)


@pytest.mark.parametrize("token", [None, "hf_secret"])
def test_a_request_goes_to_the_hub_with_the_token(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, token: str | None
) -> None:
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    url, headers = huggingface.request("o/n", "0" * 40, "big/m F16.gguf")
    assert url == f"{hub.url}/o/n/resolve/{'0' * 40}/big/m%20F16.gguf"
    assert headers.get("authorization") == (token and f"Bearer {token}")
    assert headers["accept-encoding"] == "identity"


@pytest.mark.parametrize(
    ("words", "told"),
    [("", ""), ("one\ntwo", "one"), ("[Errno -3] no \x1b[31mname", "no [31mname"), ("x" * 500, "x" * 160)],
)
def test_foreign_words_are_one_short_line(words: str, told: str) -> None:
    assert network_errors.plain(words) == told


def test_an_endpoint_that_huggingface_hub_cannot_take_apart_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_import(monkeypatch, "huggingface_hub.hf_api")
    with pytest.raises(NetworkError, match="network settings: bad endpoint"):
        huggingface.listing(HubSource("o/n"))
