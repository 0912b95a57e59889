"""The wire objects of Ollama's API."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, NotRequired, Required, TypedDict

from llmrun.serving.protocol.declarations import Expected, Keywords, Limits, Matching, Refused, Tagged, Usual
from llmrun.serving.protocol.images import Base64
from llmrun.serving.protocol.openai.objects import (
    Count,
    Fingerprint,
    Sampling,
    Stops,
    Texts,
    Timings,
    TokenLogprobs,
    ToolFields,
    TopLogprobs,
)

_DURATION: Final = 'a number of seconds, or a duration such as "5m"'
_NUMBER: Final = r"([0-9]{1,18}(\.[0-9]{0,9})?|\.[0-9]{1,9})"
_UNIT: Final = "(ns|us|µs|μs|ms|s|m|h|d)"  # Go's units, with µ (U+00B5) and μ (U+03BC), and days

ModelName = Annotated[str, "The name of a model. By default, the server's first model answers."]
KeepAlive = Annotated[
    Annotated[float, Expected(_DURATION)]
    | Annotated[str, Matching(rf"[-+]?({_NUMBER}|({_NUMBER}{_UNIT}){{1,9}})", _DURATION)],
    "The time that the model stays loaded: a number of seconds, a duration such as 5m, or -1 for no limit.",
]
NoImages = Annotated[
    list[Any],
    Limits(high=0),
    Refused(([],), "send images in messages of the role user or tool", "messages of this role cannot have images"),
    "Only an empty list is supported.",
]
OllamaImages = Annotated[
    list[Base64], "Images as base64: PNG, JPEG, WebP, GIF or BMP. The model sees the images before the text."
]
Time = Annotated[str, Keywords({"format": "date-time"})]
Nanoseconds = Annotated[Count, "A duration in nanoseconds."]


class Loading(TypedDict, total=False):
    model: ModelName
    keep_alive: KeepAlive


ContextSize = Annotated[
    int,
    Expected("an integer"),
    "Has no effect, because the context is set when the server starts. If the value is larger than the context, the "
    "header `x-llmrun-context` contains the size of the context.",
]


class OllamaOptions(Sampling, total=False):
    """Options that are set when a server starts, such as num_gpu, have no effect."""

    stop: Stops
    num_predict: Annotated[
        int,
        Limits(-2, without=0),
        Expected("an integer of at least 1, or -1 or -2 for no limit"),
        "The maximum number of generated tokens, including thinking; -1 or -2 for no limit.",
    ]
    num_ctx: ContextSize


class OllamaCommon(Loading, total=False):
    stream: Annotated[bool, "Stream the answer as lines of JSON. The default is true."]
    think: Annotated[
        bool | Literal["low", "medium", "high", "max"],
        Expected("true, false, or one of low, medium, high, max"),
        "Turn thinking on or off. Turning thinking on is an error if the model cannot think.",
    ]
    format: Annotated[
        Annotated[Literal["json", ""], Expected('"json" or a JSON schema')] | dict[str, Any],
        Expected('"json" or a JSON schema'),
        "The format of the answer: JSON, or a JSON schema.",
    ]
    options: OllamaOptions
    logprobs: Annotated[bool, "Return the log-probability of every token."]
    top_logprobs: Annotated[
        TopLogprobs, "The number of likeliest tokens to return at each position. Requires `logprobs`."
    ]
    # Options that drop messages or the beginning of a full context, which this server never does.
    truncate: Annotated[Literal[False], Usual((False,)), "Prompts are never truncated."]
    shift: Annotated[Literal[False], Usual((False,)), "The context is never shifted."]
    _debug_render_only: Annotated[Literal[False], Refused((False,), "", "not supported"), "Not supported."]


class _CalledFunction(TypedDict, total=False):
    index: Count
    name: Required[Annotated[str, Limits(1)]]
    arguments: Annotated[dict[str, Any] | str, Expected("an object")]


class OllamaToolCall(TypedDict, total=False):
    """A tool call, whose ID is optional."""

    id: str
    type: Literal["function"]
    function: Required[_CalledFunction]


class OllamaSystemMessage(TypedDict, total=False):
    role: Required[Literal["system", "developer"]]
    content: Texts
    images: NoImages


class OllamaUserMessage(TypedDict, total=False):
    role: Required[Literal["user"]]
    content: Texts
    images: OllamaImages


class OllamaAssistantMessage(TypedDict, total=False):
    role: Required[Literal["assistant"]]
    content: Texts
    images: NoImages
    thinking: Annotated[str, "The thinking that preceded this answer."]
    tool_calls: list[OllamaToolCall]


class OllamaToolMessage(TypedDict, total=False):
    role: Required[Literal["tool"]]
    content: Texts
    images: Annotated[OllamaImages, "Models that cannot read images get a note in their place."]
    tool_name: Annotated[str, "The tool that returned this result."]
    name: Annotated[str, "Older clients use this name for `tool_name`."]
    tool_call_id: Annotated[
        str,
        "The ID of the call that produced this result. A result without an ID belongs to the tool's first call that "
        "has no result yet.",
    ]


OllamaMessage = OllamaSystemMessage | OllamaUserMessage | OllamaAssistantMessage | OllamaToolMessage


class OllamaChatRequest(ToolFields, OllamaCommon, total=False):
    messages: Annotated[
        list[Annotated[OllamaMessage, Tagged("role")]],
        "The conversation. If the last message is an answer, the model continues this answer, unless there are tools. "
        "Without messages, the model is only loaded, or unloaded if `keep_alive` is 0.",
    ]


class OllamaGenerateRequest(OllamaCommon, total=False):
    prompt: Annotated[
        str, "The text of a user message. Without a prompt, the model is only loaded, or unloaded if `keep_alive` is 0."
    ]
    suffix: Annotated[
        str,
        "The text after the answer, which then fills the gap after the prompt. A suffix requires a model that can fill "
        "in the middle, and cannot be combined with `system` or `raw`.",
    ]
    system: Annotated[str, "The text of the system message."]
    raw: Annotated[bool, "Continue the prompt as raw text, without the chat template."]
    images: Annotated[OllamaImages, "Images cannot be combined with `suffix` or `raw`."]
    context: Annotated[
        list[Any],
        Limits(high=0),
        Refused(([],), "send the conversation to /api/chat instead", "obsolete"),
        "Only an empty list is supported. Use /api/chat for conversations.",
    ]
    template: Annotated[
        Literal[""],
        Refused(("",), "write the prompt yourself, with raw", "the model's own template is used"),
        "Not supported. The server always uses the model's own template.",
    ]


class OllamaShowRequest(TypedDict, total=False):
    model: Annotated[str, "The name of a model. Either `model` or `name` is required."]
    name: Annotated[str, "The old name of `model`."]
    verbose: Annotated[Literal[False], Usual((False,))]


DoneReason = Literal["stop", "length", "load", "unload"]


class Head(TypedDict):
    model: str
    created_at: Time


class Counts(TypedDict, total=False):
    """The last fields of a complete answer. `seed`, `system_fingerprint` and `timings` are specific to llmrun."""

    done_reason: Annotated[DoneReason, 'With "length", tool calls that were truncated by the token limit are left out.']
    total_duration: Nanoseconds
    load_duration: Annotated[Literal[0], "Always 0, because time is measured only after the model is loaded."]
    prompt_eval_count: Count
    prompt_eval_duration: Nanoseconds
    eval_count: Count
    eval_duration: Nanoseconds
    seed: Annotated[Count, "The seed of the answer. Send the seed in `options` to get the same answer."]
    system_fingerprint: Fingerprint
    timings: Timings


class End(Counts):
    logprobs: NotRequired[list[TokenLogprobs]]
    done: bool


class Thought(TypedDict, total=False):
    thinking: str


class Said(Thought):
    content: str
    tool_calls: NotRequired[list[OllamaToolCall]]


class _AnswerMessage(Said):
    role: Literal["assistant"]


class OllamaChat(Head, End):
    message: _AnswerMessage


class OllamaText(Head, Thought, End):
    response: str


class OllamaDetails(TypedDict):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str
    context_length: Count


class NamedModel(TypedDict):
    name: str
    model: str
    size: Count
    digest: Annotated[str, "The sha256 of the file if known, or another hash that changes with the file."]
    details: OllamaDetails


class OllamaListedModel(NamedModel):
    modified_at: Time


class OllamaModels(TypedDict):
    models: list[OllamaListedModel]


class OllamaLoadedModel(NamedModel):
    size_vram: Count
    expires_at: Time
    context_length: Count


class OllamaLoadedModels(TypedDict):
    models: list[OllamaLoadedModel]


Ability = Literal["completion", "embedding", "vision", "tools", "thinking", "insert"]


class OllamaModelFacts(TypedDict):
    modified_at: Time
    details: OllamaDetails
    model_info: Annotated[
        dict[str, Any],
        "All keys of the file's header whose values are not lists. For loaded models, the context length is the "
        "server's setting.",
    ]
    capabilities: Annotated[
        list[Ability], "For unloaded models, the capabilities are guessed from the text of the template."
    ]
    template: Annotated[str, "The chat template in the file."]
    parameters: Annotated[
        str, "The default values of some options, one option per line. Empty if the model is not loaded."
    ]
    license: NotRequired[str]
    system: NotRequired[Annotated[str, "The system prompt of a preset."]]


class OllamaVersion(TypedDict):
    version: str
    llmrun: str


class OllamaError(TypedDict):
    error: str
