"""Writes the answers, streams and errors of Ollama's API.

The routes are /api/chat, /api/generate, /api/tags, /api/ps, /api/show and /api/version.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

from llmrun.base.amounts import format_weights
from llmrun.base.errors import InvalidAnswer
from llmrun.base.types import FinishReason, named_pooling
from llmrun.engine.requests import Event, Finished, ModelFacts
from llmrun.serving.protocol.errors import ApiError
from llmrun.serving.protocol.ollama.objects import (
    Ability,
    DoneReason,
    End,
    Head,
    NamedModel,
    OllamaChat,
    OllamaDetails,
    OllamaError,
    OllamaLoadedModel,
    OllamaModelFacts,
    OllamaModels,
    OllamaText,
    OllamaToolCall,
    OllamaVersion,
    Said,
    Thought,
)
from llmrun.serving.protocol.openai.custom_tools import custom_as_function
from llmrun.serving.protocol.openai.objects import TokenLogprobs
from llmrun.serving.protocol.openai.requests import ParsedCompletion
from llmrun.serving.protocol.openai.responses import FOREVER_S, ChatAnswer, created_of
from llmrun.serving.protocol.wire import WireFormat, json_line, parsed_object

PREFIX: Final = "/api/"  # the prefix of all paths of Ollama's API
MEDIA_TYPE: Final = "application/x-ndjson"
_SPACE: Final = b" "  # JSON parsers skip a space before a line, but an empty line would break Ollama's client


def ollama_error(error: ApiError) -> OllamaError:
    """Return the body of an error response, which is also the last line of a failed stream."""
    return {"error": error.message}


OLLAMA: Final = WireFormat(MEDIA_TYPE, json_line, lambda words: _SPACE, b"", ollama_error, ollama_error)


LOADED: Final = "load"
UNLOADED: Final = "unload"


def ollama_chat(head: Head, said: Said, end: End) -> OllamaChat:
    """Return a line of /api/chat with a part of the message, or the body with the whole message."""
    return {**head, "message": {"role": "assistant", **said}, **end}


def ollama_text(head: Head, said: Said, end: End) -> OllamaText:
    """Return a line of /api/generate with a part of the text, or the body with the whole text. Omits tool calls."""
    thought: Thought = {"thinking": said["thinking"]} if "thinking" in said else {}
    return {**head, "response": said["content"], **thought, **end}


_OPEN: Final[End] = {"done": False}
# Returns a line of a stream, or a whole body
Write = Callable[[Head, Said, End], OllamaChat | OllamaText]


def empty_answer(write: Write, name: str, created: float, reason: DoneReason) -> OllamaChat | OllamaText:
    """Return the answer to a call that only loads or unloads a model. `created` is a Unix time in seconds."""
    head: Head = {"model": name, "created_at": timestamp(created)}
    return write(head, {"content": ""}, {"done": True, "done_reason": reason})


def timestamp(seconds: float) -> str:
    """Return a Unix time in the notation of RFC 3339."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


class OllamaAnswer:
    """The answer to one call. The class converts a chat completion to Ollama's format.

    Calls that only load a model have no request and no events.
    """

    def __init__(self, write: Write, parsed: ParsedCompletion, facts: ModelFacts, answer_id: str, created: int) -> None:
        self._write = write
        self._chat = ChatAnswer(parsed, facts, answer_id, created)
        self._head: Head = {"model": facts.name, "created_at": timestamp(created)}
        self._unsent: list[TokenLogprobs] = []  # log-probabilities of tokens whose text has not been sent
        self._end: Finished | None = None

    def feed(self, choice: int, event: Event) -> Sequence[OllamaChat | OllamaText]:
        """See ApiAnswer. Raises InvalidAnswer if the arguments of a tool call are not a JSON object."""
        chunks = [each for chunk in self._chat.feed(choice, event) for each in self._pieces(chunk["choices"][0])]
        if not isinstance(event, Finished):
            return chunks
        self._end = event
        body = self._chat.whole()
        if calls := _calls(body["choices"][0]["message"], event.reason):
            chunks.append(self._chunk({"content": "", "tool_calls": calls}))
        return [*chunks, self._chunk({"content": ""}, _end(body, event))]

    def finish(self) -> Sequence[OllamaChat | OllamaText]:
        """See ApiAnswer."""
        return []

    def whole(self) -> OllamaChat | OllamaText:
        """See ApiAnswer."""
        if self._end is None:
            return self._chunk({"content": ""}, {"done": True, "done_reason": LOADED})
        body = self._chat.whole()
        choice = body["choices"][0]
        message, logprobs = choice["message"], choice["logprobs"]
        said: Said = {"content": message["content"] or ""}
        if thinking := message.get("reasoning_content"):
            said["thinking"] = thinking
        if calls := _calls(message, self._end.reason):
            said["tool_calls"] = calls
        self._unsent = logprobs["content"] if logprobs else []
        return self._chunk(said, _end(body, self._end))

    def _pieces(self, choice: Mapping[str, Any]) -> list[OllamaChat | OllamaText]:
        """Return the chunks for a piece of a chat completion. Tool calls are sent only when complete."""
        if choice["logprobs"]:
            self._unsent += choice["logprobs"]["content"]
        delta = choice["delta"]
        if text := delta.get("reasoning_content"):
            return [self._chunk({"content": "", "thinking": text})]
        return [self._chunk({"content": text})] if (text := delta.get("content")) else []

    def _chunk(self, said: Said, end: End = _OPEN) -> OllamaChat | OllamaText:
        logprobs, self._unsent = self._unsent, []
        return self._write(self._head, said, {"logprobs": logprobs, **end} if logprobs else end)


def _end(body: Mapping[str, Any], end: Finished) -> End:
    """Return the last fields of an answer, using the body of the chat completion. Durations are in nanoseconds."""
    times = end.timings
    return {
        "done": True,
        "done_reason": "length" if end.reason is FinishReason.LENGTH else "stop",
        "total_duration": _nanoseconds(times.total_s),
        "load_duration": 0,  # time is measured only after the model is loaded
        "prompt_eval_count": times.prompt_tokens,
        "prompt_eval_duration": _nanoseconds(times.prefill_s),
        "eval_count": times.generated_tokens,
        "eval_duration": _nanoseconds(times.decode_s),
        "seed": body["seed"],
        "system_fingerprint": body["system_fingerprint"],
        "timings": body["timings"],
    }


def _calls(message: Mapping[str, Any], reason: FinishReason) -> list[OllamaToolCall]:
    """Return the tool calls of a message, with arguments as objects.

    Truncated calls are omitted, and `done_reason` reports the truncation. Raises InvalidAnswer if the arguments of any
    other call are not an object.
    """
    found: list[OllamaToolCall] = []
    for call in message.get("tool_calls", ()):
        function = call["function"] if call["type"] == "function" else custom_as_function(call["custom"])
        name, arguments = function["name"], parsed_object(function["arguments"])
        if arguments is not None:
            found.append({"id": call["id"], "function": {"index": len(found), "name": name, "arguments": arguments}})
        elif reason is not FinishReason.LENGTH:
            raise InvalidAnswer(f"the arguments of the model's call of {name} are not a JSON object")
    return found


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


# The supported version of Ollama's API. Many programs require a minimum version. For example, VS Code requires 0.6.4.
API_VERSION: Final = "0.32.8"
_FORMAT: Final = "gguf"
_LICENSE: Final = "general.license"
# Ollama's options that can have recommended values
_PARAMETERS: Final = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "presence_penalty", "repeat_last_n")


@dataclass(frozen=True, slots=True)
class OllamaModel:
    """A model in the list of /api/tags.

    size        the total size of the model's files in bytes
    modified    when the model's file was last written, in seconds since 1970
    digest      the hash that identifies the contents of the model's file
    family      the architecture
    parameters  the number of parameters, such as "4B"
    context     the size of the model's context in tokens, or 0 if unknown
    """

    name: str
    size: int = 0
    modified: float = 0.0
    digest: str = ""
    family: str = ""
    parameters: str = ""
    quantization: str = ""
    context: int = 0


def listed_elsewhere(model: Mapping[str, Any]) -> OllamaModel:
    """Return another server's model, which contains only the facts in the model's /v1/models entry."""
    context = model.get("max_model_len")
    return OllamaModel(model["id"], modified=created_of(model), context=context if type(context) is int else 0)


def version_body(own: str) -> OllamaVersion:
    """Return the body of /api/version. `own` is llmrun's version."""
    return {"version": API_VERSION, "llmrun": own}


def tags_body(models: Sequence[OllamaModel]) -> OllamaModels:
    """Return the body of /api/tags."""
    return {"models": [{**_named(model), "modified_at": timestamp(model.modified)} for model in models]}


def loaded_body(model: OllamaModel, facts: ModelFacts, memory: int, expires: float) -> OllamaLoadedModel:
    """Return the entry of a loaded model in the list of /api/ps.

    memory   the most bytes of main memory that the model may use
    expires  when the model is unloaded, in seconds since 1970, or infinity
    """
    info = facts.info
    on_gpus, _, layers = info.gpu_layers.partition("/")
    on_gpu = info.file_bytes * int(on_gpus) // int(layers) if layers else 0
    return {
        **_named(replace(model, size=memory + on_gpu)),
        "size_vram": on_gpu,
        "expires_at": timestamp(min(expires, FOREVER_S)),
        "context_length": info.context_size,
    }


def show_body(
    model: OllamaModel, header: Mapping[str, Any], template: str, abilities: Sequence[Ability], facts: ModelFacts | None
) -> OllamaModelFacts:
    """Return the body of /api/show.

    header     all keys of the file's header whose values are not lists
    abilities  the result of `abilities_of`
    facts      the facts about a loaded model, or None for an unloaded model
    """
    known = {"general.architecture": model.family, **header}
    if facts is not None:
        known["general.parameter_count"] = facts.info.parameters
    if model.context:
        known[f"{model.family}.context_length"] = model.context
    body: OllamaModelFacts = {
        "modified_at": timestamp(model.modified),
        "details": _details(model),
        "model_info": {
            key: value for key, value in known.items() if not isinstance(value, float) or math.isfinite(value)
        },
        "capabilities": [*abilities],
        "template": template,
        "parameters": "" if facts is None else _parameters(facts),
    }
    if isinstance(license_name := header.get(_LICENSE), str):
        body["license"] = license_name
    return body


def abilities_of(
    header: Mapping[str, Any], *, sees_images: bool, takes_tools: bool, thinks: bool, fills: bool
) -> list[Ability]:
    """Return the capabilities of a model under Ollama's names.

    header  the keys of the file's header; as in Ollama, a model with a pooling type in its header is embedding-only
    fills   True if the model can fill in the middle
    """
    if named_pooling(header, str(header.get("general.architecture"))):
        return ["embedding"]
    more: dict[Ability, bool] = {"vision": sees_images, "tools": takes_tools, "thinking": thinks, "insert": fills}
    return ["completion", *(ability for ability, has in more.items() if has)]


def _named(model: OllamaModel) -> NamedModel:
    return {
        "name": model.name,
        "model": model.name,
        "size": model.size,
        "digest": model.digest,
        "details": _details(model),
    }


def _details(model: OllamaModel) -> OllamaDetails:
    return {
        "parent_model": "",
        "format": _FORMAT,
        "family": model.family,
        "families": [model.family],
        "parameter_size": model.parameters,
        "quantization_level": model.quantization,
        "context_length": model.context,
    }


def _parameters(facts: ModelFacts) -> str:
    """Return the default values of Ollama's options, one option per line."""
    values = {"num_ctx": facts.info.context_size}
    values |= {name: getattr(facts.default_sampling, name) for name in _PARAMETERS}
    return "\n".join(
        f"{name:<30} {value:g}" if isinstance(value, float) else f"{name:<30} {value}" for name, value in values.items()
    )


def parameter_label(count: int) -> str:
    """Return a number of parameters as a label such as "4B", or "" if the number is 0 (unknown)."""
    return format_weights(count) if count else ""
