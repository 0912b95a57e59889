"""Compiles a grammar with llguidance, to see whether that succeeds. Runs only in the isolated process.

llguidance reports most problems, but a few crash or block the process that it runs in. In 1.9.1, the schema
`{"const": -9223372036854775808}`, chains of 3,000 `$ref`s and chains of 3,000 grammar rules overflow its stack, and 20
patterns in an `allOf` compile for minutes. A crash or a timeout here does not affect llmrun.
"""

from __future__ import annotations

import threading

from llguidance import LLMatcher, LLTokenizer

from llmrun.engine.constraint.parser import new_matcher, parser_limits

# llguidance recurses for each rule and `$ref`. llmrun compiles with eight times this stack (limits.on_large_stack), so
# what fits here fits there.
_STACK_BYTES = 2 << 20
_STEPS = 8  # tokens to try; the parser's limits apply to each of them
_NO_TOKENIZER = "no tokenizer"  # begins the warning about special tokens, which only the real tokenizer knows


def problem(grammar: str) -> str:
    """Return llguidance's message if it cannot compile a grammar or begin an answer, or ""."""
    found: list[str] = []
    before = threading.stack_size(_STACK_BYTES)
    try:
        thread = threading.Thread(target=lambda: found.append(_problem(grammar)))
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    return found[0] if found else "the compiler ended without a result"


def _problem(grammar: str) -> str:
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=parser_limits())
    warnings = [message for message in messages if not message.startswith(_NO_TOKENIZER)]
    if failed or warnings:
        return warnings[0]
    if messages:
        return ""
    matcher = new_matcher(LLTokenizer("byte"), grammar)
    for _ in range(_STEPS):
        mask = matcher.compute_bitmask()
        if matcher.is_error() or matcher.is_stopped():
            break
        matcher.consume_token(_likely(mask))
    return str(matcher.get_error()) if matcher.is_error() else ""


def _likely(mask: bytes) -> int:
    """Return an allowed byte, preferably not whitespace. Bit i of the mask belongs to byte i."""
    allowed = int.from_bytes(mask, "little")
    visible = allowed >> 33 << 33 or allowed
    return (visible & -visible).bit_length() - 1
