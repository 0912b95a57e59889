"""Tests of list, show, rm, verify and prune as users type them."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from llmrun.cli.console.terminal import width
from llmrun.hub.local.model_records import mark_used
from tests.support.cli.commands import LLMRUN, ROOT, llmrun, run, screen_of
from tests.support.gguf.gguf_bytes import F32, STRING, U32, RawGGUF, RawTensor, bpe_vocabulary, numbers, scalar, string
from tests.support.hub.model_stores import Stores, commit, gguf, sha256
from tests.support.models.downloads import smollm2

pytestmark = pytest.mark.push

ONE, TWO = gguf(salt=1), gguf(salt=2)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test a cache without kernels, so that `prune` does not remove the kernels of other tests."""
    monkeypatch.setenv("LLMRUN_CACHE_DIR", str(tmp_path / "cache"))


def told(*arguments: str, code: int = 0) -> dict[str, object]:
    out, _ = run(*arguments, "--json", code=code)
    body: dict[str, object] = json.loads(out)
    return body


# --- list -------------------------------------------------------------------------------------------------------------


def test_a_machine_without_models_is_told_how_to_get_one(stores: Stores) -> None:
    out, err = run("list")
    assert "llmrun pull NAME" in out
    assert err == ""
    assert told("list") == {"models": [], "presets": [], "incomplete": [], "broken": [], "total_bytes": 0}


def test_the_list(stores: Stores) -> None:
    (link, _) = stores.shared("org/name", {"m-Q4_K_M.gguf": ONE, "same-Q8_0.gguf": ONE})
    stores.shared("org/hurt", {"h-Q8_0.gguf": b"GGUF"})
    stores.ollama(TWO, "llama3.2", "1b")
    mark_used(link)
    out, err = run("list")
    assert [line.split() for line in out.splitlines()] == [
        ["NAME", "SIZE", "QUANT", "ARCHITECTURE", "CONTEXT", "LAST", "USED"],
        ["hf:org/hurt:Q8_0", "4", "B", "Q8_0", "damaged", "never"],
        ["hf:org/name:Q4_K_M", str(len(ONE)), "B", "Q4_K_M", "llama", "8k", "just", "now"],
        ["hf:org/name:Q8_0", str(len(ONE)), "B", "Q8_0", "llama", "8k", "just", "now"],
        ["ollama:llama3.2:1b", str(len(TWO)), "B", "F32", "llama", "8k", "never"],
        ["4", "models,", str(len(ONE) + len(TWO) + 4), "B"],
    ]
    assert err == ""
    body = told("list")
    assert body["total_bytes"] == len(ONE) + len(TWO) + 4
    models = body["models"]
    assert isinstance(models, list)
    assert models[1] == {
        "name": "hf:org/name:Q4_K_M",
        "holder": "hub",
        "files": [str(link)],
        "bytes": len(ONE),
        "quantization": "Q4_K_M",
        "architecture": "llama",
        "context": 8192,
        "projectors": [],
        "repository": "org/name",
        "commit": commit(1),
        "superseded": False,
        "fetched": 0.0,
        "used": models[1]["used"],
        "problem": "",
    }
    assert "not a valid GGUF file" in models[0]["problem"]
    assert (models[3]["holder"], models[3]["commit"]) == ("ollama", "")


def test_list_and_show_name_the_same_quantization(stores: Stores) -> None:
    stores.shared("org/mix", {"m-UD-Q4_K_XL.gguf": gguf(file_type=15)})
    stores.ollama(gguf(file_type=15, salt=1), "m", "1b")
    models = told("list")["models"]
    assert isinstance(models, list)
    listed = {model["name"]: model["quantization"] for model in models}
    assert listed == {"hf:org/mix:UD-Q4_K_XL": "UD-Q4_K_XL", "ollama:m:1b": "Q4_K_M"}
    for name, quantization in listed.items():
        assert told("show", name)["quantization"] == quantization
        assert f"  quantization  {quantization}\n" in run("show", name)[0]


def test_replaced_revisions_and_begun_downloads_are_told(stores: Stores) -> None:
    stores.shared("org/name", {"m-Q4_0.gguf": ONE}, number=1)
    stores.shared("org/name", {"m-Q4_0.gguf": TWO}, number=2)
    partial = stores.repository("org/name") / "blobs" / ("b" * 64 + ".llmrun.incomplete")
    partial.write_bytes(bytes(300))
    partial.with_name(partial.name + ".journal").write_bytes(b'{"size": 2500}\n' + b"%020d %020d %020d\n" % (0, 300, 0))
    other = stores.repository("org/name") / "blobs" / ("c" * 64 + ".llmrun.incomplete")
    other.write_bytes(bytes(300))
    out, err = run("list")
    assert "hf:org/name: 12% of 2.50 kB downloaded; pull the model again to resume" in out
    assert "hf:org/name: 0 B downloaded;" in out
    assert err == "note: 1 model has a newer revision; `llmrun prune` removes the old files\n"
    assert told("list")["incomplete"] == [
        {"name": "hf:org/name", "bytes": 300, "total_bytes": 2500},
        {"name": "hf:org/name", "bytes": 0, "total_bytes": 0},
    ]
    assert run("list", "-q")[1] == ""


def test_a_narrow_terminal_gets_fewer_columns_and_a_pipe_all(stores: Stores) -> None:
    stores.shared("org/name", {"m-Q4_K_M.gguf": ONE})
    heads = [screen_of("list", columns=columns, NO_COLOR="1")[0].split("\n")[0].split() for columns in (80, 60, 45)]
    assert heads == [
        ["NAME", "SIZE", "QUANT", "ARCHITECTURE", "CONTEXT", "LAST", "USED"],
        ["NAME", "SIZE", "QUANT", "ARCHITECTURE", "LAST", "USED"],
        ["NAME", "SIZE", "ARCHITECTURE"],
    ]
    assert "CONTEXT" in run("list")[0]


def test_hostile_names_are_shown_and_obeyed_by_no_terminal(stores: Stores) -> None:
    hostile = "\x1b]0;pwned\x07\u202e"
    stores.shared("org/name", {f"{hostile}-Q4_0.gguf": gguf(name=hostile, architecture=hostile), "\x9b31m.gguf": ONE})
    for out in (*run("list"), *run("show", "hf:org/name:Q4_0"), screen_of("list", NO_COLOR="1")[0]):
        assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(out)
    assert "\x1b" not in run("show", "hf:org/name:Q4_0", "--metadata")[0]


def test_the_head_of_the_list_is_dim_on_a_terminal_that_can(stores: Stores) -> None:
    stores.shared("org/name", {"m-Q4_0.gguf": ONE})
    assert screen_of("list")[0].startswith("\x1b[2mNAME")
    assert screen_of("list", NO_COLOR="1")[0].startswith("NAME")


@pytest.mark.parametrize("arguments", ["list", "rm nothing", "prune", "list --json"])
def test_nothing_heavy_is_imported(stores: Stores, arguments: str) -> None:
    stores.shared("org/name", {"m-Q4_0.gguf": ONE})
    program = (
        "import sys; from llmrun.cli.app import main\n"
        f"main({arguments.split()!r})\n"
        "print('heavy:', *[n for n in ('numpy', 'huggingface_hub', 'httpx2', 'rich', 'numba') if n in sys.modules])"
    )
    done = subprocess.run([LLMRUN[0], "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "heavy:"


# --- show -------------------------------------------------------------------------------------------------------------


def test_a_real_model_is_shown(stores: Stores) -> None:
    out, err = run("show", str(smollm2()))
    assert err == ""
    lines = [line.split(None, 1) for line in out.splitlines() if line.startswith("  ")]
    facts = {line[0]: line[1] for line in lines if len(line) > 1}
    assert facts["architecture"] == "llama"
    assert facts["parameters"] == "134,515,008"
    assert facts["context"] == "8,192 tokens"
    assert facts["licence"] == "apache-2.0"
    assert facts["kind"] == "gpt2 smollm"
    assert facts["tokens"] == "49,152"
    assert facts["Q4_1"].split() == ["210", "66.4", "MB"]
    template, _ = run("show", str(smollm2()), "--template")
    assert facts["sha256"] == hashlib.sha256(template.removesuffix("\n").encode()).hexdigest()
    assert template.startswith("{% for message in messages %}")


def everything_model(description: str = "long " * 100) -> bytes:
    keys: dict[str | bytes, bytes] = {
        "general.architecture": string("llama"),
        "general.name": string("title"),
        "general.license.link": string("https://example.com"),
        "general.description": string(description),
        "llama.block_count": scalar(U32, 2),
        "general.sampling.temp": scalar(F32, 0.5),
        "general.sampling.top_k": scalar(U32, 7),
        "general.nan": scalar(F32, float("nan")),
        "general.yes": scalar(7, 1),
        "general.numbers": numbers(F32, [1, 2, 3, 4, 5, 6]),
        "tokenizer.chat_template": string("{{ messages }}\x1b"),
        "tokenizer.chat_template.tool_use": string("tools"),
        **bpe_vocabulary(),
    }
    return RawGGUF(keys, [RawTensor("output.weight", 0, (8, 4), 128)]).build()


def test_every_section(stores: Stores) -> None:
    stores.shared("org/name", {"m-F32.gguf": everything_model()})
    out, _ = run("show", "hf:org/name:F32")
    assert "temperature  0.5" in out
    assert "top_k        7" in out
    assert "tool_use" in out
    assert "2 layers" in out
    (described,) = [line for line in out.splitlines() if line.startswith("  description")]
    assert described.split()[1:] == [*["long"] * 40, "…"]  # a pipe has no width, so each fact takes one line
    body = told("show", "hf:org/name:F32")
    assert body["sampling"] == {"temperature": 0.5, "top_k": 7}
    assert body["tensor_types"] == {"F32": {"tensors": 1, "bytes": 128}}
    metadata = body["metadata"]
    assert isinstance(metadata, dict)
    assert metadata["general.nan"] == "nan"
    assert metadata["tokenizer.ggml.tokens"] == {"type": "arr[str]", "length": 14}
    assert told("show", "hf:org/name:F32", "--metadata") == {"metadata": metadata}
    listed = told("show", "hf:org/name:F32", "--tensors")["tensors"]
    assert isinstance(listed, list)
    assert [(each["name"], each["shape"], each["bytes"]) for each in listed] == [("output.weight", [8, 4], 128)]
    assert "output.weight  F32  8 x 4  128" in run("show", "hf:org/name:F32", "--tensors")[0]
    keys, _ = run("show", "hf:org/name:F32", "--metadata")
    assert "general.numbers" in keys
    assert "6: 1.0, 2.0, 3.0, 4.0, 5.0, …" in keys
    assert "general.yes" in keys
    assert str(STRING) not in keys.splitlines()[0]


def test_a_template_is_raw_in_a_pipe_and_visible_on_a_terminal(stores: Stores) -> None:
    stores.shared("org/name", {"m-F32.gguf": everything_model(), "n-F16.gguf": ONE})
    assert run("show", "hf:org/name:F32", "--template")[0] == "{{ messages }}\x1b\n"
    assert screen_of("show", "hf:org/name:F32", "--template")[0] == "{{ messages }}␛\n"
    assert "contains no chat template" in run("show", "hf:org/name:F16", "--template", code=4)[1]


def test_what_cannot_be_shown(stores: Stores) -> None:
    assert "cannot be combined with" in run("show", "x", "--template", "--tensors", code=2)[1]
    run("show", str(stores.root / "none.gguf"), code=4)
    empty = RawGGUF({"general.architecture": string("llama")}).build()
    stores.shared("org/name", {"m-F32.gguf": empty})
    assert run("show", "hf:org/name:F32", "--tensors")[0] == ""
    assert "none in the file" in run("show", "hf:org/name:F32")[0]


def test_the_catalogues_word_is_shown(stores: Stores) -> None:
    (stores.root / "models.toml").write_text(
        '[models."tiny:1b"]\ndescription = "a tiny one"\nlicense = "MIT"\nrepository = "org/tiny"\ndefault = "Q4_0"\n'
        'sampling = {temperature = 0.25}\n[models."tiny:1b".quants.Q4_0]\nfile = "tiny-Q4_0.gguf"\n'
    )
    stores.shared("org/tiny", {"tiny-Q4_0.gguf": ONE})
    out, _ = run("show", "tiny:1b")
    assert "a tiny one (MIT)" in out
    assert "temperature  0.25" in out
    assert told("show", "tiny:1b")["catalogue"] == {"name": "tiny:1b", "description": "a tiny one", "license": "MIT"}


@pytest.mark.parametrize("word", ["long", "模型", "模型" * 30, "x" * 50])
def test_what_is_too_long_for_the_terminal_goes_on_beneath_itself(stores: Stores, word: str) -> None:
    stores.shared("org/name", {"m-F32.gguf": everything_model(f"{word} " * 100)})
    written, _ = screen_of("show", "hf:org/name:F32", columns=40, NO_COLOR="1")
    page = written.splitlines()
    assert max(width(line) for line in page if not line.startswith(("  path", "  sha256"))) <= 40
    begin = next(number for number, line in enumerate(page) if line.startswith("  description"))
    end = next(number for number in range(begin + 1, len(page)) if not page[number].startswith(" " * 12))
    shown = "".join("".join(page[begin:end]).split()).removeprefix("description").removesuffix("…")
    assert len(shown) > 100
    assert (word * 100).startswith(shown)


# --- rm ---------------------------------------------------------------------------------------------------------------


def test_several_are_removed_and_one_that_is_not_there_stops_no_other(stores: Stores) -> None:
    stores.shared("org/a", {"m-Q4_0.gguf": ONE})
    stores.shared("org/b", {"m-Q4_0.gguf": TWO})
    before = stores.everything()
    out, _ = run("rm", "--dry-run", "hf:org/a:Q4_0")
    assert out == f"hf:org/a:Q4_0: would be removed, freeing {len(ONE)} B\n"
    assert {path: digest for path, digest in stores.everything().items() if "/pyc" not in path} == before
    out, err = run("rm", "hf:org/a:Q4_0", "hf:org/none", "hf:org/b:Q4_0", code=4)
    assert out == "".join(f"hf:org/{name}:Q4_0: removed, freeing {len(ONE)} B\n" for name in "ab")
    assert "hf:org/none" in err
    assert told("list")["models"] == []


def test_removing_as_json_and_a_link_out_of_the_store(stores: Stores, tmp_path: Path) -> None:
    (link,) = stores.shared("org/a", {"m-Q4_0.gguf": ONE})
    mine = tmp_path / "mine"
    mine.write_bytes(ONE)
    link.unlink()
    link.symlink_to(mine)
    out, err = run("rm", "--json", "hf:org/a:Q4_0", "hf:org/none", code=4)
    body = json.loads(out)
    assert body["models"][0] == {"name": "hf:org/a:Q4_0", "freed_bytes": 0, "files": [str(link)]}
    assert body["models"][1]["name"] == "hf:org/none"
    assert "is outside the cache and is kept" in err
    assert mine.exists()


def test_a_begun_download_is_removed_by_its_name(stores: Stores) -> None:
    stores.shared("org/a", {"README.md": b"x"})
    partial = stores.repository("org/a") / "blobs" / ("b" * 64 + ".llmrun.incomplete")
    partial.write_bytes(bytes(300))
    assert run("rm", "hf:org/a")[0] == "hf:org/a: removed, freeing 300 B\n"
    assert not partial.exists()


@pytest.mark.parametrize(
    "name", ["hf:../../etc", "../../etc/passwd", "hf:a/..", "\x1b[31m", "hf:a/b/../../c.gguf", "/etc/passwd"]
)
def test_hostile_names_remove_nothing(stores: Stores, name: str) -> None:
    stores.shared("org/a", {"m-Q4_0.gguf": ONE})
    before = stores.everything()
    done = llmrun("rm", name)
    assert done.returncode in (2, 4)
    assert b"\x1b" not in done.stderr
    assert stores.everything() == before


# --- verify -----------------------------------------------------------------------------------------------------------


def test_all_are_verified_and_a_damaged_one_is_told_with_what_to_do(stores: Stores) -> None:
    stores.shared("org/a", {"m-Q4_0.gguf": ONE})
    (hurt,) = stores.shared("org/b", {"m-Q4_0.gguf": TWO})
    stores.own("m.gguf", gguf(salt=3))
    hurt.resolve().write_bytes(ONE)
    out, err = run("verify", code=6)
    assert "hf:org/a:Q4_0: OK: sha256 matches, no NaN in 1 tensor" in out
    assert "\nm: OK: no known sha256 to compare with" in out
    assert out.endswith("3 models, 1 damaged\n")
    assert f"sha256 is {sha256(ONE)}, expected {sha256(TWO)}" in err
    assert "hint: llmrun rm hf:org/b:Q4_0 && llmrun pull hf:org/b:Q4_0\n" in err
    body = told("verify", "hf:org/b:Q4_0", "hf:org/none", code=6)
    assert body["damaged"] == 1
    assert run("verify", "hf:org/a:Q4_0", "hf:org/none", code=4)[0].count("OK") == 1


def test_what_to_do_with_a_model_of_ollamas_and_with_one_that_was_made_wrong(stores: Stores) -> None:
    blob = stores.ollama(ONE, "m", "1b")
    blob.write_bytes(TWO)
    assert "hint: ollama rm m:1b && ollama pull m:1b" in run("verify", "ollama:m:1b", code=6)[1]
    stores.shared("org/a", {"m-Q4_0.gguf": b"GGUF nonsense"})
    assert "the published file itself is damaged" in run("verify", "hf:org/a:Q4_0", code=6)[1]


def test_a_file_is_verified_by_its_path_and_nothing_is_remembered_of_it(stores: Stores) -> None:
    path = stores.root / "mine.gguf"
    path.write_bytes(ONE)
    said = f"{path}: OK: no known sha256 to compare with, no NaN in 1 tensor\n"
    assert run("verify", str(path)) == (said, "")
    path.write_bytes(TWO)  # the file's owner may do that
    assert run("verify", str(path)) == (said, "")
    path.write_bytes(ONE[:-1])
    out, err = run("verify", str(path), code=6)
    assert out == ""
    assert "incomplete GGUF file: " in err
    assert "hint: download or copy the file again" in err
    other = stores.root / "m-00003-of-00004.gguf"
    other.write_bytes(ONE)
    assert "name the first shard instead" in run("verify", str(other), code=3)[1]
    assert run("verify", str(stores.root), str(stores.root / "gone.gguf"), code=4) == (
        "",
        f"error: model: {str(stores.root)!r}: is a folder, not a file\n"
        "hint: check the path, or use a name such as smollm2:135m\n"
        f"error: model: {str(stores.root / 'gone.gguf')!r}: no such file\n"
        "hint: check the path, or use a name such as smollm2:135m\n",
    )


def test_a_file_that_is_missing_or_cannot_be_read_is_not_called_damaged(stores: Stores) -> None:
    first, second = (stores.root / f"m-0000{number}-of-00002.gguf" for number in (1, 2))
    first.write_bytes(ONE)
    out, err = run("verify", str(first), code=4)
    assert out == ""
    assert err.splitlines()[-2:] == [
        f"error: {first}: a file is missing: {second}",
        "hint: put all files of the model in the same folder",
    ]
    second.mkdir()  # reading a folder fails for every user
    stores.shared("org/a", {"m-Q4_0.gguf": TWO})
    out, err = run("verify", str(first), "hf:org/a:Q4_0", code=1)
    assert f"error: {first}: {second}: cannot be read: Is a directory\n" in err
    assert "damaged" not in err
    assert "fetch" not in err
    assert out.endswith("2 models, 0 damaged, 1 not read\n")
    body = told("verify", str(first), code=1)
    assert body["damaged"] == 0
    models = body["models"]
    assert isinstance(models, list)
    assert [(model["whole"], model["readable"]) for model in models] == [(False, False)]


# --- prune ------------------------------------------------------------------------------------------------------------


def test_pruning(stores: Stores) -> None:
    assert run("prune")[0] == "Nothing to prune.\n"
    for number, data in ((1, ONE), (2, TWO)):
        stores.shared("org/a", {"m-Q4_0.gguf": data}, number=number)
        stores.shared("google/flan", {"m.safetensors": b"%d" % number}, number=number)
    assert run("prune", "--dry-run")[0] == f"hf:org/a: {len(ONE)} B\n{len(ONE)} B would be freed\n"
    body = told("prune", "--dry-run")
    assert body["freed_bytes"] == len(ONE)
    assert run("prune")[0] == f"hf:org/a: {len(ONE)} B\n{len(ONE)} B freed\n"
    assert "hint: `hf cache prune` removes old revisions of every repository" in run("prune", "google/flan", code=2)[1]


def old_kernels(cache: Path) -> list[Path]:
    """Put three kernels into the cache, two of which were last used 31 days ago, and return the paths of these two."""
    folder = cache / "kernels"
    folder.mkdir(parents=True)
    kernels = [folder / f"{digit * 64}.o" for digit in "012"]
    for kernel in kernels:
        kernel.write_bytes(b"code")
    for kernel in kernels[:2]:
        os.utime(kernel, (time.time() - 31 * 86_400,) * 2)
    return kernels[:2]


@pytest.mark.usefixtures("stores")
def test_prune_removes_unused_kernels(tmp_path: Path) -> None:
    old = old_kernels(tmp_path / "cache")
    assert run("prune", "--dry-run")[0] == "compiled kernels: 8 B\n8 B would be freed\n"
    pruned = [{"name": "compiled kernels", "freed_bytes": 8, "files": [str(path) for path in old]}]
    assert told("prune", "--dry-run") == {"dry_run": True, "pruned": pruned, "freed_bytes": 8}
    assert all(path.exists() for path in old)
    assert run("prune")[0] == "compiled kernels: 8 B\n8 B freed\n"
    assert not any(path.exists() for path in old)
    assert (tmp_path / "cache" / "kernels" / f"{'2' * 64}.o").exists()
    assert run("prune")[0] == "Nothing to prune.\n"


@pytest.mark.usefixtures("stores")
def test_kernels_that_cannot_be_removed_are_one_error(tmp_path: Path) -> None:
    first, _ = old_kernels(tmp_path / "cache")
    program = (
        "import sys; from pathlib import Path; from llmrun.cli.app import main\n"
        "def refuse(path, missing_ok=False): raise PermissionError(13, 'Permission denied', str(path))\n"
        "Path.unlink = refuse\n"
        "sys.exit(main(['prune']))"
    )
    done = subprocess.run([LLMRUN[0], "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "0 B freed\n")
    assert done.stderr == f"error: {first}: cannot be removed: Permission denied, and neither can 1 other file\n"


def test_a_repository_that_cannot_be_pruned(stores: Stores, tmp_path: Path) -> None:
    for number, data in ((1, ONE), (2, TWO)):
        stores.shared("org/a", {"m-Q4_0.gguf": data}, number=number)
    blobs = stores.repository("org/a") / "blobs"
    blobs.rename(tmp_path / "blobs")
    blobs.symlink_to(tmp_path / "blobs")
    out, err = run("prune", code=1)
    assert out == "0 B freed\n"
    assert "this folder is a link" in err


@pytest.mark.parametrize(
    "command", [("show",), ("verify",), ("rm",), ("fit",), ("pull",), ("generate", "hi", "-m"), ("chat", "-m")]
)
def test_a_repository_without_its_prefix_is_suggested_with_it(stores: Stores, command: tuple[str, ...]) -> None:
    _, err = run(*command, "Qwen/Qwen3-4B-GGUF", code=4)
    assert err.endswith("\nhint: did you mean hf:Qwen/Qwen3-4B-GGUF?\n")


def test_a_wrong_setting_is_only_a_note_where_it_does_not_matter(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores.shared("org/a", {"m-Q4_0.gguf": ONE})
    config = stores.root / "wrong.toml"
    config.write_text("temp = 0.5\n")
    monkeypatch.setenv("LLMRUN_CONFIG", str(config))
    said = f"note: config: {config}: temp: no such setting; ignored (did you mean temperature?)\n"
    for command in (["list"], ["show", "hf:org/a:Q4_0"], ["rm", "-n", "hf:org/a:Q4_0"], ["prune"], ["verify"]):
        out, err = run(*command)
        assert out, command
        assert err.startswith(said), command
    assert run("list", "-q")[1] == ""
    assert run("--help")[1] == ""
    assert run("generate", "--backend", "scripted", "hi", code=2) == (
        "",
        f"error: config: {config}: temp: no such setting\nhint: did you mean temperature?\n",
    )
