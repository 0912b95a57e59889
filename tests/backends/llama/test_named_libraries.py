"""Tests that libraries in LLAMA_CPP_LIB_PATH are used if they match llama-cpp-python, and otherwise refused.

The libraries are compiled from a few lines of C, and take all other functions from the installed library.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
import signal
import sys
from contextlib import closing
from pathlib import Path

import llama_cpp
import pytest
from llama_cpp import mtmd_cpp

from llmrun.backends.base import OpenOptions
from llmrun.backends.llama import named_libraries
from llmrun.backends.llama.backend import LlamaBackend
from llmrun.backends.llama.process import LlamaProcess, _broken
from llmrun.base.errors import BackendCrashed, LlmrunError
from llmrun.formats.gguf.reader import open_gguf
from tests.support.backends.fake_llama import other_library
from tests.support.backends.seam_contract import batch_of, rows
from tests.support.models.tiny_models import tiny_model
from tests.support.vision.opened import encode
from tests.support.vision.projectors import tiny_projector, tiny_text_model
from tests.support.vision.prompts import tiles_of

pytestmark = [
    pytest.mark.push,
    pytest.mark.skipif(sys.platform == "win32" or shutil.which("cc") is None, reason="no C compiler (cc)"),
]

LIBRARIES = Path(llama_cpp.__file__).parent / "lib"
VARIABLE = "LLAMA_CPP_LIB_PATH"
HINT = f"unset {VARIABLE}, or name libraries that match llama-cpp-python: see docs/gpus.md"
# llama.cpp b11548 has a new field of 8 bytes between type_v and abort_callback.
FIELD_ADDED = f"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>
enum {{ BEFORE = {llama_cpp.llama_context_params.abort_callback.offset},
        AFTER = {ctypes.sizeof(llama_cpp.llama_context_params)} - BEFORE }};
typedef struct {{ char bytes[BEFORE + AFTER]; }} Old;
typedef struct {{ char bytes[BEFORE + 8 + AFTER]; }} New;
New llama_context_default_params(void) {{
    Old old = ((Old (*)(void))dlsym(RTLD_NEXT, "llama_context_default_params"))();
    New new = {{{{0}}}};
    memcpy(new.bytes, old.bytes, BEFORE);
    memcpy(new.bytes + BEFORE + 8, old.bytes + BEFORE, AFTER);
    return new;
}}
"""
SEPARATE_BACKENDS = """
#include <stdio.h>
static size_t loaded;
size_t ggml_backend_reg_count(void) {{ return loaded; }}
void ggml_backend_load_all_from_path(const char * folder) {{
    fprintf(stderr, "backends of %s", folder);
    loaded = {found};
}}
"""


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder that the variable names."""
    folder = tmp_path / "libraries"
    folder.mkdir()
    monkeypatch.setenv(VARIABLE, str(folder))
    return folder


def refused() -> LlmrunError:
    with closing(LlamaProcess()) as process, pytest.raises(LlmrunError) as caught:
        process.ask("devices", "looking for GPUs")
    assert not isinstance(caught.value, BackendCrashed)
    return caught.value


def sized(library: Path) -> str:
    """Return how the library's context parameters differ from llama-cpp-python's."""
    return named_libraries._difference(
        llama_cpp.llama_context_params,
        ctypes.CDLL(str(library / "libllama.so")),
        "llama_context_default_params",
        (),
        {"n_ctx": 512, "type_v": 1, "offload_kqv": 1, "op_offload": 1},
    )


def opened(path: Path) -> LlamaBackend:
    with open_gguf(path) as file:
        return LlamaBackend(file, OpenOptions(context_size=64, threads=1, gpu_layers=0, saves_state=True))


def test_a_structure_with_a_new_field_is_refused(named: Path) -> None:
    other_library(named, FIELD_ADDED)
    error = refused()
    expected = (
        rf"the llama\.cpp library in {re.escape(str(named))} does not match llama-cpp-python [\d.]+: "
        r"llama_context_params has (168 bytes instead of 160|another layout \(.*\)) "
        r"in llama\.cpp [\w.-]+, commit [0-9a-f]+"
    )
    assert re.fullmatch(expected, str(error))
    assert error.hint == HINT


def test_other_sizes_and_moved_fields_are_found(named: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes can be measured only on x86-64."""
    other_library(named, FIELD_ADDED)
    if platform.machine() == "x86_64":
        size = ctypes.sizeof(llama_cpp.llama_context_params)
        assert sized(named) == f"{size + 8} bytes instead of {size}"
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert sized(named) == "another layout (offload_kqv, op_offload)"


def test_a_library_without_a_function_is_refused(named: Path) -> None:
    other_library(named, "int llama_nothing;", has_the_rest=False)
    assert re.search(r": llama_\w+ is missing in an old llama\.cpp$", str(refused()))


def test_a_matching_library_runs_models(named: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saved sequences of another version are not used, because its cache may differ."""
    path = tiny_model(tmp_path, "F32 untied llama3 rope")
    keys = []
    for version in ("9.1", "9.2"):
        other_library(named, f'const char * llama_version(void) {{ return "{version}"; }}')
        with closing(opened(path)) as backend:
            logits = backend.forward(batch_of(rows(0, 0, [5, 6, 7]))).logits
            keys.append(backend.kv.key)
    monkeypatch.delenv(VARIABLE)
    with closing(opened(path)) as backend:
        assert (backend.forward(batch_of(rows(0, 0, [5, 6, 7]))).logits == logits).all()
        assert len({*keys, backend.kv.key}) == 3


# A libmtmd whose parameters have a new field of 8 bytes after `warmup`
OTHER_MTMD = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>
typedef struct {{ char bytes[{size}]; }} Old;
typedef struct {{ char bytes[{size} + 8]; }} New;
New mtmd_context_params_default(void) {{
    Old old = ((Old (*)(void))dlsym(RTLD_NEXT, "mtmd_context_params_default"))();
    New new = {{{{0}}}};
    memcpy(new.bytes, old.bytes, {at});
    memcpy(new.bytes + {at} + 8, old.bytes + {at}, {size} - {at});
    return new;
}}
"""


def seen(folder: Path) -> tuple[int, int]:
    """Encode an image with a tiny projector and return the shape of its rows."""
    projector = tiny_projector(folder, "pixtral")
    options = OpenOptions(context_size=64, threads=1, gpu_layers=0, mmproj=str(projector))
    with open_gguf(tiny_text_model(folder, "pixtral")) as file, closing(LlamaBackend(file, options)) as backend:
        assert backend.vision is not None
        layout = backend.vision.projector.layout(60, 30)
        rows, width = encode(backend.vision, tiles_of(layout), layout).shape
        return rows, width


def test_images_need_a_libmtmd_in_the_folder(named: Path, tmp_path: Path) -> None:
    other_library(named, "int llama_nothing;")
    with pytest.raises(LlmrunError) as caught:
        seen(tmp_path)
    assert str(caught.value).endswith(": libmtmd, which encodes images, is missing")
    assert caught.value.hint == HINT


def test_a_matching_libmtmd_encodes_images(named: Path, tmp_path: Path) -> None:
    other_library(named, "int llama_nothing;")
    (named / "libmtmd.so").symlink_to(LIBRARIES / "libmtmd.so")
    assert seen(tmp_path) == (6 + 2 - 1, 96)


def test_a_libmtmd_with_a_new_field_is_refused(named: Path, tmp_path: Path) -> None:
    other_library(named, "int llama_nothing;")
    structure = mtmd_cpp.mtmd_context_params
    source = OTHER_MTMD.format(size=ctypes.sizeof(structure), at=structure.image_min_tokens.offset)
    other_library(named, source, name="mtmd")
    with pytest.raises(LlmrunError, match=r": mtmd_context_params has (\d+ bytes instead|another layout)"):
        seen(tmp_path)


def test_backends_in_separate_files_are_loaded(named: Path) -> None:
    other_library(named, SEPARATE_BACKENDS.format(found=1))
    with closing(LlamaProcess()) as process:
        assert process.ask("describe", "starting")["system"]
    assert f"backends of {named}" in process.last_words


def test_a_folder_without_backends_is_reported(named: Path) -> None:
    other_library(named, SEPARATE_BACKENDS.format(found=0))
    error = refused()
    assert str(error).endswith(f"RuntimeError: {named} has no ggml backend, such as libggml-cpu")
    assert error.hint == HINT


def test_a_crash_with_named_libraries_suspects_them(named: Path) -> None:
    with closing(LlamaProcess()) as process:
        os.kill(process.pid, signal.SIGSEGV)
        with pytest.raises(BackendCrashed) as caught:
            process.ask("devices", "looking for GPUs")
    assert caught.value.hint == HINT


def test_without_the_variable_reinstalling_is_the_advice(named: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _broken("OSError: libllama.so").hint == HINT
    monkeypatch.delenv(VARIABLE)
    assert (_broken("OSError: libllama.so").hint or "").startswith("reinstall it (pip compiles llama.cpp")
