"""The wire objects of Anthropic's API."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, NotRequired, Required, TypedDict

from llmrun.serving.protocol.declarations import KEPT, Expected, Keywords, Limits, Refused, Tagged, Usual
from llmrun.serving.protocol.images import AS_BASE64, Base64
from llmrun.serving.protocol.openai.objects import (
    LEFT_OUT,
    MOST_TOOLS,
    Count,
    Fingerprint,
    PromptProgress,
    ReturnProgress,
    Sampling,
    Stops,
    Strict,
    ToolName,
)

# This edit has no effect, because the model's template decides whether the prompt contains past thinking.
KNOWN_EDIT: Final = "clear_thinking_20251015"
_UNUSED: Final = "This field is accepted for compatibility, but has no effect."
_BLOCKS: Final = Tagged("type", unknown="blocks of the type {} are not supported here", advice="send text")
_USER_BLOCKS: Final = Tagged(
    "type", unknown="blocks of the type {} are not supported here", advice="send text and images"
)
_CONTENT: Final = Expected("a string or a list of blocks")


class _Block(TypedDict):
    cache_control: NotRequired[Annotated[Any, _UNUSED]]


class _Text(_Block):
    type: Literal["text"]
    text: str


class _Thought(_Block):
    type: Literal["thinking"]
    thinking: str
    signature: NotRequired[str]


class _RedactedThought(_Block):
    type: Literal["redacted_thinking"]
    data: NotRequired[Annotated[str, Usual(()), "This value is ignored, because only Anthropic's servers can read it."]]


class _ToolUse(_Block):
    type: Literal["tool_use"]
    id: str
    name: Annotated[str, Limits(1)]
    input: dict[str, Any]


class _PastToolUse(_Block):
    type: Literal["tool_use"]
    id: NotRequired[str]
    name: Annotated[str, Limits(1)]
    input: dict[str, Any]


Texts = Annotated[str | list[Annotated[_Text, _BLOCKS]], _CONTENT]


class _Base64Source(TypedDict):
    type: Literal["base64"]
    media_type: NotRequired[Annotated[str, f"{_UNUSED} The image itself shows its format."]]
    data: Annotated[Base64, "A PNG, JPEG, WebP, GIF or BMP file, as base64."]


class _UrlSource(TypedDict):
    type: Annotated[Literal["url"], Refused((), AS_BASE64, "this server fetches no URLs")]


class _FileSource(TypedDict):
    type: Annotated[Literal["file"], Refused((), AS_BASE64, "this server stores no files")]


class ImageBlock(_Block):
    type: Literal["image"]
    source: Annotated[_Base64Source | _UrlSource | _FileSource, Tagged("type")]


class ResultFileBlock(_Block):
    """An image, as in messages, or a document. Models get a note in place of files that they cannot read.

    Errors would end an agent's conversation, because all later requests contain the file again.
    """

    type: Literal["image", "document"]


class _ToolReference(_Block):
    type: Literal["tool_reference"]
    tool_name: str


ResultBlock = Annotated[_Text | Annotated[ResultFileBlock, KEPT] | _ToolReference, _BLOCKS]
ResultContent = Annotated[str | list[ResultBlock], _CONTENT]


class _ToolResult(_Block):
    type: Literal["tool_result"]
    tool_use_id: NotRequired[str]
    content: NotRequired[ResultContent]
    is_error: NotRequired[bool]


UserBlock = Annotated[_Text | ImageBlock | _ToolResult, _USER_BLOCKS]
AssistantBlock = Annotated[_Text | _Thought | _RedactedThought | _PastToolUse, _BLOCKS]


class _UserTurn(TypedDict):
    role: Literal["user"]
    content: Annotated[str | list[UserBlock], _CONTENT]


class _AssistantTurn(TypedDict):
    role: Literal["assistant"]
    content: Annotated[str | list[AssistantBlock], _CONTENT]


class _SystemTurn(TypedDict):
    role: Literal["system"]
    content: Texts


Turn = Annotated[_UserTurn | _AssistantTurn | _SystemTurn, Tagged("role")]


class AnthropicTool(TypedDict, total=False):
    type: Literal["custom"]
    name: Required[ToolName]
    description: str
    input_schema: Required[Annotated[dict[str, Any], "The JSON schema of the arguments."]]
    strict: Strict
    defer_loading: Annotated[
        bool, "Leave the tool out of the prompt until a result refers to it in a block of the type `tool_reference`."
    ]
    cache_control: Annotated[Any, _UNUSED]
    eager_input_streaming: Annotated[Any, f"{_UNUSED} Arguments are always streamed."]


class _FunctionTool(TypedDict):
    type: Annotated[
        Literal["function"],
        Refused((), "define a tool with a name and its input_schema", '"function" is not supported'),
    ]


class AnthropicOtherTool(TypedDict):
    """A tool that Anthropic defines. The tool is left out, and `x-llmrun-ignored` names the type."""

    type: Annotated[str, Keywords({"not": {"enum": ["custom", "function"]}})]


class _ToolMode(TypedDict):
    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: NotRequired[bool]


class _ChosenTool(TypedDict):
    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: NotRequired[bool]


_Display = Annotated[
    Literal["summarized", "omitted", "updates"],
    "`omitted` leaves out the text of the thinking. The other values have no effect.",
]


class _BudgetedThinking(TypedDict):
    type: Literal["enabled"]
    budget_tokens: NotRequired[Annotated[int, Limits(1)]]
    display: NotRequired[_Display]


class _OtherThinking(TypedDict):
    type: Literal["disabled", "adaptive"]
    display: NotRequired[_Display]


ThinkingConfig = Annotated[
    _BudgetedThinking | _OtherThinking,
    Tagged("type"),
    "Without this field, thinking is turned off for models that can turn thinking off.",
]


class _OutputFormat(TypedDict):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class _OutputConfig(TypedDict, total=False):
    format: _OutputFormat
    effort: Literal["low", "medium", "high", "xhigh", "max"]


class _Edit(TypedDict):
    type: Annotated[
        Literal["clear_thinking_20251015"], Refused((KNOWN_EDIT,), "shorten the conversation in the client")
    ]
    keep: NotRequired[
        Annotated[Any, Usual(("all",)), "This value is ignored. The model's template decides which thinking is kept."]
    ]


class _ContextManagement(TypedDict, total=False):
    edits: list[_Edit]


class _Metadata(TypedDict, total=False):
    user_id: str


class MessageCountRequest(TypedDict, total=False):
    model: Required[Annotated[str, Limits(1), "The name of a model or preset."]]
    container: Annotated[Any, Refused((), "run the model's tools in the client")]
    mcp_servers: Annotated[Any, Refused(([],), "connect the client to the MCP servers, and send their tools")]
    fallbacks: Annotated[Any, Refused(([],))]
    thread: Annotated[Any, Refused((), "send all messages")]
    compaction: Annotated[Any, Refused((), "summarize the conversation in the client")]
    messages: Required[Annotated[list[Turn], Limits(1, noun="message")]]
    system: Annotated[Texts, "The system prompt."]
    tools: Annotated[
        list[
            Annotated[
                AnthropicTool | _FunctionTool | Annotated[AnthropicOtherTool, KEPT], Tagged("type", default="custom")
            ]
        ],
        Limits(0, MOST_TOOLS, "tool"),
        LEFT_OUT,
    ]
    tool_choice: Annotated[_ToolMode | _ChosenTool, Tagged("type")]
    thinking: ThinkingConfig
    output_config: Annotated[
        _OutputConfig, "The format of the answer and the thinking effort. A format cannot be combined with tools."
    ]
    output_format: Annotated[_OutputFormat, "The older name of `output_config.format`."]
    context_management: _ContextManagement
    metadata: Annotated[_Metadata, _UNUSED]
    cache_control: Annotated[dict[str, Any], f"{_UNUSED} Prefixes are always cached."]
    service_tier: Annotated[Literal["auto", "standard_only"], Usual(("auto", "standard_only")), _UNUSED]
    speed: Annotated[Literal["standard"], Usual(("standard",)), _UNUSED]


class MessageRequest(MessageCountRequest, Sampling, total=False):
    max_tokens: Required[Annotated[int, Limits(1), "The maximum number of generated tokens, including thinking."]]
    stream: Annotated[bool, "Send the answer as server-sent events while it is generated."]
    return_progress: ReturnProgress
    stop_sequences: Stops


class MessageUsage(TypedDict):
    input_tokens: Annotated[Count, "The number of prompt tokens that were not cached."]
    cache_creation_input_tokens: Count
    cache_read_input_tokens: Count
    output_tokens: Count
    output_tokens_details: dict[Literal["thinking_tokens"], Count]


ContentBlock = _Text | _Thought | _ToolUse


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class MessageEnding(TypedDict):
    """The reason why a message ended. `stop_reason` is null only in the first event of a stream."""

    stop_reason: StopReason | None
    stop_sequence: str | None


class AnthropicMessage(MessageEnding):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    usage: MessageUsage
    seed: Annotated[Count, "The seed of the answer. Send the same seed again to get the same answer."]
    system_fingerprint: Fingerprint


class _MessageStart(TypedDict):
    type: Literal["message_start"]
    message: AnthropicMessage


class _BlockStart(TypedDict):
    type: Literal["content_block_start"]
    index: Count
    content_block: ContentBlock


class BlockDelta(TypedDict):
    type: Literal["text_delta", "thinking_delta", "signature_delta", "input_json_delta"]
    text: NotRequired[str]
    thinking: NotRequired[str]
    signature: NotRequired[str]
    partial_json: NotRequired[str]


class _BlockDelta(TypedDict):
    type: Literal["content_block_delta"]
    index: Count
    delta: BlockDelta


class _BlockStop(TypedDict):
    type: Literal["content_block_stop"]
    index: Count


class _MessageDelta(TypedDict):
    type: Literal["message_delta"]
    delta: MessageEnding
    usage: MessageUsage


class _MessageStop(TypedDict):
    type: Literal["message_stop"]


class _Ping(TypedDict):
    type: Literal["ping"]
    prompt_progress: NotRequired[PromptProgress]


class _Problem(TypedDict):
    type: str
    message: str
    details: NotRequired[Annotated[dict[Literal["error_code"], str], "Present only for `thread`."]]


class AnthropicError(TypedDict):
    type: Literal["error"]
    error: _Problem


MessageEvent = (
    _MessageStart | _BlockStart | _BlockDelta | _BlockStop | _MessageDelta | _MessageStop | _Ping | AnthropicError
)


class MessageCount(TypedDict):
    input_tokens: Count


class AnthropicModel(TypedDict):
    type: Literal["model"]
    id: str
    display_name: str
    created_at: Annotated[str, Keywords({"format": "date-time"})]
    lifecycle: Literal["active"]
    max_input_tokens: Annotated[int | None, "Null if the model is not loaded."]
    max_tokens: int | None


class AnthropicModels(TypedDict):
    data: list[AnthropicModel]
    has_more: Literal[False]
    first_id: str | None
    last_id: str | None
