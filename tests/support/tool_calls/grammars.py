"""Runs grammars with llguidance: checks whether they accept a text, and samples texts from them at random."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from random import Random
from typing import Any

import llguidance

from llmrun.backends.scripted import ScriptedTokenizer
from llmrun.engine.templates.tool_format import KEY
from tests.support.tool_calls.formats import Case

# The grammar of Codex's tool `apply_patch`
CODEX_PATCH = """\
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
_CLOSERS = "\"'}])<>\n,/"
_MANY_TOKENS = 400  # from here on, the bias is stronger
_MOST_TOKENS = 5_000


class _Vocabulary:
    """A vocabulary in the form that llguidance expects."""

    bos_token_id = None

    def __init__(self, tokenizer: ScriptedTokenizer) -> None:
        ids = range(tokenizer.vocabulary_size)
        self.eos_token_id = tokenizer.eos_id
        self.special_token_ids = [token for token in ids if token >= 256]
        self.tokens = [
            bytes([token]) if token < 256 else b"\xff" + tokenizer.token_text(token).encode() for token in ids
        ]

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@cache
def compiled_vocabulary(tokenizer: ScriptedTokenizer) -> llguidance.LLTokenizer:
    wrapper = llguidance.TokenizerWrapper(_Vocabulary(tokenizer))
    return llguidance.LLTokenizer(wrapper, eos_token=tokenizer.eos_id, slices=[])


def problem(case: Case, grammar: str) -> str:
    """Return why a grammar is invalid, or ""."""
    vocabulary = compiled_vocabulary(case.tokenizer)
    try:
        failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar, vocabulary)
    except BaseException as error:
        # llguidance 1.9.1 panics where it cuts a long invalid schema in the middle of a character for its message.
        if type(error).__name__ != "PanicException":
            raise
        return f"failed to compile JSON schema: {error}"
    return str(messages[0]) if failed else ""


def token_ids(case: Case, text: str) -> list[int]:
    """Encode a text in which placeholders stand for control tokens."""
    tokens = case.spelling.tokens
    ids: list[int] = []
    for letter in text:
        ids += [tokens[letter]] if letter in tokens else list(letter.encode())
    return ids


def decoded(case: Case, ids: Sequence[int]) -> str:
    """Decode token ids to a text with placeholders. Other control tokens, and invalid UTF-8, are left out."""
    text, data = "", b""
    for token in ids:
        if token in case.spelling.characters:
            text, data = text + data.decode("utf-8", "ignore") + case.spelling.characters[token], b""
        elif token < 256:
            data += bytes([token])
    return text + data.decode("utf-8", "ignore")


def accepts(case: Case, grammar: str, text: str) -> bool:
    """Return True if the grammar accepts this text and allows the answer to end after it."""
    matcher = llguidance.LLMatcher(compiled_vocabulary(case.tokenizer), grammar)
    assert not matcher.is_error(), matcher.get_error()
    ids = token_ids(case, text)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def sampled(case: Case, grammar: str, random: Random, keys: Sequence[str] = ()) -> str:
    """Return a random text of the grammar: each token is drawn from those allowed, with a bias towards closing.

    keys  the names of arguments, which some formats repeat after the value
    """
    matcher = llguidance.LLMatcher(compiled_vocabulary(case.tokenizer), grammar)
    assert not matcher.is_error(), matcher.get_error()
    closers = _closing_texts(case, keys)
    ids: list[int] = []
    while len(ids) < _MOST_TOKENS:
        long = len(ids) > _MANY_TOKENS
        if matcher.is_accepting() and (matcher.is_stopped() or long or random.random() < 0.5):
            return decoded(case, ids)
        if random.random() < (0.7 if long else 0.25):
            taken = _closing(matcher, case, random, closers)
        else:
            taken = [_drawn(matcher.compute_logit_bias(), case, random)]
        assert matcher.consume_tokens(taken) or not taken, matcher.get_error()
        ids += taken
    raise AssertionError(f"no end after {_MOST_TOKENS} tokens: {decoded(case, ids)[:300]!r}")


def _closing(matcher: llguidance.LLMatcher, case: Case, random: Random, closers: Sequence[str]) -> list[int]:
    """Return the tokens of the first closing text that is allowed, in random order, or else of a part of one."""
    part: list[int] = []
    for text in random.sample(closers, len(closers)):
        wanted = token_ids(case, text)
        allowed = matcher.validate_tokens(wanted)
        if allowed == len(wanted):
            return wanted
        part = wanted[:allowed]
    return part


def _closing_texts(case: Case, keys: Sequence[str]) -> list[str]:
    form: Any = case.format.arguments
    suffixes = {each.suffix for each in form.forms.values()}
    texts = {suffix.replace(KEY, key) for suffix in suffixes for key in (keys if KEY in suffix else ("",))}
    texts |= {case.format.call_end, case.format.section_end, form.quote, *_CLOSERS}
    return sorted(filter(None, texts))


def _drawn(mask: bytes, case: Case, random: Random) -> int:
    """Draw one of the allowed tokens: usually a printable character."""
    eos = case.tokenizer.eos_id
    allowed = [token for token, bias in enumerate(mask) if bias and token != eos]
    assert allowed, "nothing is allowed before the end"
    plain = [token for token in allowed if 32 <= token < 127]
    return random.choice(plain if plain and random.random() < 0.9 else allowed)
