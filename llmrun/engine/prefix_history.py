"""Remembers recent prompts, to explain why a prompt did not reuse more of the KV cache.

Explanations run in the thread that prepares requests, never between two steps. A request that reuses what it can costs
a comparison with each remembered prompt, and only a miss costs a search for similar texts.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
from msgspec import structs

from llmrun.base.errors import shown
from llmrun.engine.prompt_parts import answer_after, continues, message_name, place_of
from llmrun.engine.requests import ChatPrompt, PrefixCause, PrefixReport, without_files
from llmrun.model.tokenizers.text_tokenizer import decode_spelled

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.engine.answer import Answer
    from llmrun.engine.thinking import ThinkingStyle
    from llmrun.model.tokenizers.text_tokenizer import Tokenizer

LEAST: Final = 16  # fewer lost tokens are not worth an explanation
_LEAST_EVICTED: Final = 64  # smaller losses are often short answers, which a repeated request replaces
_MOST_PROMPTS: Final = 32
_MOST_COMPARED: Final = 12  # the newest ones; comparing two prompts of 19,000 tokens takes about a millisecond
_MOST_TOKENS: Final = 1 << 19  # of all remembered prompts; 2 MiB
_MOST_BYTES: Final = 8 << 20  # the same in JSON; a template may leave out most of a conversation
_FOREIGN: Final = 64  # shorter prefixes are often the template's own text
_SHARE: Final = 0.25  # texts that share fewer of their remaining tokens are not similar
_WINDOW: Final = 8  # tokens per hash; shorter sequences are often common words
_MOST_HASHES: Final = 4096  # per prompt, approximately
_AROUND: Final = 64  # tokens after the common prefix whose texts are compared
_SHOWN: Final = 40  # characters of each text in a report
_BEFORE: Final = 20  # how many of them precede the difference, unless a line begins later
_MOST_BEFORE: Final = 34  # the same if a word begins before them
_MOST_THOUGHT: Final = 8192  # tokens of the earlier text in which a thinking block must end
_EASED: Final = 8  # tokens at the end of a prompt that begin the answer, and may be absent when the answer comes back


class _Seen:
    """An earlier request.

    computed  the number of its tokens that were in the cache when it ended, or None if it may still run
    ended     when it ended, in seconds of `time.perf_counter`; infinite if it may still run
    """

    def __init__(self, answer: Answer) -> None:
        self.id, self.scope, self.prompt = answer.request_id, answer.prefix_scope, without_files(answer.request.prompt)
        self.adapters = _adapters_of(answer)
        self.n_bytes = len(msgspec.json.encode(self.prompt))
        self.n_prompt = answer.prompt_tokens
        self.tokens = _tokens_of(answer)[: answer.prompt_tokens]
        self.computed: int | None = None
        self.ended = math.inf
        self._answer: Answer | None = answer
        self._hashes: tuple[NDArray[np.uint64], NDArray[np.intp], int] | None = None

    def refresh(self) -> None:
        """Take over the answer's tokens once it has ended."""
        if self._answer is not None and self._answer.computed_tokens is not None:
            tokens = _tokens_of(self._answer)
            self.computed = min(self._answer.computed_tokens, len(tokens))
            self.tokens = tokens[: max(self.computed, self.n_prompt)]
            self.ended = [self._answer.submitted, *self._answer.step_times][-1]
            self._answer = self._hashes = None

    @property
    def hashes(self) -> tuple[NDArray[np.uint64], NDArray[np.intp], int]:
        if self._hashes is None:
            self._hashes = _hashes_of(self.tokens)
        return self._hashes


class PrefixHistory:
    """The recent prompts of one engine.

    drops  when the last requests lost tokens in the cache, by id, in seconds of `time.monotonic`
    style  the style of the model's thinking, or None
    key    identifies the model, for PrefixReport.beginnings
    opened when the engine was opened, in seconds of `time.monotonic`
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        drops: Mapping[int, float],
        style: ThinkingStyle | None,
        *,
        key: str = "",
        opened: float = 0.0,
    ) -> None:
        self._tokenizer, self._drops, self._style, self._key, self._opened = tokenizer, drops, style, key, opened
        self._seen: deque[_Seen] = deque(maxlen=_MOST_PROMPTS)

    def add(self, answer: Answer) -> None:
        """Remember a request that was queued."""
        self._seen.append(_Seen(answer))
        while len(self._seen) > 1 and (
            sum(len(one.tokens) for one in self._seen) > _MOST_TOKENS
            or sum(one.n_bytes for one in self._seen) > _MOST_BYTES
        ):
            self._seen.popleft()

    def expected(self, answer: Answer) -> PrefixReport:
        """Explain how much of its prompt a request will probably reuse. Call `Engine.predicted` first."""
        assert answer.expected is not None, "nothing is predicted"
        return self.explained(answer, answer.expected.n, waits=answer.expected.leader is not None)

    def explained(self, answer: Answer, reused: int, *, waits: bool, found: int = 0) -> PrefixReport:
        """Explain why a request reuses `reused` tokens of its prompt.

        waits  whether the request waits until another request has computed these tokens
        found  how many tokens the cache contained when the request began, or 0 if it has not begun
        """
        tokens = _tokens_of(answer)[: answer.prompt_tokens]
        report = self._missed(answer, tokens, reused, found)
        if not report.cause and waits:
            report = structs.replace(report, cause=PrefixCause.WAITED)
        return structs.replace(report, beginnings=_beginnings(f"{self._key} {answer.prefix_scope}", tokens))

    def _others(self, answer: Answer) -> list[_Seen]:
        """Return the requests before this one, the newest first."""
        others = [one for one in self._seen if one.id < answer.request_id]
        for one in others:
            one.refresh()
        return others[::-1]

    def _missed(self, answer: Answer, tokens: NDArray[np.int32], reused: int, found: int) -> PrefixReport:
        total = len(tokens)
        commons = {one: min(_common(one.tokens, tokens), total - 1) for one in self._others(answer)}
        own = {one: common for one, common in commons.items() if one.scope == answer.prefix_scope}
        same = {one: common for one, common in own.items() if one.adapters == _adapters_of(answer)}
        # Requests that run at the same time lose nothing: one of them waits for the other, or copies its tokens.
        began = math.inf if answer.prefill_started is None else answer.prefill_started
        ended = {one: one.computed or 0 for one in commons if one.ended <= began}

        def lost(among: Mapping[_Seen, int]) -> int:
            return max((min(common, ended.get(one, 0)) for one, common in among.items()), default=0) - reused

        def report(cause: PrefixCause, lost: int, ago_s: float = 0.0) -> PrefixReport:
            return PrefixReport(total, reused, lost, cause, ago_s=ago_s)

        if answer.describes_prompt and lost(own) >= LEAST:
            return report(PrefixCause.LOGPROBS, lost(own))
        if (n := lost(same)) >= LEAST:
            if found - reused >= LEAST:
                return report(PrefixCause.STATES, n)
            if n >= _LEAST_EVICTED:
                had = [one for one, common in same.items() if min(common, ended.get(one, 0)) - reused >= LEAST]
                return report(PrefixCause.EVICTED, n, self._evicted_ago(had))
        had_all = reused + max(lost(same), 0)
        if (n := lost(own)) >= had_all - reused + LEAST:
            return report(PrefixCause.ADAPTER, n)
        if (n := max((common for one, common in same.items() if one in ended), default=0)) >= had_all + LEAST:
            return report(PrefixCause.UNFINISHED, n - reused)
        if total - reused >= LEAST and (near := self._nearest(answer, tokens, same, reused)) is not None:
            one, n = near
            return structs.replace(self._differing(answer, one, same[one]), reused=reused, lost=n)
        if reused >= min(_FOREIGN, total // 2) or any(common >= len(one.tokens) - 1 for one, common in same.items()):
            return report(PrefixCause.REUSED, 0)
        # Clients are told "first prompt" in both cases, so the requests of other keys must change nothing else.
        others = {one: common for one, common in commons.items() if one not in own}
        is_foreign = (n := lost(others)) >= min(_FOREIGN, total // 2)
        opened_ago = time.monotonic() - self._opened
        return report(PrefixCause.OTHER_KEY, n, opened_ago) if is_foreign else report(PrefixCause.FIRST, 0, opened_ago)

    def _evicted_ago(self, had: Sequence[_Seen]) -> float:
        drops = [at for one in had if (at := self._drops.get(one.id)) is not None]
        return max(0.0, time.monotonic() - max(drops)) if drops else 0.0

    def _nearest(
        self, answer: Answer, tokens: NDArray[np.int32], same: Mapping[_Seen, int], reused: int
    ) -> tuple[_Seen, int] | None:
        """Return the earlier request that, after the common prefix, shares the most tokens with this request.

        Also returns approximately how many tokens are lost because of the difference. Returns None if no earlier
        request is similar. Requests whose common prefix is shorter than the reused one do not explain the difference.
        """
        best, best_lost, ours = None, 0, None
        near = [(one, common) for one, common in same.items() if common > reused - LEAST]
        for one, common in near[:_MOST_COMPARED]:
            rest = min(len(tokens), len(one.tokens)) - common
            if rest <= max(best_lost, LEAST - 1):
                continue
            if continues(answer.request.prompt, one.prompt) and common >= one.n_prompt - _EASED:
                n = len(one.tokens) - common
            else:
                ours = _hashes_of(tokens) if ours is None else ours
                n = min(_shared(ours, one.hashes, common), rest)
                n = n if n >= _SHARE * rest else 0
            if n > best_lost:
                best, best_lost = one, n
        return (best, best_lost) if best is not None and best_lost >= LEAST else None

    def _differing(self, answer: Answer, one: _Seen, common: int) -> PrefixReport:
        """Describe the first difference between a prompt and an earlier one that shares its first `common` tokens."""
        ours: list[int] = _tokens_of(answer)[: answer.prompt_tokens].tolist()
        theirs, prompt = one.tokens.tolist(), answer.request.prompt
        if answer.images is not None and (image := answer.images.at(common)) is not None:
            where = answer.images.images[image].name
            return PrefixReport(len(ours), common, cause=PrefixCause.DIFFERS, where=where)
        text, before = self._text(ours), self._text(ours[:common])
        here, there = self._text(ours[common : common + _AROUND]), self._text(theirs[common : common + _AROUND])
        equal = _equal(here, there)
        at = len(before) + equal
        line = text.rfind("\n", 0, at) + 1
        word = text.rfind(" ", max(0, at - _MOST_BEFORE), max(0, at - _BEFORE)) + 1
        start = line if at - line <= _MOST_BEFORE else word or at - _BEFORE
        old, new = (shown((before + each)[start : start + _SHOWN]) for each in (there, here))
        report = PrefixReport(len(ours), common, cause=PrefixCause.DIFFERS, old=old, new=new)
        if isinstance(prompt, ChatPrompt) and isinstance(one.prompt, ChatPrompt):
            answered = continues(prompt, one.prompt) and common >= one.n_prompt - _EASED
            number = len(one.prompt.messages) if answered else answer_after(prompt, text, at)
            where = message_name(prompt, one.prompt, number)
            if self._drops_thinking(theirs, ours, common):
                has_it = any(prompt.messages[number].get(key) for key in ("reasoning_content", "thinking", "reasoning"))
                detail = "left out by the template" if has_it else "not sent back by the client"
                return structs.replace(report, cause=PrefixCause.THINKING, where=where, detail=detail)
            if answered:
                rest = self._text(theirs[common:])
                same_text = text[len(before) :].startswith(rest.removesuffix("\ufffd"))
                cause = PrefixCause.RETOKENIZED if same_text else PrefixCause.ANSWER
                return structs.replace(report, cause=cause, where=where)
        place = place_of(prompt, one.prompt, text, at)
        cause = PrefixCause.TOOLS if place.detail else PrefixCause.DIFFERS
        return structs.replace(report, cause=cause, where=place.where, name=place.name, detail=place.detail)

    def _drops_thinking(self, theirs: Sequence[int], ours: Sequence[int], common: int) -> bool:
        """Return whether the earlier text has a thinking block at the difference, which this prompt leaves out."""
        if self._style is None:
            return False
        opening, start = self._style.opening.strip(), max(0, common - _EASED)
        thought = self._text(theirs[start : common + _MOST_THOUGHT])
        opened = thought.find(opening)
        if not 0 <= opened <= len(self._text(theirs[start:common])) + len(opening):
            return False
        ends = [(thought.find(tag.strip(), opened), tag.strip()) for tag in self._style.closing]
        end, tag = min(((end, tag) for end, tag in ends if end >= 0), default=(-1, ""))
        if end < 0:
            return False
        here = self._text(ours[common : common + _AROUND]).strip()[:12]
        rest = thought[end + len(tag) :].strip()
        return bool(here) and here in rest[: _SHOWN + len(here)] and not here.startswith(thought[opened:][: len(here)])

    def _text(self, tokens: Sequence[int]) -> str:
        words = [token for token in tokens if token >= 0]  # without the rows of images
        return decode_spelled(self._tokenizer, words).decode("utf-8", "replace")


def _tokens_of(answer: Answer) -> NDArray[np.int32]:
    """Return the tokens of a request. The rows of different images have different negative numbers."""
    if answer.images is None:
        return np.array(answer.tokens, np.int32)
    numbers = np.array(answer.images.marked(answer.tokens, 0), np.int64)
    return np.where(numbers < 0, -(-numbers % 2**31) - 1, numbers).astype(np.int32)


def _adapters_of(answer: Answer) -> object:
    return answer.adapters and (tuple(answer.adapters.scales), tuple(answer.adapters.starts))


def _common(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    n = min(len(one), len(other))
    different = one[:n] != other[:n]
    return int(different.argmax()) if different.any() else n


def _equal(one: str, other: str) -> int:
    """Return the number of characters with which both texts begin."""
    pairs = zip(one, other, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _hashes_of(tokens: NDArray[np.int32]) -> tuple[NDArray[np.uint64], NDArray[np.intp], int]:
    """Return hashes of sequences of `_WINDOW` tokens, their positions, and n if about one of n hashes is kept.

    The value of a hash decides whether the hash is kept, so equal texts keep equal hashes at all positions.
    """
    n = max(len(tokens) - _WINDOW + 1, 0)
    hashes = np.zeros(n, np.uint64)
    for shift in range(_WINDOW if n else 0):
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + tokens[shift : shift + n].astype(np.uint64) + np.uint64(1)
    hashes ^= hashes >> np.uint64(29)
    one_of = 1 << max(0, (n // _MOST_HASHES).bit_length())
    at = np.flatnonzero(hashes % np.uint64(one_of) == 0)
    return hashes[at], at, one_of


def _shared(
    ours: tuple[NDArray[np.uint64], NDArray[np.intp], int],
    theirs: tuple[NDArray[np.uint64], NDArray[np.intp], int],
    start: int,
) -> int:
    """Return approximately how many sequences of tokens after `start` the prompts have in common."""
    one_of = max(ours[2], theirs[2])
    ours_there, theirs_there = (
        np.unique(hashes[(at >= start) & (hashes % np.uint64(one_of) == 0)]) for hashes, at, _ in (ours, theirs)
    )
    return one_of * len(np.intersect1d(ours_there, theirs_there, assume_unique=True))


def _beginnings(key: str, tokens: NDArray[np.int32]) -> tuple[str, ...]:
    hashed, done, found = hashlib.blake2b(key.encode(), digest_size=8), 0, []
    length = 2 * LEAST
    while length <= len(tokens):
        hashed.update(tokens[done:length].tobytes())
        found.append(hashed.hexdigest())
        done, length = length, 2 * length
    return tuple(found)
