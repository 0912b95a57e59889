"""How a prompt asks a model to think or not, and where its answer begins because of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from llmrun.engine.templates.abilities import TemplateAbilities
from llmrun.engine.thinking.decoder import Spelling, spelled
from llmrun.engine.thinking.styles import recognised_style
from llmrun.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmrun.engine.requests import ChatPrompt
    from llmrun.engine.templates.chat_template import ChatTemplate
    from llmrun.engine.templates.process import TemplateProcess
    from llmrun.engine.thinking.styles import ThinkingStyle
    from llmrun.tokenizers.base import Tokenizer


@dataclass(frozen=True, slots=True)
class Beginning:
    """The text of a prompt, and how the answer to it begins.

    opened     in the middle of thinking
    may_close  with thinking, perhaps, that nothing opens: the prompt leaves it to the model
    """

    text: str
    opened: bool
    may_close: bool


class ModelThinking:
    """What is known of an open model's thinking. It is found out when it is first asked for, which may take as long as
    trying the template does: a raw prompt never asks."""

    def __init__(
        self,
        template: ChatTemplate | None,
        tokenizer: Tokenizer,
        process: TemplateProcess,
        known_pair: Sequence[str] | None = None,
    ) -> None:
        """`process` tries the template. `known_pair`: the two tags of a model whose template does not tell them; () for
        one that does not think."""
        self._source = template.source if template else None
        self._tokenizer = tokenizer
        self._process = process
        self._known_pair = known_pair

    @cached_property
    def style(self) -> ThinkingStyle | None:
        """None: none is recognised, and all it writes is its answer."""
        if self._source is None:
            return None
        return recognised_style(self._source, self._tokenizer, self._known_pair, lambda: self._abilities.thinking_tags)

    @cached_property
    def spelling(self) -> Spelling | None:
        """The style in the model's vocabulary."""
        return spelled(self.style, self._tokenizer) if self.style else None

    def prepare(self) -> None:
        """Find out now what every chat prompt needs, and not when its clock runs."""
        self.spelling  # noqa: B018

    @property
    def has_switch(self) -> bool:
        """Whether the template knows a variable that switches thinking off."""
        return bool(self._variables(on=False))

    @property
    def can_think(self) -> bool:
        return self.style is not None or self.has_switch

    def require(self) -> None:
        """Raise UsageError for a model that cannot be asked to think."""
        if not self.can_think:
            raise UsageError(
                "thinking cannot be switched on: this model's chat template has no switch for it, and no tags of "
                "thinking are known for it",
                hint="leave it as it is: the model just answers",
            )

    def asked(self, prompt: ChatPrompt, on: bool | None) -> ChatPrompt:
        """The prompt with what the template wants to be told; what the caller's own variables say stays so. Raises
        UsageError when thinking is asked of a model that knows none."""
        if on:
            self.require()
        variables = {} if on is None else self._variables(on=on)
        return replace(prompt, template_kwargs={**variables, **prompt.template_kwargs})

    def begun(self, rendered: str, on: bool | None) -> Beginning:
        """The end of a rendered prompt: where the template cannot be told not to think, thinking is closed there."""
        style = self.style
        if style is None:
            return Beginning(rendered, opened=False, may_close=False)
        opened = rendered.rstrip().endswith(style.opening)
        if on is False and opened:
            rendered += style.ending if rendered[-1:].isspace() else style.blank + style.ending
        elif on is False and not self.has_switch and not style.guessed:
            rendered += style.nothing_thought
        end = rendered.rstrip()
        closed = any(end.endswith(text.strip()) for text in (*style.closing, style.ending))
        return Beginning(rendered, opened=end.endswith(style.opening), may_close=not closed and not style.guessed)

    @cached_property
    def _abilities(self) -> TemplateAbilities:
        return self._process.abilities(self._source) if self._source else TemplateAbilities()

    def _variables(self, *, on: bool) -> dict[str, object]:
        """What switches thinking on or off; empty where the template knows no switch, or needs none to think."""
        return dict(self._abilities.reasoning_on if on else self._abilities.reasoning_off)
