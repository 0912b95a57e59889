"""Tests of the process that encodes images: its rows, how it stops and ends, and that a crash ends only one image."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

if sys.platform == "win32":
    pytest.skip("needs POSIX signals", allow_module_level=True)

from llmrun.backends.base import OpenOptions
from llmrun.backends.encoders import opened_projector
from llmrun.backends.llama import vision as vision_module
from llmrun.backends.llama.backend import LlamaBackend
from llmrun.backends.llama.vision import LlamaEncoding, LlamaVision
from llmrun.base.errors import BackendCrashed, Cancelled, ModelFileError
from llmrun.formats.gguf.reader import open_gguf
from tests.support.backends.seam_contract import batch_of, rows
from tests.support.cli.commands import ROOT
from tests.support.vision.opened import SMALL, encode, encoded, open_vision, vision_of
from tests.support.vision.projectors import TINY_PROJECTORS, tiny_projector, tiny_text_model
from tests.support.vision.prompts import one_tile, picture, prompt_batch, tiles_of

pytestmark = pytest.mark.push

NAME = "qwen3vl_merger"
WAIT_S = 20.0  # for operations that take milliseconds


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[LlamaBackend]:
    with closing(open_vision(tmp_path, NAME)) as opened:
        yield opened


def large(vision: LlamaVision) -> LlamaEncoding:
    """Begin to encode an image that takes many seconds, and wait until libmtmd works on it."""
    layout = vision.projector.layout(2400, 2400, "high")
    encoding = vision.begin(tiles_of(layout), layout)
    assert encoding.advance(0.5) is None
    return encoding


def works(vision: LlamaVision) -> bool:
    layout = vision.projector.layout(64, 64)
    return encode(vision, tiles_of(layout), layout).shape == (layout.rows, vision.projector.row_width)


def pid_of(vision: LlamaVision) -> int:
    return vision._process.pid


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ends(pid: int) -> bool:
    end = time.monotonic() + WAIT_S
    while is_running(pid) and time.monotonic() < end:
        time.sleep(0.005)
    return not is_running(pid)


def end(vision: LlamaVision) -> None:
    """Kill the process, and wait until all of its threads have ended. Before, it may look like a zombie."""
    vision.kill()
    assert vision._process._child.wait(WAIT_S)


# --- rows -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TINY_PROJECTORS)
def test_rows_do_not_depend_on_threads(tmp_path: Path, name: str) -> None:
    projector = tiny_projector(tmp_path, name, **SMALL.get(name, {}))
    model = tiny_text_model(tmp_path, name)
    with open_gguf(model) as file:
        read = opened_projector(OpenOptions(mmproj=str(projector)), file)
    assert read is not None
    layout, found = one_tile(read.layout(150, 100)), []
    for threads in (1, 2, 3):
        with closing(LlamaVision(model, read, threads)) as vision:
            found.append(encode(vision, tiles_of(layout), layout))
    np.testing.assert_array_equal(found[1], found[0])
    np.testing.assert_array_equal(found[2], found[0])


def test_the_weights_of_the_model_are_not_opened(backend: LlamaBackend) -> None:
    """The model's process maps the model's file, and the encoder's process neither maps nor reads the file."""
    assert works(vision_of(backend))
    model = Path(backend.info.path).name
    assert model in Path(f"/proc/{backend._process.pid}/maps").read_text()
    assert model not in Path(f"/proc/{pid_of(vision_of(backend))}/maps").read_text()


def test_text_runs_while_an_image_is_encoded(backend: LlamaBackend) -> None:
    encoding = large(vision_of(backend))
    for position in range(20):
        assert len(backend.forward(batch_of(rows(0, position, [5]))).logits) == 1
    assert encoding.advance(0) is None


def test_backends_have_encoders_of_their_own(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    with closing(open_vision(tmp_path / "a", NAME)) as first, closing(open_vision(tmp_path / "b", "pixtral")) as other:
        encoding = large(vision_of(first))
        assert works(vision_of(other))
        assert encoding.advance(0) is None
        assert pid_of(vision_of(first)) != pid_of(vision_of(other))
        os.kill(pid_of(vision_of(first)), signal.SIGKILL)
        assert works(vision_of(other))


# --- stopping ---------------------------------------------------------------------------------------------------------


def test_a_cancelled_image_stops_soon(backend: LlamaBackend) -> None:
    vision = vision_of(backend)
    encoding = large(vision)
    threading.Timer(0.2, encoding.cancel).start()
    with pytest.raises(Cancelled):
        encoding.advance(60)
    for seconds in (0, 60):
        with pytest.raises(Cancelled):
            encoding.advance(seconds)
    assert works(vision)
    assert encoding._rows is None


def test_nobody_waits_until_a_cancelled_image_stops(backend: LlamaBackend) -> None:
    """A node of libmtmd's graph can take seconds."""
    encoding = large(vision_of(backend))
    encoding.cancel()
    with pytest.raises(Cancelled):
        encoding.advance(0)
    assert encoding.is_alive()


def test_a_stuck_image_does_not_hold_up_the_next_one(backend: LlamaBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancelling an image that hangs is enough, for example by closing the connection of its request."""
    monkeypatch.setattr(vision_module, "_STOP_S", 0.5)
    vision = vision_of(backend)
    encoding, pid = large(vision), pid_of(vision)
    os.kill(pid, signal.SIGSTOP)
    encoding.cancel()
    assert works(vision)
    assert ends(pid)
    assert not encoding.is_alive()


def test_cancelling_an_earlier_image_stops_no_other(backend: LlamaBackend) -> None:
    vision = vision_of(backend)
    layouts = [vision.projector.layout(side, side, "high") for side in (64, 1200)]
    first = vision.begin(tiles_of(layouts[0]), layouts[0])
    assert first.advance(60) is not None
    expected = encode(vision, tiles_of(layouts[1]), layouts[1])
    second = vision.begin(tiles_of(layouts[1]), layouts[1])
    assert second.advance(0.1) is None
    first.cancel()
    found = second.advance(60)
    assert found is not None
    np.testing.assert_array_equal(found, expected)


def test_a_cancelled_image_is_not_begun(backend: LlamaBackend) -> None:
    vision = vision_of(backend)
    first, layout = large(vision), vision.projector.layout(2400, 2400, "high")
    second = vision.begin(tiles_of(layout), layout)
    second.cancel()
    with pytest.raises(Cancelled):
        second.advance(0)
    first.cancel()
    assert works(vision)
    assert not first.is_alive()
    assert not second.is_alive()
    assert first._rows is second._rows is None


def test_stopping_a_step_stops_no_image(backend: LlamaBackend) -> None:
    vision = vision_of(backend)
    layout = vision.projector.layout(800, 700)
    expected = encode(vision, tiles_of(layout), layout)
    encoding = vision.begin(tiles_of(layout), layout)
    backend.cancel()
    with pytest.raises(Cancelled):
        backend.forward(batch_of(rows(0, 0, [5])))
    found = encoding.advance(60)
    assert found is not None
    np.testing.assert_array_equal(found, expected)


def test_close_does_not_wait_for_an_image(backend: LlamaBackend) -> None:
    encoding, pid = large(vision_of(backend)), pid_of(vision_of(backend))
    backend.close()
    assert not Path(f"/proc/{pid}").exists()  # not even as a zombie
    assert not encoding.is_alive()
    assert encoding._rows is None
    backend.close()


# --- crashes ----------------------------------------------------------------------------------------------------------


def test_a_crash_ends_only_its_image(backend: LlamaBackend) -> None:
    vision = vision_of(backend)
    encoding, pid = large(vision), pid_of(vision)
    backend.forward(batch_of(rows(0, 0, [5, 6, 7])))
    os.kill(pid, signal.SIGKILL)
    assert len(backend.forward(batch_of(rows(0, 3, [8]))).logits) == 1
    with pytest.raises(ModelFileError) as caught:
        encoding.advance(60)
    assert str(caught.value) == f"llama.cpp died while encoding an image with {vision.projector.path}: SIGKILL"
    assert "--no-mmproj" in caught.value.hint
    assert works(vision)
    assert pid_of(vision) != pid
    assert len(backend.forward(batch_of(rows(0, 4, [9]))).logits) == 1


def test_a_crash_between_images_ends_none(backend: LlamaBackend) -> None:
    vision = vision_of(backend)
    end(vision)
    assert works(vision)
    assert works(vision)


def test_a_new_process_needs_the_same_projector(backend: LlamaBackend) -> None:
    """Otherwise, rows of another projector would be found in caches under the old one."""
    vision = vision_of(backend)
    end(vision)
    os.utime(vision.projector.path, (1, 1))
    for _ in range(2):
        with pytest.raises(ModelFileError, match="changed while it was being read"):
            works(vision)


def test_a_crash_while_opening_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = LlamaVision.load

    def killed(vision: LlamaVision, gpu_bytes: int | None = None) -> None:
        os.kill(pid_of(vision), signal.SIGKILL)
        load(vision, gpu_bytes)

    monkeypatch.setattr(LlamaVision, "load", killed)
    with pytest.raises(BackendCrashed) as caught:
        open_vision(tmp_path, NAME)
    (path,) = tmp_path.glob("mmproj*")
    assert str(caught.value) == f"llama.cpp died while loading {path}: SIGKILL"
    assert "--no-mmproj" in caught.value.hint


def test_an_unopened_model_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    load = LlamaVision.load

    def remembered(vision: LlamaVision, gpu_bytes: int | None = None) -> None:
        started.append(pid_of(vision))
        load(vision, gpu_bytes)
        raise KeyboardInterrupt

    monkeypatch.setattr(LlamaVision, "load", remembered)
    with pytest.raises(KeyboardInterrupt):
        open_vision(tmp_path, NAME)
    assert not Path(f"/proc/{started[0]}").exists()


_ENCODES = """
import sys
from pathlib import Path
from tests.support.vision.opened import open_vision, vision_of
from tests.support.vision.prompts import tiles_of
backend = open_vision(Path(sys.argv[1]), "qwen3vl_merger")
vision = vision_of(backend)
layout = vision.projector.layout(2400, 2400, "high")
encoding = vision.begin(tiles_of(layout), layout)
assert encoding.advance(0.3) is None
print(vision._process.pid, backend._process.pid, flush=True)
encoding.advance(60)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_it_ends_with_the_process_that_started_it(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-c", _ENCODES, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT) as parent:
        assert parent.stdout is not None
        pids = [*map(int, parent.stdout.readline().split())]
        assert all(map(is_running, pids))
        parent.send_signal(number)
        parent.wait(WAIT_S)
    assert len(pids) == 2
    assert all(map(ends, pids))


# --- tiles ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tile", [picture(280, 140)[..., :2], picture(280, 140).astype(np.int8), picture(4, 4)[0]])
def test_tiles_of_other_formats_are_refused(backend: LlamaBackend, tile: Any) -> None:
    vision = vision_of(backend)
    with pytest.raises(ValueError, match="three bytes for each pixel"):
        vision.begin([tile], vision.projector.layout(280, 140))


def test_rows_can_be_used_in_the_model(backend: LlamaBackend) -> None:
    image = encoded(backend, vision_of(backend).projector.layout(220, 120))
    batch = prompt_batch(vision_of(backend).projector, [[5, 6], image, [7]])
    assert np.isfinite(backend.forward(batch).logits).all()
