"""The sampling parameters whose values are strings: lists of samplers and of DRY's sequence breakers.

The names, aliases and defaults are from llama.cpp (common/sampling.cpp, common/common.h).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

ADAPTIVE_P: Final = "adaptive_p"
INFILL: Final = "infill"
TEMPERATURE: Final = "temperature"
DEFAULT_SAMPLERS: Final = "penalties;dry;top_n_sigma;top_k;typ_p;top_p;min_p;xtc;temperature"
DEFAULT_BREAKERS: Final = r'["\n", ":", "\"", "*"]'

_SAMPLERS = (*DEFAULT_SAMPLERS.split(";"), INFILL, ADAPTIVE_P)
_ALIASES = {
    "nucleus": "top_p",
    "temp": TEMPERATURE,
    "typ": "typ_p",
    **{name.replace("_", joint): name for name in _SAMPLERS for joint in ("", "-", "_")},
}


class ListOfTexts(NamedTuple):
    """The notation of a parameter whose value is a string with a list of texts.

    parse   returns the listed texts; raises ValueError if the value is invalid
    words   describes the valid values in error messages
    advice  returns advice for a user who entered an invalid value
    """

    parse: Callable[[str], Sequence[str]]
    words: str
    advice: Callable[[str], str]


@functools.lru_cache(maxsize=64)
def parse_samplers(text: str) -> tuple[str, ...]:
    """Return llama.cpp's names of the samplers in a list such as "top-k;temp". Raises ValueError for unknown names."""
    names = [name.strip(" ") for name in text.lower().split(";")]
    unknown = [name for name in names if name not in _ALIASES]
    if unknown:
        raise ValueError(unknown[0])
    return tuple(_ALIASES[name] for name in names)


def _sampler_advice(text: str) -> str:
    import difflib

    try:
        parse_samplers(text)
    except ValueError as error:
        near = difflib.get_close_matches(str(error), list(_ALIASES), n=1)
        return f"did you mean {_ALIASES[near[0]]}?" if near else "known: " + ", ".join(_SAMPLERS)
    return ""


@functools.lru_cache(maxsize=64)
def parse_breakers(text: str) -> tuple[str, ...]:
    """Return the breakers in a JSON list of strings or in a single string, or () for "none". Raises ValueError.

    A value that looks like a JSON list must be a valid one, so that a typo does not become a breaker.
    """
    breakers: object = [text]
    if text == "none":
        breakers = []
    elif text.startswith("[") and text.endswith("]"):
        import json

        try:
            breakers = json.loads(text)
        except RecursionError as error:
            raise ValueError(text) from error
    if not isinstance(breakers, list) or not all(isinstance(one, str) and one for one in breakers):
        raise ValueError(text)
    for one in breakers:
        one.encode()  # lone surrogates raise UnicodeEncodeError, which is a ValueError
    return tuple(breakers)


SAMPLER_LIST: Final = ListOfTexts(parse_samplers, "a list of samplers, as in top_k;top_p;temperature", _sampler_advice)
BREAKER_LIST: Final = ListOfTexts(
    parse_breakers, "a string or a JSON list of strings", lambda text: r"""for example ["\n", ":"], or none"""
)
