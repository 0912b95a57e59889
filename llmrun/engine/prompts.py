"""Turns prompts into tokens, switches thinking on or off in a prompt, and creates the decoder for an answer.

Prompts for filling in the middle are encoded with the tokens of llama-server's `/infill`:

    [repository]myproject⏎[file]name⏎text...[file]filename⏎[BOS][prefix]text[suffix]text[middle]

"myproject" and "filename" stand for names that llama-server does not ask for. The repository and this file's name are
left out if the vocabulary has no tokens for them; other files then follow "--- snippet ---".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import chain
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct, structs
from msgspec.structs import replace

from llmrun.base.errors import ContextExceeded, ModelFileError, TemplateRefused, UsageError
from llmrun.engine.adapters import adapted_tokens, check_adapters
from llmrun.engine.base import check_generates, require_thinking
from llmrun.engine.requests import (
    NONE,
    ChatPrompt,
    FillPrompt,
    MixedPrompt,
    RecordedChat,
    Request,
    TextPrompt,
    TokenPrompt,
    image_parts,
)
from llmrun.engine.templates.chat_template import ChatTemplate, TemplateProcess, alternating, choose_template
from llmrun.engine.templates.tool_format import TemplateAbilities
from llmrun.engine.thinking import Beginning, ThinkingDecoder, recognised_style, spelled

if TYPE_CHECKING:
    from llmrun.backends.base import Backend
    from llmrun.engine.adapters import AdaptedTokens
    from llmrun.engine.constraint.answer import AnswerConstraint
    from llmrun.engine.constraint.base import ResponseFormat
    from llmrun.engine.constraint.matcher import Constraint, ConstraintCompiler
    from llmrun.engine.image_prompts import ImageMarks
    from llmrun.engine.image_rows import PromptImages
    from llmrun.engine.thinking import Spelling, ThinkingStyle
    from llmrun.engine.tool_calls.prompting import ModelTools
    from llmrun.model.tokenizers.text_tokenizer import Tokenizer
    from llmrun.model.tokenizers.vocabulary import FillTokens
    from llmrun.model.vision.layout import Projector

_BATCH: Final = 2048  # llama-server's default for -b, which determines how much of a text llama-server keeps
_REPOSITORY: Final = "myproject\n"
_CURRENT_FILE: Final = "filename\n"
_BETWEEN_FILES: Final = "\n\n--- snippet ---\n\n"


def encode_fill(prompt: FillPrompt, tokenizer: Tokenizer, context: int) -> tuple[list[int], int]:
    """Return the tokens of a prompt for a context of this many tokens, and how many tokens were left out.

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
    return [*others, *bos, *before, *after, special.middle], sum(map(len, texts)) - sum(map(len, kept))


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


class ModelThinking:
    """The thinking style and the thinking switch of an open model.

    The template is probed on first use, which takes 20 to 200 ms. Raw prompts do not require the probe.
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
        """The model's thinking style, or None if no style is recognized, so that the whole output is the answer."""
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
        return bool(self._abilities.reasoning_off or self._abilities.off_word)

    @property
    def can_think(self) -> bool:
        """True if the model has a thinking style or a thinking switch."""
        return self.style is not None or self.has_switch

    def require(self) -> None:
        """Raise UsageError if the model does not support thinking."""
        require_thinking(self)

    def asked(self, prompt: ChatPrompt, on: bool | None) -> ChatPrompt:
        """Return the prompt with the template variables or the word that switch thinking on or off.

        Variables that the caller has set take precedence. Raises UsageError if `on` is True and the model does not
        support thinking.
        """
        if on:
            self.require()
        abilities = self._abilities
        variables = {} if on is None else abilities.reasoning_on if on else abilities.reasoning_off
        asked = structs.replace(prompt, template_kwargs={**variables, **prompt.template_kwargs})
        if on is False and self._abilities.off_word:
            asked = structs.replace(asked, messages=_with_word(prompt.messages, self._abilities.off_word))
        return asked

    def begun(self, rendered: str, on: bool | None, given: Mapping[str, object] | None = None) -> Beginning:
        """Return the prompt and the initial state of its answer. `given` are the caller's template variables.

        If `on` is False, a thinking block that the prompt leaves open is closed. Without such a block and without a
        thinking switch in the template, an empty thinking block is appended, unless the style is only a guess. With
        thinking off, closing tags in the answer have no effect, so a server can stream the answer immediately.
        """
        style = self.style
        if style is None:
            return Beginning(rendered, opened=False, may_close=False)
        opened = rendered.rstrip().endswith(style.opening)
        if on is False and opened:
            rendered += style.ending if rendered[-1:].isspace() else style.blank + style.ending
        elif on is False and not self.has_switch and not style.guessed:
            rendered += style.opening + style.blank + style.ending
        end = rendered.rstrip()
        closed = any(end.endswith(text.strip()) for text in (*style.closing, style.ending))
        untouched = on is None and not {*(given or ())} & {*self._abilities.reasoning_off}
        off = on is False or (untouched and self._abilities.is_off_by_default)
        may_close = not (off or closed or style.guessed)
        return Beginning(rendered, opened=end.endswith(style.opening), may_close=may_close)

    @cached_property
    def _abilities(self) -> TemplateAbilities:
        return self._process.abilities(self._source) if self._source else TemplateAbilities()


def _wanted_thinking(request: Request) -> bool | None:
    return False if request.think_budget == 0 else request.think


def _begun_answer(prompt: ChatPrompt) -> str:
    """Return the text of the answer that the model should continue, or "" if there is none."""
    last = prompt.messages[-1] if prompt.messages else {}
    content = last.get("content") if last.get("role") == "assistant" else None
    return content if isinstance(content, str) else ""


def _with_word(messages: Sequence[Mapping[str, Any]], word: str) -> list[Mapping[str, Any]]:
    """Return the messages with a word appended to the last user message, if its content is plain text or has images."""
    changed = [*messages]
    for at in reversed(range(len(changed))):
        if changed[at].get("role") == "user":
            content = changed[at].get("content")
            if isinstance(content, str):
                changed[at] = {**changed[at], "content": f"{content} {word}"}
            elif content and any(image_parts([changed[at]])):
                changed[at] = {**changed[at], "content": [*content, {"type": "text", "text": f" {word}"}]}
            break
    return changed


class ReadPrompt(Struct, frozen=True):
    """The tokens of a prompt, with the decoder and the constraint of its answer.

    cut_tokens  the number of tokens that were left out of the prompt
    adapters    the LoRA adapters of the prompt and the answer, or None
    images      the images of the prompt, or None
    """

    tokens: list[int]
    decoder: ThinkingDecoder
    constraint: AnswerConstraint | None
    cut_tokens: int = 0
    adapters: AdaptedTokens | None = None
    images: PromptImages | None = None


class PromptReader:
    """Renders chat templates, tokenizes prompts and compiles response formats for one open model.

    chat_template  Jinja source that replaces the model's own template
    thinking_tags  the opening and closing thinking tags, as in Engine
    constraints    compiles response formats; by default, a compiler is created on first use
    text_calls     as in Engine
    """

    # Modules that few requests need are imported on first use, because importing all of them takes 40 ms.

    def __init__(
        self,
        backend: Backend,
        templates: TemplateProcess,
        chat_template: str | None,
        thinking_tags: Sequence[str] | None,
        constraints: ConstraintCompiler | None = None,
        *,
        text_calls: bool = True,
    ) -> None:
        self._backend = backend
        self._path = backend.info.path
        self._tokenizer = backend.tokenizer
        self._templates = templates
        self._constraints = constraints
        self._compiling = Lock()
        self._text_calls = text_calls
        self.template: ChatTemplate | None = choose_template(backend.info, backend.tokenizer, chat_template)
        self.thinking = ModelThinking(self.template, backend.tokenizer, templates, thinking_tags)

    @cached_property
    def tools(self) -> ModelTools:
        """The model's support for tool calls."""
        from llmrun.engine.tool_calls.prompting import ModelTools

        return ModelTools(self.template, self._tokenizer, self._templates, text_calls=self._text_calls)

    def close(self) -> None:
        """End the processes for chat templates, response formats and tool calls. Idempotent."""
        self._templates.close()
        if "tools" in vars(self):
            self.tools.close()
        if self._constraints is not None:
            self._constraints.close()

    def read(self, request: Request) -> ReadPrompt:
        """Turn a request's prompt into tokens, and find the adapters that apply to them.

        Raises TemplateRefused if the chat template fails or is missing, ModelFileError if the vocabulary has no token
        for the prompt's text, and UsageError if the response format cannot be enforced, if the model generates no
        text, cannot fill in the middle, cannot read images, or lacks an adapter, or if an image is not valid.
        """
        check_generates(self._backend.info)
        check_adapters(request.adapters, self._backend.info.adapters)
        read = self._read(request)
        return replace(read, adapters=adapted_tokens(request.adapters, self._backend.info.adapters, read.tokens))

    def _read(self, request: Request) -> ReadPrompt:
        prompt, encode = request.prompt, self._tokenizer.encode_rendered
        tokens: list[int]
        images: PromptImages | None
        if isinstance(prompt, TokenPrompt) and prompt.images:
            from llmrun.engine.image_prompts import images_in_tokens

            images = images_in_tokens(prompt, self._projector)
            return replace(self._text_prompt(request, list(prompt.tokens)), images=images)
        if isinstance(prompt, TokenPrompt):
            return self._text_prompt(request, list(prompt.tokens))
        if isinstance(prompt, TextPrompt) and prompt.images:
            from llmrun.engine.image_prompts import raw_tokens

            tokens, images = raw_tokens(prompt, self._projector, self._tokenizer)
            return replace(self._text_prompt(request, tokens), images=images)
        if isinstance(prompt, TextPrompt):
            return self._text_prompt(request, self._tokens_of_text(prompt.text))
        if isinstance(prompt, MixedPrompt):
            encoded = [
                self._tokens_of_text(part, add_special=not number) if isinstance(part, str) else part
                for number, part in enumerate(prompt.parts)
            ]
            return self._text_prompt(request, [*chain.from_iterable(encoded)])
        if isinstance(prompt, FillPrompt):
            tokens, cut = encode_fill(prompt, self._tokenizer, self._context)
            return replace(self._text_prompt(request, tokens), cut_tokens=cut)
        think = _wanted_thinking(request)
        prompt, beginning, marks = self._begun(prompt, think, request.response_format)
        tokens, images = (encode(beginning.text).tolist(), None) if marks is None else marks.tokens(beginning.text)
        if not prompt.add_generation_prompt:
            return replace(self._text_prompt(request, tokens, _begun_answer(prompt)), images=images)
        if isinstance(prompt, RecordedChat):
            tokens = [*prompt.tokens]
            images = images and images.moved(tokens)
        spelling, calls, wanted = self.thinking.spelling, None, request.response_format
        if prompt.tools and wanted is None:
            spelling, calls, wanted = self.tools.answer_format(prompt, self.thinking.style, self._compiled)
        # An answer with a format cannot turn out to be thinking, because thinking before it needs an opening tag.
        opened, may_close = beginning.opened, beginning.may_close and wanted is None
        decoder = ThinkingDecoder(request.stop, spelling, opened=opened, may_close=may_close, reader=calls)
        return ReadPrompt(tokens, decoder, self._constraint(wanted, decoder, beginning, think), images=images)

    def render(self, request: Request) -> str:
        """Return the text of a conversation's prompt, without the BOS if the vocabulary adds one.

        Raises the errors of `read`.
        """
        from llmrun.model.tokenizers.vocabulary import unmark

        check_generates(self._backend.info)
        assert isinstance(request.prompt, ChatPrompt), "only conversations have a template"
        _, beginning, marks = self._begun(request.prompt, _wanted_thinking(request), request.response_format)
        text, _ = unmark(beginning.text)
        text = text if marks is None else marks.shown(text)
        added, bos = self._tokenizer.encode("", add_special=True, parse_special=True).tolist(), self._tokenizer.bos_id
        return text if bos is None or bos not in added else text.removeprefix(self._tokenizer.token_text(bos))

    def _begun(
        self, prompt: ChatPrompt, think: bool | None, wanted: ResponseFormat | None
    ) -> tuple[ChatPrompt, Beginning, ImageMarks | None]:
        """Return a prompt as the template gets it, its text, and the marks of its images in the text.

        Raises TemplateRefused and UsageError.
        """
        if self.template is None:
            raise TemplateRefused(
                f"no chat template: {self._path}: the file has none, and its vocabulary matches no known model family",
                hint="send the prompt without a template (--raw), or pass a template with --chat-template FILE",
            )
        prompt = self._with_tools(prompt, wanted)
        asked, marks = self.thinking.asked(prompt, think), None
        if any(image_parts(asked.messages)):
            from llmrun.engine.image_prompts import ImageMarks

            marks = ImageMarks(asked, self._projector, self._tokenizer)
            rendered = self._rendered_images(marks, self.template)
        else:
            rendered = self._rendered(asked, self.template)
        if not prompt.add_generation_prompt:
            return prompt, Beginning(rendered, opened=False, may_close=False), marks
        return prompt, self.thinking.begun(rendered, think, prompt.template_kwargs), marks

    @property
    def _projector(self) -> Projector:
        """The projector of the model. Raises UsageError if the model was opened without one."""
        if self._backend.vision is None:
            from llmrun.engine.images import without_projector

            raise without_projector(self._backend.info.name)
        return self._backend.vision.projector

    def _rendered_images(self, marks: ImageMarks, template: ChatTemplate) -> str:
        """Render a conversation with a mark for each image. Raises TemplateRefused."""
        rendered: str | None = None
        if marks.may_be_parts:
            with suppress(TemplateRefused):
                rendered = marks.replaced(self._rendered(marks.as_parts, template, marks.protect))
        if rendered is None:
            rendered = self._rendered(marks.as_texts, template, marks.protect)
            marks.check(rendered, template.name)
        return rendered

    def _rendered(self, prompt: ChatPrompt, template: ChatTemplate, protect: Callable[[str], str] | None = None) -> str:
        """Render a conversation. `protect` is as in `ChatTemplate.render`. Raises TemplateRefused.

        Agents send two user messages in a row, and system messages in the middle of a conversation. Some templates
        refuse both, and get the conversation as `alternating` returns it.
        """
        try:
            return template.render(prompt, self._tokenizer, self._templates, protect)
        except TemplateRefused as refused:
            turns = alternating(prompt.messages)
            if turns == [*prompt.messages]:
                raise
            try:
                prompt = structs.replace(prompt, messages=turns)
                return template.render(prompt, self._tokenizer, self._templates, protect)
            except TemplateRefused:
                raise refused from None

    def _with_tools(self, prompt: ChatPrompt, wanted: ResponseFormat | None) -> ChatPrompt:
        """Return a prompt whose past tool calls have the form that the template needs. Raises UsageError."""
        if prompt.tools and prompt.tool_choice != NONE and wanted is not None:
            raise UsageError("tools and a response format cannot be combined", hint="use only one of them")
        past = any(message.get("tool_calls") or message.get("role") == "tool" for message in prompt.messages)
        return self.tools.prepared(prompt) if prompt.tools or past else prompt

    def _compiled(self, wanted: ResponseFormat) -> Constraint:
        """Compile a format, or return the cached result. Raises UsageError."""
        from llmrun.engine.constraint.matcher import ConstraintCompiler

        with self._compiling:
            self._constraints = self._constraints or ConstraintCompiler()
            return self._constraints.compile(wanted, self._tokenizer)

    def _text_prompt(self, request: Request, tokens: list[int], begun: str = "") -> ReadPrompt:
        """Return a prompt whose answer contains neither thinking nor tool calls.

        begun  the beginning of the answer, which is part of the prompt

        A response format applies to the whole answer, including `begun`. Raises UsageError if `begun` is not the
        beginning of an answer in this format, or is already a complete answer.
        """
        decoder, wanted = ThinkingDecoder(request.stop), request.response_format
        constraint = self._constraint(wanted, decoder)
        if begun and wanted is not None and constraint is not None and not constraint.begin(begun):
            raise UsageError(
                f"{wanted.origin}: the last message is not the beginning of an answer in this format",
                hint="the format applies to the whole message",
            )
        return ReadPrompt(tokens, decoder, constraint)

    def _constraint(
        self,
        wanted: ResponseFormat | None,
        decoder: ThinkingDecoder,
        beginning: Beginning | None = None,
        think: bool | None = None,
    ) -> AnswerConstraint | None:
        """Return the constraint of an answer. `beginning` is None if no tags may precede the answer."""
        if wanted is None:
            return None
        from llmrun.engine.constraint.answer import NO_PRELUDE, AnswerConstraint, prelude_of

        compiled = self._compiled(wanted)
        prelude, style = NO_PRELUDE, self.thinking.style if beginning else None
        if beginning is not None and style is not None:
            prelude = prelude_of(style, beginning, think, self._tokens_of_tag, calls=decoder.finds_calls)
        return AnswerConstraint(compiled, decoder, self._tokenizer, prelude)

    @property
    def _context(self) -> int:
        return min(self._backend.info.context_size, self._backend.kv.capacity)

    def token_limit(self, prompt_tokens: int, max_tokens: int | None, images: PromptImages | None = None) -> int:
        """Return the maximum combined number of prompt and answer tokens. Raises ContextExceeded or UsageError."""
        context = self._context
        if prompt_tokens == 0:
            raise UsageError("empty prompt: at least one token is needed")
        if prompt_tokens >= context and images is not None:
            from llmrun.engine.images import too_long

            raise too_long(prompt_tokens, context, images.row_counts, images.fewest_rows)
        if prompt_tokens >= context:
            trained = self._backend.info.train_context
            if context < trained:
                hint = f"shorten the prompt, or raise --ctx-size (the model was trained for {trained:,})"
            else:
                hint = "shorten the prompt: the model was not trained for a longer context"
            raise ContextExceeded.by_prompt(prompt_tokens, context, hint=hint)
        return context if max_tokens is None else min(context, prompt_tokens + max_tokens)

    def closing_tokens(self) -> list[int]:
        """Return the tokens that end the model's thinking, or [] if the model never thinks."""
        return [] if self.thinking.style is None else self._tokens_of_tag(self.thinking.style.ending)

    def _tokens_of_tag(self, tag: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(tag, add_special=False, parse_special=True).tolist()
        return ids

    def _tokens_of_text(self, text: str, *, add_special: bool = True) -> list[int]:
        tokens: list[int] = self._tokenizer.encode(text, add_special=add_special, parse_special=True).tolist()
        if text and not tokens:
            raise ModelFileError(
                f"prompt cannot be tokenized: {self._path}: the vocabulary contains none of its {len(text):,} "
                "characters"
            )
        return tokens
