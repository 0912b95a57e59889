"""Contains flags and checks of `generate`: fill-in-the-middle, several samples, --prompt-cache and --record."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from msgspec import Struct

from llmrun.backends.base import AUTO
from llmrun.base.errors import UsageError
from llmrun.cli.arguments.options import files, one_of, prompt_option
from llmrun.cli.arguments.prompts import checked_text, read_text
from llmrun.cli.arguments.usage import under
from llmrun.engine.remote.request import is_endpoint
from llmrun.options.settings import RULES

if TYPE_CHECKING:
    from llmrun.options.settings import Settings

_samples_option = under("Several samples")

IMAGE = "--image"

Images = Annotated[
    list[str] | None,
    prompt_option(
        IMAGE,
        metavar="FILE",
        help="Show an image to the model; `-` is stdin. Repeatable.",
        autocompletion=files,
    ),
]
Suffix = Annotated[
    str | None, prompt_option("--suffix", metavar="TEXT", help="Fill the gap between the prompt and this text.")
]
SuffixFile = Annotated[
    Path | None,
    prompt_option("--suffix-file", metavar="FILE", help="Fill the gap between the prompt and this file."),
]


def read_suffix(text: str | None, file: Path | None) -> str | None:
    """Return the text after the gap, or None without fill-in-the-middle. Raises UsageError."""
    if text is not None and file is not None:
        raise UsageError("--suffix: cannot be combined with --suffix-file")
    if file is not None:
        return read_text(file, "--suffix-file", exact=True)
    return None if text is None else checked_text(text, "--suffix")


MEAN_LOGPROB: Final = "mean-logprob"
VOTE: Final = "vote"
_CHOICES: Final = (MEAN_LOGPROB, VOTE)
_MOST: Final = 64

Samples = Annotated[
    int | None,
    _samples_option(
        "--samples", metavar="N", min=1, max=_MOST, help="Generate N answers, with seeds SEED to SEED+N-1."
    ),
]
BestOf = Annotated[
    str | None,
    _samples_option(
        "--best-of",
        metavar="RULE",
        help="Print only the best sample, by mean-logprob or vote.",
        autocompletion=one_of(*_CHOICES),
    ),
]
Null = Annotated[bool, _samples_option("-0", "--null", help="End each sample with a NUL byte, and print no headings.")]


class SamplesWanted(Struct, frozen=True):
    """The requested samples.

    best_of  the rule that chooses the sample to print, or None to print all samples
    null     whether samples end with a NUL byte instead of being separated by headings
    """

    count: int
    best_of: str | None
    null: bool


def parse_samples(
    count: int | None, best_of: str | None, *, null: bool, as_json: bool, seed: int | None
) -> SamplesWanted | None:
    """Return the checked samples, or None if the user wants a single answer. Raises UsageError."""
    if best_of is not None and best_of not in _CHOICES:
        raise UsageError(f"invalid value for --best-of: '{best_of}', choose from {', '.join(_CHOICES)}")
    if count is None:
        for flag, given in (("--best-of", best_of is not None), ("--null", null)):
            if given:
                raise UsageError(f"{flag}: needs --samples N, the number of answers to generate")
        return None
    if null and as_json:
        raise UsageError("--null: cannot be combined with --json, which already separates the samples")
    if seed is not None:
        try:
            RULES["seed"].check(seed + count - 1)
        except ValueError:
            raise UsageError(f"--seed: the last of {count} seeds is not {RULES['seed'].words}") from None
    return SamplesWanted(count, best_of, null)


def check_prompt_cache(path: Path, model: str) -> None:
    """Raise UsageError for a remote model, and for an existing file that is not a prompt cache."""
    if is_endpoint(model):
        raise UsageError("--prompt-cache: not supported for models on a server", hint="leave out this flag")
    if not path.parent.is_dir():
        raise UsageError(f"--prompt-cache: {path}: there is no folder {path.parent}", hint="create the folder first")
    from llmrun.engine.saved_state.budget import BEGINNING

    _check_contents("--prompt-cache", path, BEGINNING, "name a new file, or a file that --prompt-cache has written")


CPU = "cpu"


def check_recordable(path: Path, settings: Settings, *, several: bool, cached: bool) -> None:
    """Raise UsageError if the run cannot be recorded, before a model is opened.

    several  whether the command generates more than one answer
    cached   whether the command may load a part of the prompt from a cache, which a recording cannot contain
    """
    if several:
        raise UsageError("--record: cannot be combined with --samples", hint="record one answer, with its --seed")
    if cached:
        raise UsageError("--record: cannot be combined with --prompt-cache", hint="leave out --prompt-cache")
    if is_endpoint(settings.model):
        raise UsageError("--record: only models on this machine can be recorded, not models on a server")
    if settings.backend not in (AUTO, CPU):
        raise UsageError(
            f"--record: only the CPU engine can repeat a run bit for bit, not --backend {settings.backend}",
            hint="add --backend cpu",
        )
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(f"--record: cannot write {path}: {'is a folder' if path.is_dir() else 'no such folder'}")
    from llmrun.jobs.recording import FORMAT

    _check_contents("--record", path, f'{{"format": "{FORMAT}"'.encode(), "name a new file, or a recording")


def check_recordable_images(files: Iterable[bytes]) -> None:
    """Raise UsageError if the different files of images are too large for a recording."""
    from llmrun.jobs.recording import MOST_IMAGE_BYTES

    if sum(map(len, {*files})) > MOST_IMAGE_BYTES:
        raise UsageError(
            f"--record: the images are larger than {MOST_IMAGE_BYTES >> 20} MiB in total",
            hint="send fewer or smaller images",
        )


def _check_contents(flag: str, path: Path, beginning: bytes, hint: str) -> None:
    """Raise UsageError unless a file is missing, is empty or begins with these bytes."""
    from llmrun.engine.saved_state.budget import may_overwrite

    try:
        is_ours = may_overwrite(path, beginning)
    except OSError as error:
        raise UsageError(f"{flag}: {path}: {error.strerror}", hint=hint) from error
    if not is_ours:
        raise UsageError(f"{flag}: {path}: this file has other contents and is not overwritten", hint=hint)
