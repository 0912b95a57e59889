"""Builds the requests of a chat from its conversation, and fits them into the model's context.

If a prompt does not fit, the oldest turns are left out. The module also counts the tokens of a conversation, checks
whether a model supports tools and past tool calls, and holds the settings of the model or preset in use.

The state of a conversation is saved beside the conversation's file, so that `--continue` and `/model` can reuse it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from msgspec import structs

from llmrun.base.errors import ContextExceeded, TemplateRefused, UsageError
from llmrun.base.folders import prefixes_folder
from llmrun.cli.answers.answering import is_remote
from llmrun.cli.chatting.events import FORGET, ON_FULL
from llmrun.cli.chatting.image_files import ImageFileError
from llmrun.cli.chatting.store import state_path, take_over_old_state
from llmrun.cli.console.output import out
from llmrun.cli.console.terminal import visible_line
from llmrun.engine.requests import IMAGE, ChatPrompt, Request, StatePlace, image_parts
from llmrun.engine.tools.tool import Limits
from llmrun.options.settings import RULES, with_values

if TYPE_CHECKING:
    from llmrun.cli.chatting.conversation import Conversation
    from llmrun.cli.chatting.saying import ConversationRecord
    from llmrun.engine.base import Answering
    from llmrun.engine.tools.toolbox import Toolbox
    from llmrun.options.settings import Settings


@dataclass(slots=True)
class Prompting:
    """The template variables and the tools that all prompts of a chat share.

    variables     extra variables for the chat template
    toolbox       the tools of the chat, or None if there are no tools
    offers_tools  True if the prompts include the tools
    preset        the variables of the preset in use; the chat's own variables take precedence
    image_file    returns the file of an image of the conversation by its SHA-256; may raise ImageFileError
    """

    variables: Mapping[str, Any]
    toolbox: Toolbox | None = None
    offers_tools: bool = True
    preset: Mapping[str, Any] = field(default_factory=dict)
    image_file: Callable[[str], bytes] = field(default=lambda sha256: b"")

    def prompt(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> ChatPrompt:
        tools = self.toolbox.definitions if self.toolbox is not None and self.offers_tools else None
        keys = {part[IMAGE] for part in image_parts(messages)}
        return ChatPrompt(
            messages,
            tools or None,
            add_generation_prompt=add_generation_prompt,
            template_kwargs={**self.preset, **self.variables},
            images={key: self.image_file(key) for key in sorted(keys)},
        )


ROOM: Final = 512  # tokens reserved for an answer without a length limit; most answers are shorter
_MOST_ROOM = 1 / 4  # maximum share of the context to reserve, because a small context needs room for the prompt
# The share of the context that the prompt may fill after turns are dropped. Dropping many turns at the same time saves
# time, because each change at the beginning of the prompt forces a new prefill.
_KEPT = 1 / 2


def room_for_answer(context: int, max_tokens: int | None) -> int:
    """Return how many tokens of the context to reserve for the answer."""
    return max(1, min(max_tokens or ROOM, ROOM, int(_MOST_ROOM * context)))


def turns_to_leave_out(
    turns: int, already: int, tokens_from: Callable[[int], int], *, context: int, max_tokens: int | None
) -> int:
    """Return how many of the oldest turns to leave out.

    If leaving out `already` turns makes enough room for the answer, return `already`. Otherwise, leave out more turns
    until the prompt fills at most half of the context. The last turn is the question itself and is never left out.

    tokens_from  a function that returns the number of tokens in a prompt that begins with the turn at an index
    """
    already = min(already, turns - 1)
    if tokens_from(already) + room_for_answer(context, max_tokens) <= context:
        return already
    most = int(_KEPT * context)
    return bisect_left(range(turns - 1), True, lo=already, key=lambda first: tokens_from(first) <= most)


UNDO_OR_CLEAR = "/undo removes the last turn, /clear starts over"
FORGET_HINT = f"/set {ON_FULL} {FORGET} continues without the oldest turns"


@dataclass(slots=True)
class PromptWindow:
    """The turns of a conversation that are part of the prompt.

    prompting  creates the prompt from messages
    left_out   the number of oldest turns that are left out. The number grows in large steps, because each step changes
               the beginning of the prompt and forces a new prefill
    """

    prompting: Prompting
    left_out: int = 0

    def prompt(self, conversation: Conversation, first: int = 0) -> ChatPrompt:
        """Return the prompt, starting at the turn with index `first`. The system prompt is always included."""
        return self.prompting.prompt(conversation.messages(first))

    def fitted(self, engine: Answering, conversation: Conversation, request: Request) -> Request:
        """Return the request without the oldest turns that do not fit in the context.

        If the question alone does not fit, no more turns are left out, and the engine will reject the request.
        """
        turns, size = len(conversation.exchanges), engine.info.context_size
        count = min(self.left_out, turns - 1)
        alone = self._tokens(engine, conversation, request, turns - 1)
        if alone is not None and alone < size:
            count = turns_to_leave_out(
                turns,
                self.left_out,
                lambda first: self._tokens(engine, conversation, request, first) or 0,
                context=size,
                max_tokens=request.max_tokens,
            )
        return self._without(count, conversation, request)

    def fitted_better(self, engine: Answering, conversation: Conversation, request: Request) -> Request | None:
        """Return the request with half of its turns, for use after a server has reported that its context is full.

        Returns None if no more turns can be left out, or if tokens are counted locally, because `fitted` has then
        already removed enough turns.
        """
        last = len(conversation.exchanges) - 1
        if self.left_out >= last or self._tokens(engine, conversation, request, last) is not None:
            return None
        return self._without((self.left_out + last + 1) // 2, conversation, request)

    def refusal(
        self, engine: Answering, conversation: Conversation, request: Request, error: ContextExceeded
    ) -> ContextExceeded:
        """Return the error, with a hint, for a question that does not fit in the context."""
        info, before = engine.info, len(conversation.exchanges) - 1
        alone = self._tokens(engine, conversation, request, before)
        too_long = alone is not None and alone >= info.context_size > 0
        sentence = str(error)
        called = bool(conversation.exchanges[-1].rounds)
        if too_long:
            what = "the question and the results of its tool calls do" if called else "the question alone does"
            sentence = (
                f"{what} not fit in the context: {alone:,} tokens plus one for the answer "
                f"exceed the limit of {info.context_size:,}"
            )
        shorter = "/undo removes them" if called else "shorten the question"
        if conversation.exchanges[-1].asked.images and not called:
            shorter = error.hint  # how many tokens the images take
        hint = shorter if too_long or not before else f"{FORGET_HINT}; {UNDO_OR_CLEAR}"
        if info.context_size < info.train_context:
            hint += f"; llmrun chat --continue --ctx-size N gives it more room (trained for {info.train_context:,})"
        return ContextExceeded(sentence, hint=hint)

    def _tokens(self, engine: Answering, conversation: Conversation, request: Request, first: int) -> int | None:
        """Count the tokens of a prompt that starts at turn `first`. Returns None if only a server can count tokens."""
        return engine.prompt_tokens(structs.replace(request, prompt=self.prompt(conversation, first)))

    def _without(self, count: int, conversation: Conversation, request: Request) -> Request:
        """Leave out the `count` oldest turns from now on. Print a note if `count` has increased."""
        if count > self.left_out:
            before = len(conversation.exchanges) - 1
            turns = "turn" if count == 1 else "turns"
            out.note(
                f"the context is full: the model no longer sees the oldest {count} {turns} (of {before}); "
                "they stay in the saved conversation"
            )
        self.left_out = count
        return structs.replace(request, prompt=self.prompt(conversation, count))


@dataclass(slots=True)
class ContextUsed:
    """Counts a conversation's tokens and caches the last count.

    prompting  creates the prompt from messages
    """

    prompting: Prompting
    _counted: tuple[object, int | None] | None = field(default=None, init=False)  # the cache key and the token count

    def tokens(self, engine: Answering, conversation: Conversation) -> int | None:
        """Return the number of tokens in a conversation, or None if only the next answer will report the number.

        The count is normally recorded at the end of each answer. If the process died during the last answer, or if the
        model has changed since then, this method renders the conversation and counts the tokens, but only once.
        """
        if conversation.is_counted:
            return conversation.context_used
        # The key contains all messages, because tool calls, results and a change of the model add no exchange.
        counted_for = (conversation.model, conversation.unanswered, conversation.all_messages())
        if self._counted is None or self._counted[0] != counted_for:
            self._counted = counted_for, self._count(engine, conversation)
        return self._counted[1]

    def _count(self, engine: Answering, conversation: Conversation) -> int | None:
        messages = conversation.all_messages()
        if conversation.unanswered is not None:
            messages = messages[:-1]
        try:
            prompt = self.prompting.prompt(messages, add_generation_prompt=False)
            return engine.prompt_tokens(Request(prompt=prompt))
        except (TemplateRefused, UsageError):  # some templates reject answers at the end, others reject tool calls
            return None
        except ImageFileError:  # the next question will report the missing file
            return None


class ModelSettings:
    """The settings of the model or preset in use, which apply unless the conversation overrides them.

    base  the settings without the conversation's own settings
    """

    def __init__(self, settings_for: Callable[[str], Settings], prompting: Prompting, model: str) -> None:
        """Load the settings. `settings_for` returns the settings for the lasting name of a model or preset."""
        self._settings_for, self._prompting = settings_for, prompting
        self.use(model)

    def use(self, model: str) -> None:
        """Load the settings for another model or preset. Raises UsageError if a settings file is invalid."""
        self.base = self._settings_for(model)
        self._prompting.preset = self.base.variables
        self._model = model

    def of(self, conversation: Conversation) -> Settings:
        """Return the settings for the next answer of a conversation."""
        chosen = {name: value for name, value in conversation.preferences.items() if name in RULES}
        return with_values(self.base, chosen)

    def take_over(self, record: ConversationRecord) -> None:
        """Continue a conversation with the current model or preset instead of the conversation's previous one."""
        conversation, settings = record.conversation, self.base
        before = self._settings_for(conversation.model).system
        for event in [*conversation.switched(self._model, before, settings.system)]:
            record.add(event)
        preset = settings.preset
        if preset is not None and preset.system is not None and settings.system != conversation.system:
            out.note(f"the conversation keeps its own system prompt; /system default sets that of {preset.name}")


class ConversationState:
    """The saved state of a chat's current conversation, in a file for each model that the conversation uses.

    conversations  the folder of the conversations
    limit          the maximum size of all saved states in bytes
    """

    def __init__(self, conversations: Path, limit: int) -> None:
        self._folders = str(conversations.absolute()), str(prefixes_folder().absolute())
        self._limit = limit
        self._place: StatePlace | None = None
        self._conversation: Path | None = None

    def use(self, engine: Answering, conversation: Path | None) -> None:
        """Let an engine load and save the state of a conversation, given the conversation's file (None if unsaved)."""
        place = None
        if conversation is not None and not is_remote(engine):
            file = state_path(conversation, engine.info)
            place = StatePlace(str(file.absolute()), self._folders, self._limit)
        if place != self._place:
            self.finish(engine)
            if conversation is not None and place is not None:
                take_over_old_state(conversation, file)
        self._place, self._conversation = place, conversation
        engine.use_state(place, out.detail)

    def save(self, engine: Answering) -> None:
        """Save the tokens that the last turn added. Backends that save only whole sequences save in `finish`."""
        if engine.saves_blocks:
            engine.save_state()

    def finish(self, engine: Answering) -> None:
        """Save the complete state before the engine is closed or continues another conversation.

        The state is not saved if the conversation has been removed or renamed in the meantime.
        """
        if self._conversation is not None and self._conversation.exists():
            engine.save_state()


_RESULT_CHARACTERS = 2  # characters per token of the context, so one result fills about half of the context
_HINT = "use a model that was trained for tool calls, such as qwen3:4b"


def check_tools(engine: Answering, name: str) -> None:
    """Raise UsageError if a model cannot use the tools from --tools.

    name  the model's display name
    """
    if not _can_use_tools(engine):
        raise UsageError(f"--tools: {visible_line(name)} cannot call tools: {_reason(engine)}", hint=_HINT)


def check_past_calls(engine: Answering, name: str, conversation: Conversation) -> None:
    """Raise UsageError if a model cannot continue a conversation because of its tool calls."""
    if conversation.has_calls and not _can_read_calls(engine):
        raise UsageError(
            f"{visible_line(name)} cannot continue a conversation with tool calls: {_reason(engine)}", hint=_HINT
        )


def offer_tools(prompting: Prompting, engine: Answering, name: str, conversation: Conversation) -> None:
    """Offer the tools of a chat to another model if the model supports tools. Otherwise, print a note."""
    prompting.offers_tools = prompting.toolbox is None or _can_use_tools(engine)
    if prompting.toolbox is not None:
        prompting.toolbox.limit_results(longest_result(engine))
    if conversation.has_calls and not _can_read_calls(engine):
        out.note(
            f"{visible_line(name)} cannot read the tool calls of this conversation: {_reason(engine)}; "
            "/clear starts a new one, /model switches back"
        )
    elif not prompting.offers_tools:
        out.note(f"{visible_line(name)} answers without tools: {_reason(engine)}")


def longest_result(engine: Answering) -> int:
    """Return the maximum length of a tool's result, in characters, for the size of a model's context."""
    most = Limits().result
    size = engine.info.context_size  # 0 if a server does not report the size
    return min(most, _RESULT_CHARACTERS * size) if size else most


def _can_use_tools(engine: Answering) -> bool:
    """Return whether a model can call tools and read their results. Remote models are assumed to support tools."""
    return engine.tools is None or (engine.tools.takes_tools and engine.tools.reads_calls)


def _can_read_calls(engine: Answering) -> bool:
    return engine.tools is None or engine.tools.reads_calls


def _reason(engine: Answering) -> str:
    """Return the reason why a local model cannot use tools."""
    assert engine.tools is not None, "servers are not asked"
    if engine.tools.takes_tools:
        return "the format of its tool calls is unknown"
    return "its chat template does not support tools"
