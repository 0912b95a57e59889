"""Tests of finding models of Ollama and LM Studio in place, read-only, even with hostile manifests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmrun.hub.local import other_programs
from tests.support.hub.model_stores import Stores, sha256

MODEL = b"GGUF model"


def layers(*digests: object, kind: str = "model") -> bytes:
    return json.dumps(
        {"layers": [{"mediaType": f"application/vnd.ollama.image.{kind}", "digest": digest} for digest in digests]}
    ).encode()


def test_ollamas_names(stores: Stores) -> None:
    one = stores.ollama(MODEL, "llama3.2", "1b")
    two = stores.ollama(MODEL + b"2", "registry.ollama.ai", "somebody", "tuned", "latest")
    three = stores.ollama(MODEL + b"3", "hf.co", "org", "Repo-GGUF", "Q4_K_M")
    assert other_programs.ollama_models() == {
        "llama3.2:1b": one,
        "somebody/tuned:latest": two,
        "hf.co/org/Repo-GGUF:Q4_K_M": three,
    }
    assert other_programs.find_held_model("ollama", "llama3.2:1b") == one
    assert other_programs.find_held_model("ollama", "LLAMA3.2:1B") == one
    assert other_programs.find_held_model("ollama", "somebody/tuned") == two
    assert other_programs.find_held_model("ollama", "hf.co/org/repo-gguf:q4_k_m") == three
    assert other_programs.find_held_model("ollama", "llama3.2") is None


def test_ollamas_folder_can_be_moved(stores: Stores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stores.ollama(MODEL, "at-home", "1b")
    moved = tmp_path / "elsewhere"
    there = stores.ollama(MODEL, "moved", "1b", folder=moved)
    monkeypatch.setenv("OLLAMA_MODELS", str(moved))
    assert other_programs.ollama_models() == {"moved:1b": there}


def test_a_machine_without_ollama_and_lm_studio(stores: Stores) -> None:
    assert other_programs.ollama_models() == {}
    assert other_programs.lm_studio_models() == {}
    assert other_programs.find_held_model("lmstudio", "a/b/c.gguf") is None


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b'{"layers": 7}',
        b'{"layers": [7]}',
        b'{"layers": [{}]}',
        b"[" * 100_000,
        b'{"layers": []}',
        b'{"layers": []' + b" " * (1 << 20) + b"}",
        layers("sha256:" + "0" * 64, kind="template"),
        layers("sha256:../../../../etc/passwd"),
        layers("sha256-" + "0" * 64),
        layers("sha256:" + "0" * 63),
        layers("sha256:" + "A" * 64),
        layers("sha256:" + "0" * 64 + "\n"),
        layers(7),
        layers(None),
        layers("sha256:" + sha256(MODEL), "sha256:" + sha256(MODEL)),  # two layers, so neither file is the model
        layers("sha256:" + "0" * 64),  # its blob does not exist
    ],
    ids=lambda text: str(text[:60]),
)
def test_a_manifest_that_names_no_model_is_none(stores: Stores, text: bytes) -> None:
    stores.ollama(MODEL, "good", "1b")
    stores.manifest(text, "hostile", "1b")
    assert list(other_programs.ollama_models()) == ["good:1b"]


def test_only_manifests_at_their_place_count(stores: Stores) -> None:
    stores.ollama(MODEL, "good", "1b")
    manifests = stores.root / ".ollama" / "models" / "manifests"
    good = (manifests / "registry.ollama.ai" / "library" / "good" / "1b").read_bytes()
    stores.manifest(good, "r", "o", "m", "bad name")
    stores.manifest(good, "r", "o", "m", "-hidden")
    (manifests / "r" / "file").write_bytes(good)
    (manifests / "r" / "o" / "m" / "folder").mkdir()
    (manifests / "r" / "o" / "m" / "link").symlink_to(manifests / "r" / "file")
    (manifests / "loop").symlink_to(manifests)
    assert list(other_programs.ollama_models()) == ["good:1b"]


def test_more_manifests_than_anybody_has_are_not_read(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_programs, "_MOST_MANIFESTS", 3)
    for number in range(5):
        stores.ollama(MODEL, f"m{number}", "1b")
    assert list(other_programs.ollama_models()) == ["m0:1b", "m1:1b", "m2:1b"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=50) | st.text(max_size=90).map(lambda digest: layers("sha256:" + digest)))
def test_any_manifest_leads_to_a_blob_or_nowhere(stores: Stores, text: bytes) -> None:
    stores.manifest(text, "any", "1b")
    blobs = stores.root / ".ollama" / "models" / "blobs"
    assert all(path.parent == blobs for path in other_programs.ollama_models().values())


def test_lm_studios_names_and_shards(stores: Stores) -> None:
    one = stores.lm_studio("org/model/model-Q4_K_M.gguf", MODEL)
    first = stores.lm_studio("org/big/big-00001-of-00002.gguf", MODEL)
    stores.lm_studio("org/big/big-00002-of-00002.gguf", MODEL)
    stores.lm_studio("org/broken/broken-00001-of-00002.gguf", MODEL)
    stores.lm_studio("org/broken/broken-00001-of-99999.gguf", MODEL)
    stores.lm_studio("org/model/mmproj-F16.gguf", MODEL)
    stores.lm_studio("org/model/notes.txt", MODEL)
    stores.lm_studio("loose.gguf", MODEL)
    assert other_programs.lm_studio_models() == {
        "org/big/big-00001-of-00002.gguf": first,
        "org/model/model-Q4_K_M.gguf": one,
    }
    assert other_programs.find_held_model("lmstudio", "ORG/model/model-q4_k_m.gguf") == one


def test_lm_studios_folders(stores: Stores, tmp_path: Path) -> None:
    moved, home = tmp_path / "big disk", tmp_path / "lm home"
    older = stores.lm_studio("o/m/older.gguf", MODEL, folder=stores.root / ".cache" / "lm-studio" / "models")
    in_home = stores.lm_studio("o/m/home.gguf", MODEL, folder=home / "models")
    in_moved = stores.lm_studio("o/m/moved.gguf", MODEL, folder=moved)
    (stores.root / ".lmstudio-home-pointer").write_text(f"{home}\n")
    (home / "settings.json").write_text(json.dumps({"downloadsFolder": str(moved)}))
    assert set(other_programs.lm_studio_models().values()) == {older, in_home, in_moved}


@pytest.mark.parametrize("pointer", [b"", b"\xff", b"relative/folder", b"/a\x00b", b"/a\nb", b"/" + b"x" * (1 << 20)])
@pytest.mark.parametrize(
    "settings_", [b"", b"[]", b"\xff", b'{"downloadsFolder": 7}', b'{"downloadsFolder": "x"}', b"{" * 9999]
)
def test_lm_studios_settings_may_say_anything(stores: Stores, pointer: bytes, settings_: bytes) -> None:
    one = stores.lm_studio("o/m/m.gguf", MODEL)
    (stores.root / ".lmstudio-home-pointer").write_bytes(pointer)
    (stores.root / ".lmstudio" / "settings.json").write_bytes(settings_)
    assert list(other_programs.lm_studio_models().values()) == [one]


def test_a_link_to_itself_is_no_file(stores: Stores) -> None:
    one = stores.lm_studio("o/m/m.gguf", MODEL)
    loop = one.with_name("loop.gguf")
    loop.symlink_to(loop)
    one.with_name("broken.gguf").symlink_to("nowhere")
    assert list(other_programs.lm_studio_models().values()) == [one]
