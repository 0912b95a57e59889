"""The flags of `generate` that ask for several answers to one prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

import typer

from llmrun.base.errors import UsageError
from llmrun.cli.arguments.values import one_of
from llmrun.options.settings import RULES

MEAN_LOGPROB: Final = "mean-logprob"
VOTE: Final = "vote"
_CHOICES: Final = (MEAN_LOGPROB, VOTE)
_MOST: Final = 64

Samples = Annotated[
    int | None,
    typer.Option("--samples", metavar="N", min=1, max=_MOST, help="Generate N answers, with seeds SEED to SEED+N-1."),
]
BestOf = Annotated[
    str | None,
    typer.Option(
        "--best-of",
        metavar="RULE",
        help="Print only the best sample, by mean-logprob or vote.",
        autocompletion=one_of(*_CHOICES),
    ),
]
Null = Annotated[bool, typer.Option("-0", "--null", help="End each sample with a NUL byte, and print no headings.")]


@dataclass(frozen=True, slots=True)
class SamplesWanted:
    """The samples that the user asked for.

    best_of  the rule that chooses the sample to print, or None to print all
    null     end each sample with a NUL byte instead of separating them by headings
    """

    count: int
    best_of: str | None
    null: bool


def parse_samples(
    count: int | None, best_of: str | None, *, null: bool, as_json: bool, seed: int | None
) -> SamplesWanted | None:
    """Check the flags, and return None if the user wants a single answer. Raises UsageError."""
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
