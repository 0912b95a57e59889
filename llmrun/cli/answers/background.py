"""Decides whether `generate` and `chat` use a background engine, which keeps the model open between runs.

A run joins the engine for its model and settings if there is one. Otherwise, the second run within ten minutes starts
an engine, and so does the first run with --keep-alive or the setting `keep_alive`. Whenever an engine cannot be used,
the run opens the model itself, and -v shows the reason.

An engine that has opened the model with its projector serves runs with and without images, so a model that reads images
needs only one engine. When this engine starts, an idle engine without the projector leaves.

A run that uses no engine imports only the modules that this decision needs.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec import structs

from llmrun.backends.base import AUTO
from llmrun.backends.registry import usable_gpus
from llmrun.base.amounts import format_duration
from llmrun.base.folders import own_models_file, told_once
from llmrun.cli.console.output import out
from llmrun.cli.console.terminal import is_terminal
from llmrun.options.settings import MMPROJ_OFF
from llmrun.serving.background.eligibility import (
    RunsAlone,
    Standing,
    inherited,
    reason_not_to_join,
    reason_not_to_start_unasked,
)
from llmrun.serving.background.place import PlaceError, open_folder, socket_name

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from llmrun.cli.answers.loading import ModelLoading
    from llmrun.engine.base import Answering
    from llmrun.engine.child.messages import Loading, Note, Open
    from llmrun.options.settings import Settings
    from llmrun.serving.background.engine import BackgroundEngine
    from llmrun.serving.background.handshake import Birth
    from llmrun.serving.background.joining import Joined
    from llmrun.serving.background.place import Folder

_SECOND_CALL_S: Final = 600.0  # a second run within this time starts an engine
KEEP_ALIVE_S: Final = 300.0  # how long an engine stays after an answer, as in Ollama
_MOST_IDLE: Final = 2  # before a third engine starts, the one that has been idle longest leaves
SEQUENCES: Final = 4  # the maximum number of answers that an engine generates at a time
_PASSING: Final = ("TMPDIR", "TEMP")  # some systems have a folder for temporary files for each session
_BACKEND: Final = "cpu"  # its answers depend neither on other requests nor on cached prefixes


@dataclass(frozen=True, slots=True)
class BackgroundRun:
    """A run that may use a background engine.

    to_open    finds the model's files, and returns the message that opens the model and the model's progress line
    open_here  opens the model in this process
    images     whether the engine must have the model's projector
    """

    settings: Settings
    chat_template: str | None
    to_open: Callable[[], AbstractContextManager[tuple[Open, ModelLoading]]]
    open_here: Callable[[], Answering]
    images: bool = False

    def joined(self) -> BackgroundEngine | None:
        """Join or start an engine. Returns None if this process must open the model.

        Raises the errors of the hub, which finds the model's files.
        """
        if (found := self._found()) is None:
            return None
        from llmrun.serving.background.engine import BackgroundEngine

        joined, was_started = found
        if was_started:
            _tell_of_engine(self._keep_alive_s)
        return BackgroundEngine(
            joined, was_started=was_started, rejoin=self._found, open_here=self.open_here, note=out.note
        )

    def _found(self) -> tuple[Joined, bool] | None:
        """Join or start an engine, and explain with -v. Returns whether it was started, or None for no engine."""
        try:
            if reason := self._reason_to_run_alone():
                raise RunsAlone(reason)
            with _folder() as folder:
                found = self._joined_in(folder, *self._sockets())
        except (PlaceError, RunsAlone) as error:
            out.detail(f"warm       no: {error}{f' ({error.hint})' if error.hint else ''}")
            return None
        if found is not None:
            joined, was_started = found
            out.detail(f"warm       {'started' if was_started else 'joined'} the background engine {joined.pid}")
        return found

    def _reason_to_run_alone(self) -> str:
        settings = self.settings
        if settings.backend not in (AUTO, _BACKEND) or settings.rpc_servers or settings.gpu_layers not in (AUTO, 0):
            return "only the CPU engine runs in the background"
        if self.images and settings.mmproj == MMPROJ_OFF:
            return "images need the projector"  # opening the model raises the error
        return reason_not_to_join()

    def _joined_in(self, folder: Folder, name: str, seeing: str) -> tuple[Joined, bool] | None:
        """Join an engine or start it. Returns None if the run should not start one. Raises RunsAlone.

        name    the socket of the engine without the projector
        seeing  the socket of the engine with the projector, or "" if the settings forbid one
        """
        keep_alive_s = self.settings.keep_alive_s
        for socket in (seeing,) if self.images else (name, seeing):
            if socket and folder.status(f"{socket}.sock") is not None:
                from llmrun.serving.background.joining import join

                wire_s = None if keep_alive_s is None else _on_wire(keep_alive_s)
                if (joined := join(folder, socket, wire_s)) is not None:
                    return joined, False
        if keep_alive_s == 0:
            return None
        replaced = ""
        if self.images:
            name, replaced = seeing, name if folder.status(f"{name}.sock") is not None else ""
        if keep_alive_s is None:
            was_called = folder.called_within(name, _SECOND_CALL_S) or bool(replaced)
            folder.remember_call(name)
            if not was_called:
                raise RunsAlone(f"the second run within {_SECOND_CALL_S / 60:.0f} minutes starts a background engine")
            if reason := reason_not_to_start_unasked():
                raise RunsAlone(reason)
        if self.settings.backend == AUTO and self.settings.gpu_layers != 0 and (gpus := usable_gpus()):
            raise RunsAlone(f"{' and '.join(gpus)} may run the model, and only the CPU engine runs in the background")
        return self._joined_or_started(folder, name, replaced)

    def _joined_or_started(self, folder: Folder, name: str, replaced: str) -> tuple[Joined, bool]:
        """Start an engine, or join the one that another process is starting. Raises RunsAlone.

        replaced  the socket of an engine that leaves first if it is idle, or ""
        """
        from llmrun.base.machine.memory_pressure import fits_beside
        from llmrun.engine.child.messages import Loading
        from llmrun.serving.background.control import make_room
        from llmrun.serving.background.handshake import Birth
        from llmrun.serving.background.joining import join_or_start

        keep_alive_s = _on_wire(self._keep_alive_s)
        loading: list[ModelLoading] = []

        @contextmanager
        def asked() -> Iterator[tuple[Birth, Open]]:
            from llmrun.hub.local.paths import model_files

            with self.to_open() as (message, line):
                loading.append(line)
                size = sum(shard.stat().st_size for shard in model_files(Path(message.path)))
                if mmproj := message.options.get("mmproj"):
                    size += Path(mmproj).stat().st_size
                if replaced:
                    make_room(only=replaced)  # otherwise, the model would be in memory twice
                make_room(most_idle=_MOST_IDLE - 1)
                if not fits_beside(size) and not (make_room() and fits_beside(size)):
                    raise RunsAlone("the model is too large to stay in memory between runs")
                message = _in_background(message)
                yield Birth(name, self._lasting_model(), _files_of(message), keep_alive_s), message

        def tell(news: Loading | Note) -> None:
            if isinstance(news, Loading):
                loading[0](news.work, news.fraction)
            elif news.is_detail:
                out.detail(f"backend    {news.text}")
            else:
                out.note(news.text)

        found = join_or_start(
            folder,
            name,
            asked,
            keep_alive_s=keep_alive_s,
            tell=tell,
            waiting=lambda: out.progress("waiting for the model to be loaded ...", at_once=True),
        )
        for each in loading:
            each.end()
        return found

    @property
    def _keep_alive_s(self) -> float:
        asked = self.settings.keep_alive_s
        return KEEP_ALIVE_S if asked is None else asked

    def _lasting_model(self) -> str:
        """Return the model's name, or the absolute path of an existing file."""
        path = os.path.abspath(os.path.expanduser(self.settings.model))  # noqa: PTH100, PTH111  (Path may raise)
        return path if os.path.exists(path) else self.settings.model  # noqa: PTH110

    def _sockets(self) -> tuple[str, str]:
        """Return the names of the sockets of engines without and with the projector, as in `_joined_in`."""
        settings = self.settings
        decisive = self._decisive()
        plain = socket_name(json.dumps(decisive, sort_keys=True))
        if settings.mmproj == MMPROJ_OFF:
            return plain, ""
        decisive |= {
            "mmproj": _lasting_path(settings.mmproj),
            **{name: getattr(settings, name) for name in ("image_min_tokens", "image_max_tokens")},
        }
        return plain, socket_name(json.dumps(decisive, sort_keys=True))

    def _decisive(self) -> dict[str, object]:
        """Return values that differ between engines whose answers to texts may differ."""
        settings = self.settings
        return {
            "model": self._lasting_model(),
            "draft": _lasting_path(settings.draft_model),
            "adapters": [*map(_lasting_adapter, settings.adapters)],
            "template": self.chat_template,
            "speculate": settings.wants_speculation,
            **{name: getattr(settings, name) for name in ("threads", "ctx_size", "kv_type", "text_calls")},
            "environment": {name: value for name, value in inherited().items() if name not in _PASSING},
            "standing": Standing.of_this_process().as_json(),  # otherwise, one limited engine would keep others out
        }


def _lasting_path(path: str | None) -> str | None:
    """Return the absolute path of an existing file, or the text itself."""
    return os.path.abspath(path) if path and os.path.exists(path) else path  # noqa: PTH100, PTH110


@contextmanager
def _folder() -> Iterator[Folder]:
    """Open the folder of background engines. Raises PlaceError, and RunsAlone if there is no such folder."""
    folder = open_folder(create=True)
    if folder is None:
        raise RunsAlone("this system has no sockets for background engines")
    with folder:
        yield folder


def _on_wire(keep_alive_s: float) -> float:
    return -1.0 if keep_alive_s == math.inf else keep_alive_s


def _lasting_adapter(text: str) -> str:
    from llmrun.backends.lora_files import LoraOption

    option = LoraOption.parse(text)
    return structs.replace(option, path=Path(os.path.abspath(option.path))).text  # noqa: PTH100


def _in_background(asked: Open) -> Open:
    """Return the message with absolute paths and the options of background engines."""
    options = {
        **asked.options,
        "backend": _BACKEND,
        "saves_state": True,
        "adapters": [*map(_lasting_adapter, asked.options["adapters"])],
    }
    draft = asked.draft and os.path.abspath(asked.draft)  # noqa: PTH100
    return structs.replace(asked, path=os.path.abspath(asked.path), draft=draft, options=options)  # noqa: PTH100


def _files_of(asked: Open) -> tuple[str, ...]:
    """Return the files that determine the answers: models, projector, adapters and the user's catalogue."""
    from llmrun.backends.lora_files import LoraOption
    from llmrun.hub.local.paths import model_files

    models = [Path(path) for path in (asked.path, asked.draft, asked.options.get("mmproj")) if path]
    shards = [shard for path in models for shard in model_files(path)]
    adapters = [LoraOption.parse(text).path for text in asked.options["adapters"]]
    return tuple(str(path) for path in [*shards, *adapters, own_models_file()])


def _tell_of_engine(keep_alive_s: float) -> None:
    """Print a note that the model stays loaded. The note appears only once, and only on a terminal."""
    if out.quiet or not is_terminal(sys.stderr) or not told_once("background-engine"):
        return
    if keep_alive_s == math.inf:
        out.note("the model stays loaded until `llmrun stop` unloads it")
    else:
        duration = format_duration(keep_alive_s)
        out.note(f"the model stays loaded for {duration} for the next run; `llmrun stop` unloads it")
