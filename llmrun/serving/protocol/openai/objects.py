"""The wire objects of OpenAI's API, with the fields of llama-server and vLLM."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, NotRequired, Required, TypedDict

from llmrun.base.types import LARGEST_SCALE
from llmrun.engine.requests import LONGEST_TOOL_NAME
from llmrun.options.sampling_params import SAMPLING, SamplingParameter
from llmrun.serving.protocol.declarations import (
    KEPT,
    MOST_INTEGER,
    Expected,
    Inline,
    Keywords,
    Limits,
    Matching,
    Refused,
    Tagged,
    Usual,
)
from llmrun.serving.protocol.images import ImagePart, InputImagePart, KeptResultFile

MOST_CHOICES: Final = 128
MOST_STOPS: Final = 32
LONGEST_STOP: Final = 256  # characters; a long stop string costs time at every token
MOST_LOGPROBS: Final = 20
MOST_TOOLS: Final = 128  # OpenAI's API has the same limit
LARGEST_SEED: Final = 2**64 - 1
MOST_BIAS: Final = 100.0
NO_LIMIT: Final = -1

Count = Annotated[int, Limits(0)]
Token = Annotated[int, Limits(0), Expected("a token ID")]
Tokens = Annotated[list[Token], Limits(1, noun="token ID"), Expected("a list of token IDs")]
JsonSchema = Annotated[dict[str, Any] | bool | str, Expected("a JSON schema")]
Unused = Annotated[str, "This field is accepted for compatibility, but has no effect."]
Fingerprint = Annotated[str, "A hash of everything that can change the bytes of an answer."]
Stop = Annotated[str, Limits(1, LONGEST_STOP)]
Stops = Annotated[
    Stop | Annotated[list[Stop], Limits(0, MOST_STOPS, "string")],
    Expected("a string or a list of strings"),
    "Stop strings. The answer ends before the first stop string.",
]
Choices = Annotated[list[Annotated[str, Limits(1)]], Limits(1, noun="choice")]
TokenLimit = Annotated[int, Limits(NO_LIMIT, without=0), Expected("an integer of at least 1, or -1 for no limit")]
LimitFromZero = Annotated[int, Limits(NO_LIMIT), Expected("an integer of at least 0, or -1 for no limit")]
Budget = Annotated[int, Limits(NO_LIMIT), "The maximum number of thinking tokens; -1 means no limit."]
TopLogprobs = Annotated[int, Limits(0, MOST_LOGPROBS), "The number of likeliest tokens to return at each position."]
Verbosity = Annotated[Literal["medium"], Usual(("medium",)), "Other values have no effect."]
Effort = Annotated[
    Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"],
    "`none` turns thinking off. All other values turn thinking on if the model can think.",
]
ToolName = Annotated[
    str,
    Matching(
        rf"[a-zA-Z0-9_.-]{{1,{LONGEST_TOOL_NAME}}}",
        f"1 to {LONGEST_TOOL_NAME} letters, digits, underscores, hyphens and dots",
    ),
]
_CLOSED = "Objects without `additionalProperties` allow only declared properties."
STRICT_TOOL: Final = f"Refuse the tool if its schema cannot be enforced. {_CLOSED}"
Strict = Annotated[bool, STRICT_TOOL]
StrictFormat = Annotated[bool, f"{_CLOSED} Every schema is enforced, even without `strict`."]


def sampling_fields() -> Mapping[str, Any]:
    """Return the types of the sampling parameters' fields."""
    return {field: _parameter_type(parameter) for parameter in SAMPLING.values() for field in parameter.wire}


def _parameter_type(parameter: SamplingParameter) -> Any:
    if parameter.texts is not None:
        return Annotated[list[str] | str, Expected("a list of strings"), parameter.help]
    most = MOST_INTEGER if math.isinf(parameter.maximum) else parameter.maximum
    if parameter.wire == ("top_k",):
        return Annotated[int, Limits(-1, most), "Keep only the K most likely tokens; 0 or -1 disables."]
    return Annotated[parameter.kind, Limits(parameter.minimum, most), parameter.help]


class Sampling(TypedDict, total=False):
    parameters: Annotated[dict[str, Any], Inline(sampling_fields)]
    seed: Annotated[
        int,
        Limits(-1, LARGEST_SEED),
        "The same seed gives the same answer, as long as `system_fingerprint` is the same. Every answer contains its "
        "seed. -1 or a missing value means a random seed. Choice 0 uses this seed, and choice i uses the i-th output "
        "of a SplitMix64 generator that starts with this seed.",
    ]
    logit_bias: Annotated[
        dict[str, Annotated[float, Limits(-MOST_BIAS, MOST_BIAS)] | Literal[False]] | list[list[float | bool]],
        Expected("an object or a list of pairs"),
        "Maps token IDs to numbers that are added to the logits, or lists pairs of token IDs and numbers. -100 and "
        "false ban a token.",
    ]
    ignore_eos: Annotated[bool, "Ban the tokens that end an answer."]


class ChosenAdapter(TypedDict, total=False):
    id: Annotated[int, Limits(0), "The ID of an adapter, as in the answer of `GET /lora-adapters`."]
    name: str
    scale: Required[Annotated[float, Limits(-LARGEST_SCALE, LARGEST_SCALE)]]


class StructuredOutputs(TypedDict, total=False):
    """One format for the answer, as in vLLM."""

    json: JsonSchema
    regex: str
    choice: Choices
    grammar: str
    json_object: bool


ReturnProgress = Annotated[bool, "Report the progress of the prompt in the stream, as in llama-server."]


class Shared(Sampling, total=False):
    model: Annotated[str, "The name of a model or preset. A missing or empty name selects the default model."]
    stream: Annotated[bool, "Send the answer as server-sent events while it is generated."]
    return_progress: ReturnProgress
    lora: Annotated[
        list[ChosenAdapter], "The LoRA adapters to use. By default, the adapters and scales of `--lora` are used."
    ]
    stop: Stops
    json_schema: Annotated[JsonSchema, "A JSON schema for the answer, as in llama-server."]
    grammar: Annotated[str, "A grammar for the answer, in GBNF or llguidance's Lark dialect."]
    structured_outputs: StructuredOutputs
    guided_json: Annotated[JsonSchema, "A JSON schema for the answer, as in older versions of vLLM."]
    guided_regex: Annotated[str, "A regular expression for the answer, as in older versions of vLLM."]
    guided_choice: Annotated[Choices, "The possible answers, as in older versions of vLLM."]
    guided_grammar: Annotated[str, "A grammar for the answer, as in older versions of vLLM."]
    user: Unused
    safety_identifier: Unused
    prompt_cache_key: Unused
    service_tier: Annotated[
        Literal["auto", "default"],
        Usual(("auto", "default")),
        "This field is accepted for compatibility, but has no effect.",
    ]


class StreamOptions(TypedDict, total=False):
    include_usage: Annotated[bool, "Send a last chunk with the token counts."]
    # OpenAI pads chunks to hide their lengths from eavesdroppers.
    include_obfuscation: Annotated[Literal[False], Usual((False,)), "Chunks are never padded."]


class _DescribedSchema(TypedDict, total=False):
    name: str
    description: str
    schema: Required[JsonSchema]
    strict: StrictFormat


class ResponseFormat(TypedDict, total=False):
    """The format that the answer must have. A format cannot be combined with tools."""

    type: Required[Literal["text", "json_object", "json_schema"]]
    schema: Annotated[JsonSchema, "A schema for json_object, as in llama-server."]
    json_schema: _DescribedSchema


class Common(Shared, total=False):
    stream_options: StreamOptions
    n: Annotated[int, Limits(1, MOST_CHOICES), "The number of choices for each prompt."]
    response_format: ResponseFormat
    metadata: Annotated[dict[str, Any], "This field is accepted for compatibility, but has no effect."]
    store: Annotated[Literal[False], Usual((False,)), "This field is accepted for compatibility, but has no effect."]


class AnswerLimit(TypedDict, total=False):
    """The maximum length of an answer."""

    max_completion_tokens: Annotated[
        TokenLimit,
        "The maximum number of generated tokens, including thinking. -1 means no limit, which is the default. This "
        "field takes precedence over `max_tokens`.",
    ]
    max_tokens: Annotated[
        TokenLimit,
        "The maximum number of generated tokens, including thinking. -1 means no limit, which is the default.",
    ]


class LlamaLimit(TypedDict, total=False):
    """The maximum length of an answer, as in llama-server."""

    n_predict: Annotated[
        LimitFromZero,
        "llama.cpp's name for `max_tokens`: the maximum number of generated tokens, including thinking. -1 means no "
        "limit, which is the default. With 0, the prompt is cached, and the answer is empty.",
    ]


class Thinking(TypedDict, total=False):
    enable_thinking: Annotated[bool, "Turn thinking on or off, whatever the effort is."]
    thinking_budget_tokens: Budget
    thinking_budget: Budget
    think_budget: Budget
    chat_template_kwargs: Annotated[
        dict[str, Any],
        "Variables for the model's chat template. `enable_thinking` and `thinking` also turn thinking on or off, and "
        "have precedence over other fields.",
    ]


class ChatThinking(Thinking, total=False):
    reasoning_effort: Effort


class TextPart(TypedDict, total=False):
    """A text in a message. The Responses API uses the types input_text and output_text."""

    type: Required[Literal["text", "input_text", "output_text"]]
    text: Required[str]
    # Every answer of the Responses API contains these fields.
    annotations: Annotated[list[Any], Usual(([],))]
    logprobs: Annotated[list[Any], Usual(([],))]


class RefusalPart(TypedDict, total=False):
    type: Required[Literal["refusal"]]
    refusal: Required[str]
    annotations: Annotated[list[Any], Usual(([],))]
    logprobs: Annotated[list[Any], Usual(([],))]


PARTS: Final = Tagged("type", unknown="parts of the type {} are not supported here", advice="send text only")
_USER_PARTS: Final = Tagged("type", unknown="parts of the type {} are not supported", advice="send text and images")
_JOINED: Final = "The texts of several parts are joined by newlines."


Texts = Annotated[
    str | list[Annotated[TextPart, PARTS]],
    Expected("a string or a list of parts"),
    f"The text of the message. {_JOINED}",
]
UserContent = Annotated[
    str | list[Annotated[TextPart | ImagePart | InputImagePart, _USER_PARTS]],
    Expected("a string or a list of parts"),
    f"The texts and the images of the message. {_JOINED}",
]
ResultContent = Annotated[
    str | list[Annotated[TextPart | KeptResultFile, _USER_PARTS]],
    Expected("a string or a list of parts"),
    f"The texts and the images of the result. {_JOINED}",
]
AnswerTexts = Annotated[
    str | list[Annotated[TextPart | RefusalPart, PARTS]],
    Expected("a string or a list of parts"),
    f"The text of the message. {_JOINED}",
]


class _AnyMessage(TypedDict, total=False):
    name: str
    function_call: Annotated[Any, Refused((), "send `tool_calls` instead")]
    audio: Annotated[Any, Refused((), "send text instead")]


class SystemMessage(_AnyMessage, total=False):
    role: Required[Annotated[Literal["system", "developer"], "`developer` has the same meaning as `system`."]]
    content: Required[Texts]


class UserMessage(_AnyMessage, total=False):
    role: Required[Literal["user"]]
    content: Required[UserContent]


PAST_ARGUMENTS: Final = "The arguments as a JSON object, or any text, such as arguments that were cut off."


class CalledFunction(TypedDict, total=False):
    name: Required[Annotated[str, Limits(1)]]
    arguments: Annotated[str | dict[str, Any], Expected("a JSON object as a string"), PAST_ARGUMENTS]


class CalledCustom(TypedDict):
    name: Annotated[str, Limits(1)]
    input: str


class ToolCall(TypedDict, total=False):
    id: str
    type: Literal["function"]
    function: Required[CalledFunction]


class CustomToolCall(TypedDict, total=False):
    id: str
    type: Required[Literal["custom"]]
    custom: Required[CalledCustom]


PastCall = Annotated[ToolCall | CustomToolCall, Tagged("type", default="function")]


class AssistantMessage(_AnyMessage, total=False):
    role: Required[Literal["assistant"]]
    content: AnswerTexts
    refusal: str
    reasoning_content: Annotated[str, "The thinking that preceded this answer."]
    reasoning: Annotated[str, "Another name for `reasoning_content`."]
    tool_calls: list[PastCall]
    # Every answer of OpenAI's API contains this field.
    annotations: Annotated[list[Any], Usual(([],))]


class ToolMessage(_AnyMessage, total=False):
    role: Required[Literal["tool"]]
    content: ResultContent
    tool_call_id: Annotated[str, "The ID of the call that this message answers."]


class _FunctionMessage(TypedDict):
    role: Annotated[Literal["function"], Refused((), "send results with the role tool")]


Message = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage | _FunctionMessage, Tagged("role")]


class Function(TypedDict, total=False):
    """A function that the model may call. Chat templates also receive undeclared fields."""

    name: Required[ToolName]
    description: str
    parameters: Annotated[dict[str, Any], "The JSON schema of the arguments."]
    strict: Strict


class Tool(TypedDict, total=False):
    type: Literal["function"]
    function: Required[Annotated[Function, KEPT]]


class TextInput(TypedDict):
    type: Literal["text"]


class InputGrammar(TypedDict):
    syntax: Literal["lark", "regex"]
    definition: Annotated[str, "The grammar or regular expression that the whole input must match."]


class _GrammarInput(TypedDict):
    type: Literal["grammar"]
    grammar: InputGrammar


class _Custom(TypedDict, total=False):
    name: Required[ToolName]
    description: str
    format: Annotated[TextInput | _GrammarInput, Tagged("type")]


class CustomTool(TypedDict):
    """A tool whose input is a text instead of a JSON object."""

    type: Literal["custom"]
    custom: _Custom


OWN_TYPES: Final = ("function", "custom", "namespace")
LEFT_OUT: Final = "Tools that this server cannot run, such as `web_search`, are left out."


class OtherTool(TypedDict):
    """A tool that only other servers can run. The tool is left out, and `x-llmrun-ignored` names the type."""

    type: Annotated[str, Keywords({"not": {"enum": [*OWN_TYPES]}})]


class _Named(TypedDict):
    name: str


class FunctionChoice(TypedDict, total=False):
    type: Required[Literal["function"]]
    function: Required[_Named]


class CustomChoice(TypedDict):
    type: Literal["custom"]
    custom: _Named


_Reference = Annotated[FunctionChoice | CustomChoice, Tagged("type", default="function")]


class _Allowed(TypedDict, total=False):
    mode: Literal["auto", "required"]
    tools: Required[Annotated[list[_Reference], Limits(1, noun="tool")]]


class AllowedTools(TypedDict, total=False):
    type: Required[Literal["allowed_tools"]]
    allowed_tools: Required[_Allowed]


class ToolFields(TypedDict, total=False):
    tools: Annotated[
        list[Annotated[Tool | CustomTool | Annotated[OtherTool, KEPT], Tagged("type", default="function")]],
        Limits(0, MOST_TOOLS, "tool"),
        LEFT_OUT,
    ]
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | FunctionChoice | CustomChoice | AllowedTools,
        Tagged("type"),
        Expected("one of none, auto, required, or an object"),
    ]
    parallel_tool_calls: Annotated[bool, "Allow several tool calls in one answer. The default is true."]


class _RefusedInCompletions(TypedDict, total=False):
    min_tokens: Annotated[Any, Refused((0,), "ban the end tokens with `ignore_eos`, and set `max_tokens`")]
    use_beam_search: Annotated[Any, Refused((False,), "use `n` for several answers")]


_TO_LEGACY: Final = "use `tools` and `tool_choice` instead"


class ChatRequest(_RefusedInCompletions, Common, AnswerLimit, LlamaLimit, ToolFields, ChatThinking, total=False):
    functions: Annotated[Any, Refused(([],), _TO_LEGACY)]
    function_call: Annotated[Any, Refused(("none",), _TO_LEGACY)]
    audio: Annotated[Any, Refused((), "this server answers with text only")]
    modalities: Annotated[Any, Refused((["text"],), "this server answers with text only")]
    moderation: Annotated[Any, Refused()]
    verbosity: Verbosity
    web_search_options: Annotated[Any, Refused((), "define a tool that searches")]
    messages: Required[Annotated[list[Message], Limits(1, noun="message")]]
    logprobs: Annotated[bool, "Return the log-probability of every generated token, including thinking and tool calls."]
    top_logprobs: TopLogprobs
    continue_final_message: Annotated[bool, "Continue the last message, whose role must be assistant, as in vLLM."]
    add_generation_prompt: Annotated[bool, "The opposite of `continue_final_message`, as in vLLM."]


Prompts = Annotated[
    str | Annotated[list[str | Tokens], Limits(1, noun="prompt")] | Tokens,
    Expected("a string, a list of strings, a list of token IDs, or a list of such lists"),
]


class CompletionRequest(_RefusedInCompletions, Common, total=False):
    max_completion_tokens: Annotated[LimitFromZero, "Another name for `max_tokens`, which takes precedence."]
    max_tokens: Annotated[
        LimitFromZero,
        "The maximum number of generated tokens. -1 means no limit, which is the default. With 0, only the prompt is "
        "processed, for example to return its log-probabilities.",
    ]
    n_predict: Annotated[LimitFromZero, "llama.cpp's name for `max_tokens`."]
    prompt: Required[Annotated[Prompts, "One or more prompts. Control strings in text prompts become control tokens."]]
    suffix: Annotated[
        str,
        "The text after the answer, which then fills the gap after the prompt. A suffix requires text prompts and a "
        "model that can fill in the middle, and cannot be combined with `echo`. Control strings in the "
        "prompt and the suffix remain text.",
    ]
    logprobs: Annotated[
        int,
        Limits(0, MOST_LOGPROBS),
        "Return the log-probability of every token and of this many likeliest tokens at each position.",
    ]
    echo: Annotated[
        bool,
        "Return the prompt before the answer. With `logprobs`, the prompt's tokens have log-probabilities, too, and no "
        "part of the prompt is reused from the cache. Cannot be combined with `suffix`.",
    ]
    best_of: Annotated[int, Limits(1, MOST_CHOICES), "The only supported value is the value of `n`."]


class _CachedTokens(TypedDict):
    cached_tokens: Count


class _ReasoningTokens(TypedDict):
    reasoning_tokens: Count


class Usage(TypedDict):
    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: _CachedTokens
    completion_tokens_details: _ReasoningTokens


class Timings(TypedDict):
    """Times and speeds, as in llama-server."""

    cache_n: Count
    prompt_n: Count
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: Count
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    draft_n: NotRequired[Count]
    draft_n_accepted: NotRequired[Count]


class ImageProgress(TypedDict):
    """The image that is being encoded."""

    number: Annotated[Count, "The number of the image in the prompt, from 1."]
    count: Annotated[Count, "The number of images in the prompt."]
    share: Annotated[float, "The fraction of this image that is encoded, or 0 if unknown."]
    left_ms: NotRequired[Annotated[Count, "The predicted time until all images are encoded, if it is long."]]


class PromptProgress(TypedDict):
    """The progress of the prompt, as in llama-server. Only streams of requests with `return_progress` contain it."""

    total: Annotated[Count, "The number of the prompt's tokens."]
    cache: Annotated[Count, "The number of these tokens that were in the cache."]
    processed: Annotated[Count, "The number of tokens in the cache now."]
    time_ms: Annotated[Count, "The time since the processing of the prompt began."]
    image: NotRequired[ImageProgress]


class _Head(TypedDict):
    id: str
    created: Count
    model: str
    system_fingerprint: Fingerprint
    seed: Annotated[Count, "The seed of choice 0. Send the same seed again to get the same answer."]


class _Counts(TypedDict):
    usage: Usage
    timings: Timings


class _Progress(TypedDict, total=False):
    usage: Annotated[
        Usage | None, "Present only with `stream_options.include_usage`, and null in all chunks except the last."
    ]
    timings: Annotated[Timings, "The timings of one choice, in the chunk with the choice's finish reason."]
    prompt_progress: PromptProgress


FinishReason = Literal["stop", "length", "tool_calls"]


class TokenEntry(TypedDict):
    token: str
    logprob: float
    bytes: list[Count]


class TokenLogprobs(TokenEntry):
    top_logprobs: list[TokenEntry]


class ChatLogprobs(TypedDict):
    content: list[TokenLogprobs]
    refusal: None


class _WrittenFunction(TypedDict):
    name: str
    arguments: Annotated[str, "The arguments as a JSON object."]


class AnswerCall(TypedDict):
    id: str
    type: Literal["function"]
    function: _WrittenFunction


class AnswerCustomCall(TypedDict):
    id: str
    type: Literal["custom"]
    custom: CalledCustom


class AnswerMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[Annotated[str, "The thinking before the answer, if there is any."]]
    tool_calls: NotRequired[list[AnswerCall | AnswerCustomCall]]


class _ChatChoice(TypedDict):
    index: Count
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(_Head, _Counts):
    object: Literal["chat.completion"]
    choices: list[_ChatChoice]


class FunctionPiece(TypedDict, total=False):
    name: str
    arguments: str


class CustomPiece(TypedDict, total=False):
    name: str
    input: str


class ToolCallPiece(TypedDict):
    """A piece of a call, which has either `function` or `custom`."""

    index: Count
    id: NotRequired[str]
    type: NotRequired[Literal["function", "custom"]]
    function: NotRequired[FunctionPiece]
    custom: NotRequired[CustomPiece]


class Delta(TypedDict, total=False):
    role: Literal["assistant"]
    content: str
    reasoning_content: str
    tool_calls: list[ToolCallPiece]


class _NoDelta(TypedDict):
    """The delta of a chunk with `prompt_progress`."""

    role: Literal["assistant"]
    content: None


class _ChunkChoice(TypedDict):
    index: Count
    delta: Delta | _NoDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatCompletionChunk(_Head, _Progress):
    object: Literal["chat.completion.chunk"]
    choices: list[_ChunkChoice]


class TextLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: Annotated[list[float | None], "The first token of a repeated prompt has null."]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[Count]


class _TextChoice(TypedDict):
    index: Count
    text: str
    logprobs: TextLogprobs | None


class _EndedTextChoice(_TextChoice):
    finish_reason: FinishReason


class _OpenTextChoice(_TextChoice):
    finish_reason: FinishReason | None


class Completion(_Head, _Counts):
    object: Literal["text_completion"]
    choices: list[_EndedTextChoice]


class CompletionChunk(_Head, _Progress):
    object: Literal["text_completion"]
    choices: list[_OpenTextChoice]


class _ModelSizes(TypedDict):
    """The sizes of a model, as in llama-server."""

    n_ctx: Count
    n_ctx_train: Count
    n_vocab: Count
    n_params: Count
    size: Annotated[Count, "The size of the file in bytes."]
    ftype: str


class _Modalities(TypedDict):
    """The kinds of input and output of a model, as in llama-server."""

    input_modalities: list[Literal["text", "image"]]
    output_modalities: list[Literal["text"]]


class Model(TypedDict):
    id: str
    object: Literal["model"]
    created: Count
    owned_by: str
    parent: NotRequired[Annotated[str, "The name of the base model, if `id` is the name of a LoRA adapter."]]
    max_model_len: NotRequired[Count]
    meta: NotRequired[_ModelSizes]
    system_fingerprint: NotRequired[Fingerprint]
    default_sampling: NotRequired[Annotated[dict[str, Any], "The sampling parameters of requests that set none."]]
    batch_invariant: NotRequired[Annotated[bool, "True if answers do not depend on the other requests in the batch."]]
    architecture: NotRequired[_Modalities]


class Models(TypedDict):
    object: Literal["list"]
    data: list[Model]


class Adapter(TypedDict):
    id: Count
    name: str
    scale: float
    alora_invocation_tokens: NotRequired[
        Annotated[list[Count], "The tokens that activate the adapter, for adapters with such tokens."]
    ]


class _Problem(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(TypedDict):
    error: _Problem
