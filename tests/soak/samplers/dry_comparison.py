"""Compares DRY with libllama's, for repetitive histories in real vocabularies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from llmrun.engine.samplers.breakers import Breakers, find_breakers
from llmrun.engine.samplers.chain import apply_samplers
from tests.soak.samplers.cases import OFF, Case, place
from tests.soak.samplers.sets import compare_logits
from tests.support.engine.float32_bounds import UNIT
from tests.support.models.llama_samplers import Applied, LlamaSampler
from tests.support.tokenizers.vocabularies import llama_vocabulary, our_tokenizer

if TYPE_CHECKING:
    from llmrun.engine.sampling import Candidates

VOCABULARIES = ("smollm2", "llama-spm", "qwen2")
BREAKERS = ("\n", ":", '"', "*", "\n\n", " the", "ing t", "</s>", "é", "?!")


@cache
def _breakers(vocabulary: str, texts: tuple[str, ...]) -> Breakers:
    return find_breakers(texts, our_tokenizer(vocabulary))


@cache
def _llama_dry(vocabulary: str, numbers: tuple[float, float, int, int], texts: tuple[str, ...]) -> LlamaSampler:
    return LlamaSampler.dry(llama_vocabulary(vocabulary), numbers, texts)


def compare_dry(case: Case, vocabularies: Sequence[str] = VOCABULARIES) -> Iterator[str]:
    """Compare DRY for a repetitive history. With breakers, the parameters are one of a few sets, for speed."""
    name = str(case.one_of(*vocabularies))
    if case.random.random() < 0.5:
        texts, numbers = (), (case.between(0, 3), case.between(1, 4), *case.random.integers(0, 6, 1).tolist(), 0)
        numbers = (*numbers[:3], int(case.one_of(0, 5, 64, 400)))
    else:
        texts = case.one_of(BREAKERS[:4], BREAKERS[:4], BREAKERS[4:])
        numbers = case.one_of((0.8, 1.75, 2, 300), (1.0, 1.0, 1, 40), (0.5, 3.0, 0, 300))
    tokenizer = our_tokenizer(name)
    history = _repetitive(case, tokenizer.encode(_PROSE, add_special=False, parse_special=False).tolist())
    others = case.random.integers(0, tokenizer.vocabulary_size, case.random.integers(1, 400)).tolist()
    ids = np.array(sorted({*history, *others}), np.intp)
    given = ids, case.logits(len(ids)).astype(np.float64)
    multiplier, base, allowed, last_n = numbers
    params = replace(
        OFF, dry_multiplier=multiplier, dry_base=base, dry_allowed_length=allowed, dry_penalty_last_n=last_n
    )
    ours = apply_samplers(given, ["dry"], place(params, tokenizer.vocabulary_size, history, _breakers(name, texts)))
    theirs = _dry_of_llama(name, numbers, texts, history, given)
    penalties = np.abs(given[1] - ours[1])
    yield compare_logits(ours, theirs, 4 * UNIT * (np.abs(given[1]) + penalties))


def _dry_of_llama(
    name: str, numbers: tuple[float, float, int, int], texts: tuple[str, ...], history: list[int], given: Candidates
) -> Applied:
    if texts:
        sampler = _llama_dry(name, numbers, texts)
        sampler.reset()
        sampler.accept(*history)
        return sampler.apply(*given)
    with LlamaSampler.dry(llama_vocabulary(name), numbers, texts) as sampler:
        sampler.accept(*history)
        return sampler.apply(*given)


_PROSE = (
    'He said: "the tea is *very* hot?!"\nShe was making tea, and he was making the tea.\n\n'
    "* the first thing\n* the second thing: étude\n* being there\n"
)


def _repetitive(case: Case, prose: list[int]) -> list[int]:
    """Return tokens with repetitions: of a few tokens, of parts of a text, of a period, or both."""
    random = case.random
    alphabet = case.one_of(prose, prose[: random.integers(1, 8)])
    history: list[int] = []
    while len(history) < random.integers(0, 350):
        begin = int(random.integers(0, len(alphabet)))
        part = alphabet[begin : begin + int(random.integers(1, 30))]
        history += part * int(case.one_of(1, 1, 1, 2, 7))
        if random.random() < 0.3 and history:
            begin = int(random.integers(0, len(history)))
            history += history[begin : begin + int(random.integers(1, 40))]
    return history
