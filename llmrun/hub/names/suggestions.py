"""Builds hints for unknown model names. Each hint is one line of text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from llmrun.formats.gguf.format import MAGIC
from llmrun.hub.names.file_names import quantization_named
from llmrun.hub.names.model_order import nearest_in_size, smallest_first

_MOST = 3  # the maximum number of names in a hint
_MOST_SIZES = 5  # the maximum number of a family's models in a hint
_LONGEST = 100  # characters; the rest of a name is ignored in comparisons
_LIKE_A_QUANTIZATION = r"[-:](?:i?q|tq|b?f|fp|mxfp)\d"  # also matches quantizations that do not exist, such as "-q9"


def for_name(name: str, models: Sequence[str], others: Sequence[str] = ()) -> str:
    """Return a hint for an unknown model name. `models` are the known names, and `others` are aliases."""
    if _is_gguf_file(name):
        return f"to run the file with that name, use ./{name}"
    wanted = name.lower()[:_LONGEST]
    families = list(dict.fromkeys(model.partition(":")[0] for model in models))
    all_names = [*models, *others, *families]
    if same := _same_letters(wanted, all_names):
        return _did_you_mean(same)
    family, separator, variant = wanted.partition(":")
    if separator and family in families:
        sizes = [model for model in models if model.partition(":")[0] == family]
        if quant := quantization_named(variant):
            return _did_you_mean([f"{sizes[0]}-{quant.lower()}"])
        if begun := [size for size in sizes if re.match(re.escape(size) + _LIKE_A_QUANTIZATION, wanted)]:
            model = max(begun, key=len)
            return f"did you mean {model}? `llmrun fit {model}` lists its quantizations"
        return f"{family} is available as {sizes_near(wanted, sizes)}"
    related = [family for family in families if len(wanted) > 2 and (wanted in family or family in wanted)]
    more = f" `llmrun search {wanted}` lists all" if sum(wanted in family for family in related) > _MOST else ""
    if near := _near(wanted, all_names) or related[:_MOST]:
        return _did_you_mean(near) + more
    return (
        f"`llmrun search` lists the models of all {len(families)} families; "
        "use hf:owner/name for a repository on the Hub, or ./NAME.gguf for a file"
    )


def sizes_near(wanted: str, sizes: Sequence[str]) -> str:
    """List a family's models as text, the smallest first.

    If there are many, only the models closest to `wanted` in name or size are listed, followed by the command that
    lists all of them.
    """
    likely = dict.fromkeys([*_near(wanted, sizes)[:2], *nearest_in_size(wanted, sizes)])
    listed = ", ".join(smallest_first(list(likely)[:_MOST_SIZES]))
    if len(sizes) <= _MOST_SIZES:
        return listed
    return f"{listed}; `llmrun search {sizes[0].partition(':')[0]}` lists all {len(sizes)}"


def for_repository(repository: str, known: Iterable[str]) -> str:
    """Return a hint for a repository that does not exist or lacks an owner, or "" if no known name is similar."""
    wanted = repository.lower()[:_LONGEST]
    repositories = [name for name in known if name.lower() != wanted]  # the Hub may hide a known one
    own_name = _own_name(wanted)
    same = [name for name in repositories if own_name and _own_name(name.lower()) == own_name]
    found = same or _near(wanted, repositories) or _near(own_name, repositories, _own_name)
    return _did_you_mean([f"hf:{name}" for name in found[:_MOST]]) if found else ""


def _did_you_mean(names: Sequence[str]) -> str:
    return "did you mean " + " or ".join(names) + "?"


def _same_letters(wanted: str, names: Iterable[str]) -> list[str]:
    """Return the names that differ from `wanted` only in punctuation, such as "qwen3-4b" and "qwen3:4b"."""
    letters = _letters(wanted)
    return [name for name in dict.fromkeys(names) if letters and _letters(name) == letters][:_MOST]


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _own_name(repository: str) -> str:
    return repository.rpartition("/")[2]


def _near(wanted: str, names: Sequence[str], compared: Callable[[str], str] = str) -> list[str]:
    import difflib

    keys: dict[str, str] = {}
    for name in names:
        keys.setdefault(compared(name).lower(), name)
    return [keys[key] for key in difflib.get_close_matches(wanted, list(keys), n=_MOST)]


def _is_gguf_file(name: str) -> bool:
    try:
        if not Path(name).is_file():
            return False
        with Path(name).open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except (OSError, ValueError):  # the system cannot look up this name, or the file is not readable
        return False
