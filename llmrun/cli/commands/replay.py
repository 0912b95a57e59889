"""Repeat a recorded run and compare every bit of it.

The recording is a file written by `llmrun generate --record`. The same model runs on the same prompt, with any number
of threads and any speculation. If the tokens or the logits differ, the command names the first token and the first op
that differ, and exits with code 1.

Examples:
    llmrun replay run.json
    llmrun replay run.json ./qwen3.gguf --threads 1 --speculate off
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmrun.base.amounts import counted
from llmrun.cli.arguments import options
from llmrun.cli.console.output import out
from llmrun.options.settings import load_settings

if TYPE_CHECKING:
    from llmrun.engine.engine import Engine
    from llmrun.jobs.recording import Recording
    from llmrun.jobs.replay import OtherImage, Result, Watcher
    from llmrun.options.settings import Settings

LISTING = {"heading": "Measure", "place": 122}


def command(
    file: Annotated[Path, typer.Argument(metavar="RECORDING", help="File written by llmrun generate --record.")],
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="Model to use, if its name has changed.",
            autocompletion=options.models_here_or_files,
        ),
    ] = None,
    same: options.SameAsModelHere = None,
    threads: options.Threads = None,
    speculate: options.Speculate = None,
    mmproj: Annotated[
        str | None,
        options.model_option(
            "--mmproj",
            metavar="FILE",
            help="Vision projector for images.  [default: the recorded one]",
            autocompletion=options.files,
        ),
    ] = None,
    offline: options.Offline = False,
    json_output: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    model = options.one_model(model, same)
    given: dict[str, object] = {"threads": threads, "speculate": speculate, "backend": "cpu"}
    settings = load_settings(given | {name: True for name, on in (("offline", offline), ("quiet", quiet)) if on})
    out.quiet, out.color = settings.quiet, settings.color

    from llmrun.cli.answers.answering import cancelling
    from llmrun.jobs.recording import read_recording
    from llmrun.jobs.replay import Watcher, check_numerics, replay

    recording = read_recording(file)
    check_numerics(recording)
    opening, watcher = recording.opening, Watcher()
    settings = replace(settings, model=model or recording.model, kv_type=opening.kv_type, ctx_size=opening.context_size)
    if (projector := recording.projector) is not None:
        settings = replace(
            settings,
            mmproj=mmproj or (projector.path if Path(projector.path).is_file() else None),
            image_min_tokens=projector.image_min_tokens,
            image_max_tokens=projector.image_max_tokens,
        )
    with ExitStack() as held:
        engine = _opened(settings, recording, watcher, held)
        with cancelling(engine.cancel_current) as signals:
            result = replay(engine, watcher.backend, recording)
        if signals:
            return 128 + signals[0]
        where = f"{recording.files[0].name}, {engine.info.device}"
        if json_output:
            out.json({**result.as_json(), "device": engine.info.device, "recorded_on": dict(recording.machine)})
        else:
            out.lines([_words(result, where, recording, engine)])
    return 0 if result.is_same else 1


def _opened(settings: Settings, recording: Recording, watcher: Watcher, held: ExitStack) -> Engine:
    """Find, check and open the recorded model. This function may raise any LlmrunError from the hub or the engine."""
    from llmrun.backends.lora_files import LoraOption
    from llmrun.base.errors import kernel_warnings_told
    from llmrun.cli.answers.answering import model_files, tell_of_too_many_threads
    from llmrun.cli.console.progress import HubReporter
    from llmrun.engine.engine import Engine
    from llmrun.jobs.replay import adapter_digest, check_adapters, check_files, check_projector, projector_digest
    from llmrun.jobs.replay import model_files as hashed_files

    files = held.enter_context(model_files(settings, images=bool(recording.images)))
    check_files(recording, hashed_files(files.found.path, HubReporter()))
    check_adapters(recording, lambda path: adapter_digest(path, HubReporter()))
    if recording.images:
        check_projector(recording, projector_digest(Path(files.options.mmproj), HubReporter()))
    options = [LoraOption(each.name, Path(each.path), each.scale).text for each in recording.adapters]
    tell_of_too_many_threads(settings)
    with kernel_warnings_told(out.note):
        engine = Engine.open(
            files.found.path,
            replace(files.options, adapters=options, progress=files.loading),
            chat_template=recording.opening.chat_template,
            thinking_tags=recording.opening.thinking_tags,
            speculate=settings.wants_speculation,
            draft=files.draft,
            will_constrain=recording.request.response_format is not None,
            watch=watcher,
        )
    held.enter_context(engine)
    files.loading.end()
    return engine


def _words(result: Result, where: str, recording: Recording, engine: Engine) -> str:
    """Return one line that describes the result."""
    if result.is_same:
        return f"same {counted(result.n_tokens, 'token')} and logits on this machine: {where}"
    count = counted(len(recording.output.tokens), "token")
    found = [_image_words(other, recording) for other in result.images]
    if (token := result.token) is not None:
        expected, got = (_shown(engine, one) for one in (token.expected, token.got))
        found.append(f"token {token.index + 1} of {count} differs: expected {expected}, got {got}")
    elif result.finish is not None:
        found.append(f"the same {count}, but the answer ended with {result.finish[1]} instead of {result.finish[0]}")
    else:
        is_other = result.logits is not None or result.op is not None
        found.append(f"the same {count}{', but different bits' if is_other else ''}")
    if result.logits is not None:
        found.append(f"the logits of token {result.logits + 1} differ")
    if (op := result.op) is not None:
        last = len(recording.op_tokens) - 1
        found.append(f"the first op that differs: {op.name} (op {op.index + 1} of {op.count}, positions 0 to {last})")
    return f"{'; '.join(found)}: {where}"


def _image_words(other: OtherImage, recording: Recording) -> str:
    from llmrun.base.machine.system import installed_version
    from llmrun.jobs.replay import DECODER, ENCODER

    what, library = ("the decoded pixels", DECODER) if other.pixels else ("the encoder's rows", ENCODER)
    here, there = (version or "unknown" for version in (installed_version(library), recording.machine.get(library)))
    versions = f"{library} {here}, as recorded" if here == there else f"{library} {here}, recorded with {there}"
    return f"image {other.index + 1}: {what} differ ({versions})"


def _shown(engine: Engine, token: int | None) -> str:
    if token is None:
        return "the end of the answer"
    return repr(engine.tokenizer.token_bytes(token).decode(errors="replace"))
