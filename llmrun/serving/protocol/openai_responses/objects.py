"""The wire objects of the Responses API."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, NotRequired, Required, TypedDict

from llmrun.serving.protocol.declarations import KEPT, Expected, Keywords, Limits, Refused, Tagged, Usual
from llmrun.serving.protocol.openai.objects import (
    LEFT_OUT,
    MOST_TOOLS,
    PARTS,
    PAST_ARGUMENTS,
    STRICT_TOOL,
    AssistantMessage,
    Count,
    Effort,
    Error,
    Fingerprint,
    InputGrammar,
    JsonSchema,
    OtherTool,
    PromptProgress,
    ResultContent,
    Shared,
    StrictFormat,
    SystemMessage,
    TextInput,
    Thinking,
    Timings,
    TokenLogprobs,
    ToolName,
    TopLogprobs,
    UserMessage,
    Verbosity,
)

LOGPROBS: Final = "message.output_text.logprobs"
_STATELESS: Final = "this server stores no responses: send the whole conversation in `input`"
_IN_FULL: Final = "this server never truncates conversations: leave out old items"
_TO_LIMIT: Final = "use `max_output_tokens`"
_ONE: Final = "send several requests with different seeds"


class _Unsupported(TypedDict, total=False):
    min_tokens: Annotated[Any, Refused((0,), "ban the end tokens with `ignore_eos`, and set `max_output_tokens`")]
    use_beam_search: Annotated[Any, Refused((False,), _ONE)]
    previous_response_id: Annotated[Any, Refused((), _STATELESS)]
    conversation: Annotated[Any, Refused((), _STATELESS)]
    store: Annotated[Any, Refused((False,), _STATELESS)]
    background: Annotated[
        Any, Refused((False,), "this server stores no responses: use `stream` to get the answer while it is generated")
    ]
    prompt: Annotated[Any, Refused((), "send the text of the prompt in `instructions` and `input`")]
    truncation: Annotated[Any, Refused(("disabled",), _IN_FULL)]
    context_management: Annotated[Any, Refused(([],), _IN_FULL)]
    moderation: Annotated[Any, Refused()]
    # The fields below belong to chat completions, and would have no effect here.
    messages: Annotated[Any, Refused((), "use `input`")]
    response_format: Annotated[Any, Refused((), "use `text.format`")]
    reasoning_effort: Annotated[Any, Refused((), "use `reasoning.effort`")]
    max_tokens: Annotated[Any, Refused((), _TO_LIMIT)]
    max_completion_tokens: Annotated[Any, Refused((), _TO_LIMIT)]
    n_predict: Annotated[Any, Refused((), _TO_LIMIT)]
    n: Annotated[Any, Refused((1,), _ONE)]


class _Item(TypedDict, total=False):
    id: Annotated[Any, "Ignored, like `status`."]
    status: Any


class _MessageItem(_Item, total=False):
    type: Literal["message"]


class _SystemItem(_MessageItem, SystemMessage):
    pass


class _UserItem(_MessageItem, UserMessage):
    pass


class _AnswerItem(_MessageItem, AssistantMessage):
    pass


class ThinkingPart(TypedDict):
    type: Literal["reasoning_text"]
    text: str


class _ThinkingItem(_Item, total=False):
    type: Required[Literal["reasoning"]]
    summary: Annotated[list[Any], Usual(([],)), "This server ignores summaries, which only other servers write."]
    content: Annotated[str | list[Annotated[ThinkingPart, PARTS]], Expected("a string or a list of parts")]


class _AnyCallItem(_Item):
    call_id: NotRequired[str]
    name: Annotated[str, Limits(1)]
    namespace: NotRequired[Annotated[str, "The namespace of the tool."]]


class _CallItem(_AnyCallItem):
    type: Literal["function_call"]
    arguments: Annotated[str, PAST_ARGUMENTS]


class _CustomCallItem(_AnyCallItem):
    type: Literal["custom_tool_call"]
    input: str


class _ResultItem(_Item):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: NotRequired[Annotated[str, "The ID of the tool call."]]
    output: Annotated[ResultContent, "The result of the tool call."]


class _ReferenceItem(TypedDict):
    type: Annotated[Literal["item_reference"], Refused((), "send the item itself", '"item_reference" is not supported')]


class ResponseTool(TypedDict, total=False):
    type: Literal["function"]
    name: Required[ToolName]
    description: str | None
    parameters: Annotated[dict[str, Any] | None, "The JSON schema of the arguments."]
    strict: Annotated[bool | None, STRICT_TOOL]


class _GrammarInput(InputGrammar):
    type: Literal["grammar"]


class ResponseCustomTool(TypedDict, total=False):
    """A tool whose input is a text instead of a JSON object."""

    type: Required[Literal["custom"]]
    name: Required[ToolName]
    description: str | None
    format: Annotated[TextInput | _GrammarInput, Tagged("type")]


class ResponseNamespace(TypedDict, total=False):
    """A group of tools. The model sees each tool as `NAMESPACE__NAME`."""

    type: Required[Literal["namespace"]]
    name: Required[ToolName]
    description: str | None
    tools: Required[
        Annotated[
            list[
                Annotated[
                    ResponseTool | ResponseCustomTool | Annotated[OtherTool, KEPT], Tagged("type", default="function")
                ]
            ],
            Limits(0, MOST_TOOLS, "tool"),
        ]
    ]


SupportedTool = ResponseTool | ResponseCustomTool
AnyTool = Annotated[
    ResponseTool | ResponseCustomTool | ResponseNamespace | Annotated[OtherTool, KEPT],
    Tagged("type", default="function"),
]


AnyTools = Annotated[list[AnyTool], Limits(0, MOST_TOOLS, "tool"), LEFT_OUT]


SUPPORTED_ITEMS: Final = (
    *("message", "reasoning", "item_reference", "function_call", "function_call_output"),
    *("custom_tool_call", "custom_tool_call_output", "additional_tools"),
)


class ToolsItem(_Item, total=False):
    """More tools, which are added to `tools`."""

    type: Required[Literal["additional_tools"]]
    role: Any
    tools: Required[AnyTools]


class OtherItem(TypedDict):
    """An item that only other servers write, such as `web_search_call`. The item is left out."""

    type: Annotated[str, Keywords({"not": {"enum": [*SUPPORTED_ITEMS]}})]


MessageItem = _SystemItem | _UserItem | _AnswerItem
CallItem = _CallItem | _CustomCallItem
SupportedItem = MessageItem | _ThinkingItem | CallItem | _ResultItem | ToolsItem
InputItem = Annotated[
    Annotated[MessageItem, Tagged("role")]
    | _ThinkingItem
    | _CallItem
    | _CustomCallItem
    | _ResultItem
    | _ReferenceItem
    | ToolsItem
    | Annotated[OtherItem, KEPT],
    Tagged("type", default="message"),
]


class _ChosenTool(TypedDict):
    type: Literal["function", "custom"]
    name: str
    namespace: NotRequired[str]


class _AllowedTools(TypedDict, total=False):
    type: Required[Literal["allowed_tools"]]
    mode: Literal["auto", "required"]
    tools: Required[Annotated[list[Annotated[_ChosenTool, Tagged("type", default="function")]], Limits(1, noun="tool")]]


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | _ChosenTool | _AllowedTools,
    Tagged("type"),
    Expected("one of none, auto, required, or an object"),
]


class TextFormat(TypedDict, total=False):
    """The format that the answer must have. A format cannot be combined with tools."""

    type: Required[Literal["text", "json_object", "json_schema"]]
    name: str
    description: str | None
    schema: JsonSchema
    strict: StrictFormat


class _TextOptions(TypedDict, total=False):
    format: TextFormat
    verbosity: Verbosity


class _StreamOptions(TypedDict, total=False):
    # OpenAI pads events to hide their lengths from eavesdroppers.
    include_obfuscation: Annotated[Literal[False], Usual((False,))]


class _Reasoning(TypedDict, total=False):
    effort: Effort


class ResponseRequest(_Unsupported, Shared, Thinking, total=False):
    input: Required[
        Annotated[
            str | list[InputItem],
            Expected("a string or a list of items"),
            "A text, or all items of a conversation. The server stores no items. The items of past answers can be sent "
            "as they were received. An empty list counts as an empty message.",
        ]
    ]
    instructions: Annotated[str, "The text of a system message before the conversation."]
    stream_options: _StreamOptions
    metadata: Annotated[dict[str, str], "The answer repeats these values."]
    max_output_tokens: Annotated[
        int, Limits(1), "The maximum number of generated tokens, including thinking. By default, there is no limit."
    ]
    max_tool_calls: Annotated[
        int, Limits(1), "The maximum number of calls of tools on the server, which has no tools of its own."
    ]
    text: _TextOptions
    reasoning: _Reasoning
    tools: AnyTools
    tool_choice: ToolChoice
    parallel_tool_calls: Annotated[bool, "Allow several tool calls in one answer. The default is true."]
    include: Annotated[
        list[str],
        "`message.output_text.logprobs` requests the log-probabilities of the text's tokens. Other names are ignored.",
    ]
    top_logprobs: TopLogprobs


class Settings(TypedDict):
    """The settings of a response, with defaults for missing fields."""

    background: Literal[False]
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    temperature: float
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    previous_response_id: None
    reasoning: dict[Literal["effort", "summary"], str | None]
    service_tier: Literal["default"]
    store: Literal[False]
    text: _TextOptions
    tool_choice: ToolChoice
    tools: Annotated[list[ResponseTool | ResponseCustomTool | ResponseNamespace], "The tools that were not left out."]
    top_logprobs: Count
    truncation: Literal["disabled"]
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None


Status = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal[Status, "failed"]


class OutputText(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: Annotated[list[Any], Limits(0, 0)]
    logprobs: list[TokenLogprobs]


class _OutputItem(TypedDict):
    id: str
    status: Status


class _Message(_OutputItem):
    type: Literal["message"]
    role: Literal["assistant"]
    content: list[OutputText]


class _Thoughts(_OutputItem):
    type: Literal["reasoning"]
    summary: Annotated[list[Any], Limits(0, 0)]
    content: list[ThinkingPart]


class CalledTool(TypedDict):
    name: str
    namespace: NotRequired[Annotated[str, "The namespace of the tool, if the tool belongs to one."]]


class NamedCall(CalledTool):
    call_id: str


class _Call(_OutputItem, NamedCall):
    type: Literal["function_call"]
    arguments: str


class _CustomCall(NamedCall):
    id: str
    type: Literal["custom_tool_call"]
    input: str


ResponseOutputItem = _Message | _Thoughts | _Call | _CustomCall


class ResponseUsage(TypedDict):
    input_tokens: Count
    input_tokens_details: dict[Literal["cached_tokens", "cache_write_tokens"], Count]
    output_tokens: Count
    output_tokens_details: dict[Literal["reasoning_tokens"], Count]
    total_tokens: Count


class Response(Settings):
    id: str
    object: Literal["response"]
    created_at: Count
    completed_at: Count | None
    model: str
    status: ResponseStatus
    error: dict[Literal["code", "message"], str] | None
    incomplete_details: dict[Literal["reason"], Literal["max_output_tokens"]] | None
    output: list[ResponseOutputItem]
    usage: ResponseUsage | None
    seed: Annotated[Count, "The seed of the answer. Send the same seed again to get the same answer."]
    system_fingerprint: Fingerprint
    timings: NotRequired[Annotated[Timings, "Present only after the answer has finished."]]


WholeType = Literal[
    "response.created", "response.in_progress", "response.completed", "response.incomplete", "response.failed"
]


class WholeEvent(TypedDict):
    type: WholeType
    response: Response
    sequence_number: Count
    prompt_progress: NotRequired[PromptProgress]


EventType = Literal[
    "response.output_item.added",
    "response.output_item.done",
    "response.content_part.added",
    "response.content_part.done",
    "response.output_text.delta",
    "response.output_text.done",
    "response.reasoning_text.delta",
    "response.reasoning_text.done",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.custom_tool_call_input.delta",
    "response.custom_tool_call_input.done",
]


class ItemFields(TypedDict, total=False):
    """The fields of an ItemEvent that depend on the event's type."""

    item: ResponseOutputItem
    item_id: str
    content_index: Count
    part: OutputText | ThinkingPart
    delta: str
    text: str
    logprobs: list[TokenLogprobs]
    arguments: str
    input: str


class ItemEvent(ItemFields):
    type: EventType
    output_index: Count
    sequence_number: Count


class ErrorEvent(Error):
    type: Literal["error"]
    sequence_number: Count
    code: str | None
    message: str
    param: str | None


ResponseEvent = WholeEvent | ItemEvent | ErrorEvent
