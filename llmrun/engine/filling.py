"""Encodes prompts for filling in the middle, with the tokens of llama-server's `/infill`.

    [repository]myproject⏎[file]name⏎text...[file]filename⏎[BOS][prefix]text[suffix]text[middle]

"myproject" and "filename" stand for names that llama-server does not ask for. The repository and this file's name are
left out if the vocabulary has no tokens for them; other files then follow "--- snippet ---".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from llmrun.base.errors import UsageError

if TYPE_CHECKING:
    from llmrun.engine.requests import FillPrompt
    from llmrun.model.tokenizers.base import Tokenizer
    from llmrun.model.tokenizers.fill_in_middle import FillTokens

_BATCH: Final = 2048  # llama-server's default for -b, which determines how much of a text it keeps
_REPOSITORY: Final = "myproject\n"
_CURRENT_FILE: Final = "filename\n"
_BETWEEN_FILES: Final = "\n\n--- snippet ---\n\n"


class Filled(NamedTuple):
    """The tokens of a prompt, and how many tokens of its texts were left out."""

    tokens: list[int]
    cut: int


def encode_fill(prompt: FillPrompt, tokenizer: Tokenizer, context: int) -> Filled:
    """Return the tokens of a prompt for a context of this many tokens.

    Raises UsageError if the vocabulary has no tokens for filling in the middle.
    """
    special = tokenizer.fill_tokens
    if special is None:
        raise UsageError(
            "this model cannot fill in the middle: its vocabulary has no tokens for it",
            hint="use a model for code, such as qwen2.5-coder:1.5b",
        )
    line: list[int] = tokenizer.encode(prompt.line, add_special=False, parse_special=True).tolist()
    prefix, suffix = _plain(tokenizer, prompt.prefix), _plain(tokenizer, prompt.suffix)
    others = _other_files(prompt, special, tokenizer)
    texts = [prefix, suffix, others if prompt.files else []]
    if prompt.cut:
        others = _last(others, max(0, context - _BATCH + 2))
        prefix = _last(prefix, 3 * (_BATCH // 4))
        suffix = suffix[: max(0, _BATCH // 4 - 2 - len(line))]
    kept = [prefix, suffix, others if prompt.files else []]
    bos = [] if special.bos is None else [special.bos]
    before, after = [special.prefix, *prefix, *line], [special.suffix, *suffix]
    return Filled([*others, *bos, *before, *after, special.middle], sum(map(len, texts)) - sum(map(len, kept)))


def _other_files(prompt: FillPrompt, special: FillTokens, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens that precede the BOS: the name of the repository, other files, and the name of this file."""

    def begin_file(name: str) -> list[int]:
        return [] if special.file is None else [special.file, *_plain(tokenizer, name)]

    tokens = [] if special.repository is None else [special.repository, *_plain(tokenizer, _REPOSITORY)]
    for file in prompt.files:
        tokens += begin_file(f"{file.name}\n") or _plain(tokenizer, _BETWEEN_FILES)
        tokens += _plain(tokenizer, file.text)
    return tokens + begin_file(_CURRENT_FILE)


def _plain(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special=False, parse_special=False).tolist()
    return ids


def _last(tokens: list[int], most: int) -> list[int]:
    return tokens[max(0, len(tokens) - most) :]
