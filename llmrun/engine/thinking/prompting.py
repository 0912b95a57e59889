"""Switches thinking on or off in a prompt, and determines whether the answer starts inside a thinking block."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from llmrun.base.errors import UsageError
from llmrun.engine.templates.abilities import TemplateAbilities
from llmrun.engine.thinking.decoder import Spelling, spelled
from llmrun.engine.thinking.styles import recognised_style

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from llmrun.engine.requests import ChatPrompt
    from llmrun.engine.templates.chat_template import ChatTemplate
    from llmrun.engine.templates.process import TemplateProcess
    from llmrun.engine.thinking.styles import ThinkingStyle
    from llmrun.model.tokenizers.base import Tokenizer


@dataclass(frozen=True, slots=True)
class Beginning:
    """The text of a prompt and the initial state of its answer.

    opened     True if the prompt ends inside a thinking block
    may_close  True if the answer may begin with thinking that no tag opens
    """

    text: str
    opened: bool
    may_close: bool


class ModelThinking:
    """The thinking style and the thinking switch of an open model.

    The template is probed on first use, which takes 20 to 200 ms. Raw prompts do not need it.
    """

    def __init__(
        self,
        template: ChatTemplate | None,
        tokenizer: Tokenizer,
        process: TemplateProcess,
        known_pair: Sequence[str] | None = None,
    ) -> None:
        """Store the parameters without probing the template yet.

        process     the process that probes the template
        known_pair  the opening and closing tags; () if the model does not think; None if the tags are not known
        """
        self._source = template.source if template else None
        self._tokenizer = tokenizer
        self._process = process
        self._known_pair = known_pair

    @cached_property
    def style(self) -> ThinkingStyle | None:
        """The model's thinking style, or None if none is recognized, in which case the whole output is the answer."""
        if self._source is None:
            return None
        return recognised_style(self._source, self._tokenizer, self._known_pair, lambda: self._abilities.thinking_tags)

    @cached_property
    def spelling(self) -> Spelling | None:
        """The style's tags spelled in the model's vocabulary."""
        return spelled(self.style, self._tokenizer) if self.style else None

    def prepare(self) -> None:
        """Probe the template now, so that the first chat request does not have to wait for it."""
        self.spelling  # noqa: B018

    @property
    def has_switch(self) -> bool:
        """True if the template has a variable or a word that switches thinking off."""
        return bool(self._variables(on=False) or self._abilities.off_word)

    @property
    def can_think(self) -> bool:
        """True if the model has a thinking style or a thinking switch."""
        return self.style is not None or self.has_switch

    def require(self) -> None:
        """Raise UsageError if the model does not support thinking."""
        if not self.can_think:
            raise UsageError(
                "thinking cannot be switched on: this model's chat template has no thinking switch, and its thinking "
                "tags are unknown",
                hint="leave thinking off; this model answers directly",
            )

    def asked(self, prompt: ChatPrompt, on: bool | None) -> ChatPrompt:
        """Return the prompt with template variables that switch thinking on or off, or the word that switches it off.

        Variables that the caller has set take precedence. Raises UsageError if `on` is True and the model does not
        support thinking.
        """
        if on:
            self.require()
        variables = {} if on is None else self._variables(on=on)
        asked = replace(prompt, template_kwargs={**variables, **prompt.template_kwargs})
        if on is False and self._abilities.off_word:
            asked = replace(asked, messages=_with_word(prompt.messages, self._abilities.off_word))
        return asked

    def begun(self, rendered: str, on: bool | None, given: Mapping[str, object] | None = None) -> Beginning:
        """Return the prompt and the initial state of its answer. `given` are the caller's template variables.

        If `on` is False, a thinking block that the prompt leaves open is closed. If there is none and the template has
        no thinking switch, an empty thinking block is appended, unless the style is only a guess. With thinking off, a
        tag later in the answer closes nothing, so a server can stream the answer at once.
        """
        style = self.style
        if style is None:
            return Beginning(rendered, opened=False, may_close=False)
        opened = rendered.rstrip().endswith(style.opening)
        if on is False and opened:
            rendered += style.ending if rendered[-1:].isspace() else style.blank + style.ending
        elif on is False and not self.has_switch and not style.guessed:
            rendered += style.empty_block
        end = rendered.rstrip()
        closed = any(end.endswith(text.strip()) for text in (*style.closing, style.ending))
        untouched = on is None and not {*(given or ())} & {*self._abilities.reasoning_off}
        off = on is False or (untouched and self._abilities.is_off_by_default)
        may_close = not (off or closed or style.guessed)
        return Beginning(rendered, opened=end.endswith(style.opening), may_close=may_close)

    @cached_property
    def _abilities(self) -> TemplateAbilities:
        return self._process.abilities(self._source) if self._source else TemplateAbilities()

    def _variables(self, *, on: bool) -> dict[str, object]:
        """Return the variables that switch thinking on or off. They may be empty; see TemplateAbilities."""
        return dict(self._abilities.reasoning_on if on else self._abilities.reasoning_off)


def _with_word(messages: Sequence[Mapping[str, Any]], word: str) -> list[Mapping[str, Any]]:
    """Return the messages with a word appended to the last user message, if its content is plain text."""
    changed = [*messages]
    for at in reversed(range(len(changed))):
        if changed[at].get("role") == "user":
            content = changed[at].get("content")
            if isinstance(content, str):
                changed[at] = {**changed[at], "content": f"{content} {word}"}
            break
    return changed
