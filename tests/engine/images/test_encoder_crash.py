"""Tests that other answers go on while the process that encodes images hangs, crashes and starts again."""

from __future__ import annotations

import math
import os
import signal
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

if sys.platform == "win32":
    pytest.skip("needs POSIX signals", allow_module_level=True)

from llmrun.backends.base import OpenOptions
from llmrun.base.errors import ModelFileError
from llmrun.engine.engine import Engine
from llmrun.engine.requests import Event, TextDelta
from tests.support.engine.answers import run_to_the_end
from tests.support.engine.pictures import BLUE, RED, ask, plain, png
from tests.support.vision.opened import vision_of
from tests.support.vision.projectors import tiny_projector, tiny_text_model

pytestmark = pytest.mark.push


def test_a_crash_fails_only_the_request_with_the_image(tmp_path: Path) -> None:
    path, mmproj = tiny_text_model(tmp_path, "pixtral"), tiny_projector(tmp_path, "pixtral")
    options = OpenOptions(
        backend="llama", context_size=2048, max_sequences=2, threads=1, gpu_layers=0, mmproj=str(mmproj)
    )
    with closing(Engine.open(path, options)) as engine:
        vision = vision_of(engine._backend)
        pid = vision._process.pid
        os.kill(pid, signal.SIGSTOP)
        image = engine.submit(ask([png(plain(300, 200, RED)), "?"], max_tokens=4))
        events: list[Event] = []
        while vision._encoding is None:
            events += engine.step()
        request = ask("a question", max_tokens=100)
        bias = dict.fromkeys(engine.tokenizer.end_of_generation, -math.inf)
        text = engine.submit(structs.replace(request, sampling=replace(request.sampling, logit_bias=bias)))
        while sum(isinstance(event, TextDelta) for event in events) < 50:  # the encoder hangs meanwhile
            events += engine.step()
        assert vision._encoding.is_alive()
        os.kill(pid, signal.SIGKILL)
        failed, answer = run_to_the_end(engine, [image, text], events=events)
        error = failed.failed.error
        assert isinstance(error, ModelFileError)
        assert str(error) == f"llama.cpp died while encoding an image with {mmproj}: SIGKILL"
        assert len(answer.tokens) == 100
        (again,) = run_to_the_end(engine, [engine.submit(ask([png(plain(300, 200, BLUE)), "?"], max_tokens=4))])
        assert again.finished.timings.encoded_images == 1
        assert vision._process.pid != pid
