"""Prepares prompts with tools, and the decoding and the grammar of their answers.

Past messages with tool calls and results are converted from OpenAI's form into the form that a template requires.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING, Any

from msgspec import structs
from msgspec.structs import replace

from llmrun.base.errors import LlmrunError, UsageError, shown
from llmrun.engine.constraint.base import FormatKind, ResponseFormat
from llmrun.engine.requests import AUTO, REQUIRED, image_parts
from llmrun.engine.templates.tool_format import ToolAbilities, call_objects
from llmrun.engine.thinking import Placeholders, Spelling, spelled
from llmrun.engine.tool_calls.grammar import tool_grammar
from llmrun.engine.tool_calls.openings import ToolSpelling, spelled_tools
from llmrun.engine.tool_calls.parser import CallDecoder
from llmrun.engine.tool_calls.schemas import Tool, read_tools

if TYPE_CHECKING:
    from llmrun.engine.constraint.process import ConstraintProcess
    from llmrun.engine.requests import ChatPrompt
    from llmrun.engine.templates.chat_template import ChatTemplate, TemplateProcess
    from llmrun.engine.thinking import ThinkingStyle
    from llmrun.engine.tool_calls.text_calls import TextCallDecoder
    from llmrun.model.tokenizers.text_tokenizer import Tokenizer

_SHORT = re.compile(r"[a-zA-Z0-9]{9}")
_ANY = ("", "")  # the queue of all calls
# Limits of validating the arguments of a call that is written as text, because all requests wait for the verdict. The
# validation of a usual call takes 1 ms, and the first one 0.1 s for imports.
_VALIDATION_S = 0.5  # CPU time
_LONGEST_SCHEMA = 100_000  # characters
_MOST_FAILURES = 3  # validations with one schema that run out of time or memory
_NO_PARAMETERS = {"type": "object", "properties": {}}
_NO_TOOLS = "this model's chat template does not support tools"
_CALL_FIRST = "send the message with the call before its result"
_HINT = "use a model that was trained for tool calls, or a chat template for tools"


def require_tools(abilities: ToolAbilities) -> None:
    """Raise UsageError unless a template can show tools and the format of its calls is known."""
    if not abilities.takes_tools:
        raise UsageError(f"tools cannot be used: {_NO_TOOLS}", hint=_HINT)
    if abilities.tool_format is None:
        raise UsageError("tools cannot be used: the format of this model's tool calls is unknown", hint=_HINT)


def template_tools(definitions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return valid tool definitions for templates, some of which require a description and parameters."""
    found = []
    for definition in definitions:
        function = definition["function"]
        least = {"name": function["name"], "description": "", "parameters": _NO_PARAMETERS}
        found.append({**definition, "function": {**least, **function}})
    return found


def template_messages(messages: Sequence[Any], abilities: ToolAbilities) -> list[Any]:
    """Convert messages to the form that the template requires. Messages without tool calls are not changed.

    The arguments of calls become objects (or texts, if the template requires texts), results receive the name of their
    tool, and missing content becomes "" or None. Calls and results without ids are matched in order, and ids that the
    template would refuse are replaced. Arguments that are not a JSON object, because the call was cut off, for example,
    stay text, or become an object with the key `arguments` if the template requires objects. Raises UsageError for
    invalid calls and results, and for all calls and results if the template does not support tools.
    """
    ids, past = _Ids(), _Past(abilities)
    messages = [ids.completed(message) if isinstance(message, Mapping) else message for message in messages]
    if abilities.tool_format is not None and not abilities.tool_format.parallel:
        messages = _one_call_each(messages)
    return [past.converted(message) if isinstance(message, Mapping) else message for message in messages]


def _one_call_each(messages: Sequence[Any]) -> list[Any]:
    """Split messages with several calls into messages with one call, each followed by its result."""
    found: list[Any] = []
    results: dict[str, Any] = {}  # maps the id of each split call to its result
    for index, message in enumerate(messages):
        calls = message.get("tool_calls") if isinstance(message, Mapping) else None
        if not isinstance(calls, list) or len(calls) < 2 or not all(isinstance(call, Mapping) for call in calls):
            if not (isinstance(message, Mapping) and results.pop(str(message.get("tool_call_id")), None) is message):
                found.append(message)
            continue
        for number, call in enumerate(calls):
            found.append({**message, "content": message.get("content") if number == 0 else "", "tool_calls": [call]})
            call_id = call.get("id")
            for later in messages[index + 1 :]:
                if isinstance(later, Mapping) and later.get("tool_call_id") == call_id:
                    results[str(call_id)] = later
                    found.append(later)
                    break
    return found


class _Ids:
    """Gives each call in a conversation a unique id, and each result the id of its call.

    Some clients omit ids, send empty ids, or give several calls the same id.
    """

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._open: set[str] = set()  # the ids of calls that have no result yet
        self._made = (f"call_{number}" for number in count())
        self._queues: defaultdict[tuple[str, str], deque[str]] = defaultdict(deque)

    def completed(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        calls = message.get("tool_calls")
        if message.get("role") == "assistant" and isinstance(calls, list):
            known = [{**call, "id": self._of_call(call)} if isinstance(call, Mapping) else call for call in calls]
            return {**message, "tool_calls": known}
        if message.get("role") == "tool" and (call_id := self._of_result(message)):
            return {**message, "tool_call_id": call_id}
        return message

    def _of_call(self, call: Mapping[str, Any]) -> str:
        given, function = str(call.get("id") or ""), call.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        call_id = given
        if not given or given in self._open:
            call_id = next(each for each in self._made if each not in self._seen)
        self._seen.add(call_id)
        self._open.add(call_id)
        for key in (("id", given), ("name", str(name)), _ANY):
            self._queues[key].append(call_id)
        return call_id

    def _of_result(self, message: Mapping[str, Any]) -> str:
        """Return the id of the call to which a result belongs, or the result's own id if there is no such call.

        A result without an id belongs to the first open call with the same name, or else to the first open call. A
        result with an unknown id belongs to the first open call that the client sent without an id.
        """
        given = str(message.get("tool_call_id") or "")
        keys = [("id", given)] if given else [("name", str(message.get("name"))), _ANY]
        for key in keys if given in self._seen else [*keys, ("id", "")]:
            queue = self._queues[key]
            while queue and queue[0] not in self._open:
                queue.popleft()
            if queue:
                self._open.remove(queue[0])
                return queue.popleft()
        return given


class _Past:
    """The calls of earlier messages."""

    def __init__(self, abilities: ToolAbilities) -> None:
        self._abilities = abilities
        self._names: dict[str, str] = {}  # maps the id of each call to the name of its tool

    def converted(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        if message.get("role") == "assistant" and message.get("tool_calls"):
            return self._with_calls(message)
        return self._result(message) if message.get("role") == "tool" else message

    def _with_calls(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        abilities = self._abilities
        found = abilities.tool_format
        if found is None:
            raise UsageError(f"conversation with tool calls cannot be continued: {_NO_TOOLS}", hint=_HINT)
        calls = message["tool_calls"]
        if not isinstance(calls, list):
            raise UsageError("invalid tool calls in a message: not a list")
        read = [self._call(call, number) for number, call in enumerate(calls)]
        content = message.get("content")
        if not abilities.shows_calls:
            text = found.written([(name, _as_object(arguments), call_id) for call_id, name, arguments in read])
            others = {key: value for key, value in message.items() if key != "tool_calls"}
            return {**others, "content": f"{_text(content)}{text}"}
        if not abilities.arguments_as_text:
            read = [(call_id, name, _as_object(arguments)) for call_id, name, arguments in read]
        written = call_objects(read, as_text=abilities.arguments_as_text)
        return {**message, "content": content or (None if abilities.null_content else ""), "tool_calls": written}

    def _call(self, call: Any, number: int) -> tuple[str, str, Mapping[str, Any] | str]:
        """Return the id, the name and the arguments of a call, and store the name for the results.

        The arguments are an object, or a text that is not a JSON object.
        """
        function = call.get("function") if isinstance(call, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
            raise UsageError(f"invalid tool call in a message: number {number + 1} has no function with a name")
        arguments = function.get("arguments")
        if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
            arguments = {}
        if isinstance(arguments, str):
            arguments = _parsed(arguments)
        elif not isinstance(arguments, Mapping):
            raise UsageError(
                f"invalid tool call in a message: the arguments of {shown(name, 64)} are not a JSON object",
                hint="send the arguments as the model wrote them",
            )
        call_id = str(call["id"])
        self._names[call_id] = name
        return self._fitting(call_id), name, arguments

    def _result(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        if not self._abilities.takes_results:
            raise UsageError(f"conversation with tool results cannot be continued: {_NO_TOOLS}", hint=_HINT)
        call_id = message.get("tool_call_id")
        name = message.get("name")
        if isinstance(call_id, str) and call_id:
            if call_id not in self._names:
                raise UsageError(f"tool result without a call: {shown(call_id, 64)}", hint=_CALL_FIRST)
            name = name or self._names[call_id]
        elif len(self._names) == 1:
            call_id, name = next(iter(self._names.items()))
        elif name and not self._names:
            raise UsageError(f"tool result without a call: {shown(str(name), 64)}", hint=_CALL_FIRST)
        else:
            raise UsageError("tool result without tool_call_id", hint="send the id of the call with its result")
        content = message.get("content")
        return {
            **message,
            "tool_call_id": self._fitting(call_id),
            "name": name,
            "content": content if any(image_parts([message])) else _text(content),
        }

    def _fitting(self, call_id: str) -> str:
        """Return an id that the template accepts: the given id, or nine letters and digits for Mistral's templates."""
        found = self._abilities.tool_format
        if found is None or found.id_form != "short" or _SHORT.fullmatch(call_id):
            return call_id
        return hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).hexdigest()[:9]


def _parsed(text: str) -> Mapping[str, Any] | str:
    """Return the object in a JSON text, or the text itself if it contains something else."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return found if isinstance(found, dict) else text


def _as_object(arguments: Mapping[str, Any] | str) -> Mapping[str, Any]:
    """Return arguments as an object. A text becomes the value of the key `arguments`.

    Many templates iterate over the arguments, and fail if the arguments are a text.
    """
    return {"arguments": arguments} if isinstance(arguments, str) else arguments


def _text(content: Any) -> str:
    """Return content as one text. Joins the texts of several parts, and returns "" for None."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    if content is None or isinstance(content, str):
        return content or ""
    return json.dumps(content, ensure_ascii=False)


Check = Callable[[ResponseFormat], object]


class ModelTools:
    """The tool calls of an open model. The template is probed on first use, which takes 20 to 200 ms."""

    def __init__(
        self, template: ChatTemplate | None, tokenizer: Tokenizer, process: TemplateProcess, *, text_calls: bool = True
    ) -> None:
        """Store the parameters. `text_calls` is True if answers that are calls in plain JSON are treated as calls."""
        self._template = template
        self._tokenizer = tokenizer
        self._process = process
        self._text_calls = text_calls
        self._validation: ConstraintProcess | None = None
        self._not_enforced: set[bytes] = set()  # digests of schemas that cannot be enforced by a grammar
        self._failures: Counter[bytes] = Counter()  # counts failed validations by the digest of the schema

    @cached_property
    def abilities(self) -> ToolAbilities:
        """The abilities of the template that concern tools."""
        if self._template is None:
            return ToolAbilities()
        return self._process.abilities(self._template.tool_source or self._template.source).tools

    @property
    def takes_tools(self) -> bool:
        """True if the template shows tools to the model."""
        return self.abilities.takes_tools

    @property
    def reads_calls(self) -> bool:
        """True if the template shows the results of calls, and the format of calls is known."""
        return self.abilities.takes_results and self.abilities.tool_format is not None

    def prepared(self, prompt: ChatPrompt) -> ChatPrompt:
        """Return the prompt with past tool calls in the form that the template requires.

        Raises UsageError if the model does not support tools, or if a tool, call or result is invalid.
        """
        if prompt.tools:
            require_tools(self.abilities)
            read_tools(prompt.tools)
        messages = template_messages(prompt.messages, self.abilities)
        return structs.replace(prompt, messages=messages, tools=template_tools(prompt.tools or ()) or None)

    def answer_format(
        self, prompt: ChatPrompt, style: ThinkingStyle | None, check: Check
    ) -> tuple[Spelling | None, CallDecoder, ResponseFormat]:
        """Return the decoding and the format of the answer to a prompt with tools.

        style  the model's thinking tags
        check  a function that raises UsageError if a format cannot be enforced

        Returns the spelling of the thinking tags, the decoder for the calls, which uses the same placeholders, and the
        format that `tool_choice` requires. Raises UsageError if the grammar cannot enforce the tools' schemas.
        """
        found = self.abilities.tool_format
        assert found is not None, "`prepared` has been called"
        placeholders = Placeholders(self._tokenizer)
        thinking = spelled(style, self._tokenizer, placeholders) if style else None
        calls = spelled_tools(found, placeholders, self._tokenizer.end_of_generation)
        tools = read_tools(prompt.tools or ())
        wanted = self._enforced_format(prompt, calls, tools, check)
        text_call = self._text_call(prompt, tools, parallel=prompt.parallel_tool_calls and found.parallel)
        # Hashing the number of messages keeps new ids distinct from the ids of earlier answers.
        return thinking, CallDecoder(calls, tools, str(len(prompt.messages)), text_call), wanted

    def close(self) -> None:
        """End the process that validates arguments. Idempotent."""
        if self._validation is not None:
            self._validation.close()

    def _text_call(self, prompt: ChatPrompt, tools: Sequence[Tool], *, parallel: bool) -> TextCallDecoder | None:
        """Return the decoder for answers that are calls written as text, or None if no answer is to become calls."""
        if not self._text_calls or prompt.tool_choice != AUTO:
            return None
        from llmrun.engine.tool_calls.text_calls import TextCallDecoder

        schemas = {each["function"]["name"]: each["function"]["parameters"] or {} for each in prompt.tools or ()}
        # The schemas of other tools have been weakened.
        schemas |= {tool.name: tool.parameters for tool in tools if tool.strict}
        texts = {name: json.dumps(schema) for name, schema in schemas.items()}
        usable = {
            name: text
            for name, text in texts.items()
            if len(text) <= _LONGEST_SCHEMA and self._failures[_digest(text)] < _MOST_FAILURES
        }
        return TextCallDecoder(usable, self._is_valid, parallel=parallel)

    def _is_valid(self, arguments: str, schema: str) -> bool:
        """Return True if arguments match the whole schema of a tool, which is untrusted.

        The process is not the one that compiles grammars, for which other threads may wait longer.
        """
        from llmrun.engine.constraint.process import ConstraintProcess, validate

        self._validation = self._validation or ConstraintProcess()
        try:
            verdict = validate(arguments, schema, timeout_s=_VALIDATION_S, process=self._validation)
        except LlmrunError:  # the process cannot be started
            return False
        if verdict.kind == "not validated":
            self._failures[_digest(schema)] += 1
        return verdict.kind == "valid"

    def _enforced_format(
        self, prompt: ChatPrompt, calls: ToolSpelling, tools: Sequence[Tool], check: Check
    ) -> ResponseFormat:
        """Return the format of an answer with the given tools. Raises UsageError.

        Tools may come from anywhere, and an unenforceable tool must not prevent calls of other tools. Unless a
        tool is strict, its calls may have any arguments, which are checked against the schema before the tool runs.
        """

        def format_of(tools: Sequence[Tool], choice: str) -> ResponseFormat:
            grammar = tool_grammar(calls, tools, choice, parallel=prompt.parallel_tool_calls)
            wanted = ResponseFormat(FormatKind.GRAMMAR, grammar, origin="tools")
            check(wanted)
            return wanted

        def enforceable(tool: Tool) -> Tool:
            try:
                format_of([tool], REQUIRED)
            except UsageError as error:
                if tool.strict:
                    raise UsageError(f"tool {tool.name}: {error}", hint=error.hint) from None
                self._not_enforced.add(_key(tool))
                return _with_any_arguments(tool)
            return tool

        tools = [_with_any_arguments(tool) if _key(tool) in self._not_enforced else tool for tool in tools]
        try:
            return format_of(tools, prompt.tool_choice)
        except UsageError:
            weaker = [enforceable(tool) for tool in tools]
            if weaker == tools:
                raise
        return format_of(weaker, prompt.tool_choice)


def _key(tool: Tool) -> bytes:
    return _digest(json.dumps([tool.name, tool.parameters]))


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _with_any_arguments(tool: Tool) -> Tool:
    return replace(tool, parameters={"type": "object", "additionalProperties": True})
