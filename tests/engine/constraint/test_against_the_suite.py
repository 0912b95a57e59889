"""The JSON Schema test suite: what llguidance accepts, and what the final validation says about it.

`suite_gaps.txt` lists the invalid instances that llguidance accepts. Lines that end in "not caught" pass the final
validation as well. After an update of llguidance, the list may change: write the new one after a look at each line.
"""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLTokenizer

from llmrun.base.errors import UsageError
from llmrun.engine.constraint.answer_checks import verdict_of
from tests.support.constraint.corpora import SuiteCase, suite_cases
from tests.support.constraint.matchers import (
    accepts,
    allowed_tokens,
    byte_tokenizer,
    checked_schema,
    matcher,
    schema_grammar,
    wrapped_tokenizer,
)

GAPS = Path(__file__).with_name("suite_gaps.txt")
OURS = "llama-bpe"  # 128,000 tokens
pytestmark = pytest.mark.push

Compiled = tuple[SuiteCase, str, list[tuple[str, str, bool, bool]]]  # instances: name, text, valid, accepted


def tokens_of(tokenizer: LLTokenizer, text: str) -> list[int]:
    return list(tokenizer.tokenize_bytes(text.encode()))


@cache
def compiled() -> tuple[Compiled, ...]:
    """Return the schemas that llguidance compiles, with its verdicts."""
    found = []
    for case in suite_cases():
        try:
            grammar = schema_grammar(checked_schema(json.dumps(case.schema)))
        except UsageError:
            continue
        matching = matcher(byte_tokenizer(), grammar)
        if matching.is_error():
            continue
        instances = []
        for name, value, valid in case.instances:
            text = json.dumps(value, ensure_ascii=False)
            instances.append((name, text, valid, accepts(matching, tokens_of(byte_tokenizer(), text))))
        found.append((case, grammar, instances))
    return tuple(found)


def verdict(text: str, schema: Any) -> str:
    """Return the kind of the final verdict, in this process: 2,500 requests to another one take too long."""
    return verdict_of(text, schema)[0]


def test_two_thirds_of_the_suite_compile() -> None:
    assert 0.6 * len(suite_cases()) < len(compiled()) < 0.8 * len(suite_cases())
    kinds = Counter((valid, accepted) for _, _, instances in compiled() for _, _, valid, accepted in instances)
    assert kinds[True, True] > 2700
    assert kinds[False, False] > 2000
    assert kinds[True, False] < 160  # such as 1.0 for an integer, or another order of properties


def test_invalid_answers_that_pass_are_known() -> None:
    gaps = [
        f"{case.name} | {name} | {'caught' if verdict(text, case.schema) == 'invalid' else 'not caught'}"
        for case, _, instances in compiled()
        for name, text, valid, accepted in instances
        if accepted and not valid
    ]
    assert gaps == GAPS.read_text(encoding="utf-8").splitlines()


@pytest.mark.night
def test_no_valid_answer_is_called_invalid() -> None:
    refused = [
        (case.name, name, verdict_of(text, case.schema))
        for case, _, instances in compiled()
        for name, text, valid, accepted in instances
        if valid and accepted and verdict(text, case.schema) != "valid"
    ]
    # Python's `re` has no Unicode properties.
    assert [each for each in refused if each[2][0] == "invalid" or "bad escape \\p" not in each[2][1]] == []
    assert len(refused) < 60


@pytest.mark.night
def test_our_tokenizer_leads_to_the_same_verdicts() -> None:
    tokenizer = wrapped_tokenizer(OURS)
    for case, grammar, instances in compiled():
        matching = matcher(tokenizer, grammar)
        for name, text, _, accepted in instances:
            assert accepts(matching, tokens_of(tokenizer, text)) == accepted, (case.name, name)


@pytest.mark.night
def test_the_masks_allow_what_the_parser_accepts() -> None:
    tokenizer = wrapped_tokenizer(OURS)
    steps = 0
    for case, grammar, instances in compiled()[::7]:
        compiled_once = matcher(tokenizer, grammar)
        for name, text, _, accepted in instances:
            matching = compiled_once.deep_copy()
            allowed_all = True
            for token in tokens_of(tokenizer, text):
                allowed = token in allowed_tokens(matching)
                # Where the text is forced, masks allow only the tokens that the tokenizer would choose for it.
                forced = matching.compute_ff_tokens()
                assert matching.validate_tokens([token]) == allowed or (forced and not allowed), (case.name, name)
                steps += 1
                if not allowed or matching.is_stopped():
                    allowed_all = False
                    break
                matching.consume_token(token)
            assert not accepted or allowed_all, (case.name, name)
    assert steps > 1000
