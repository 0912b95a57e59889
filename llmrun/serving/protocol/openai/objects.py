"""The wire objects of OpenAI's API, with the fields of llama-server and vLLM."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Required, TypedDict

from llmrun.base.types import LARGEST_SCALE
from llmrun.engine.requests import LONGEST_TOOL_NAME
from llmrun.options.sampling_params import SAMPLING, SamplingParameter
from llmrun.serving.protocol.declarations import (
    MOST_INTEGER,
    Expected,
    Inline,
    Limits,
    Matching,
    Refused,
    Tagged,
    Usual,
    Without,
)

MOST_CHOICES: Final = 128
MOST_STOPS: Final = 32
LONGEST_STOP: Final = 256  # characters; a long stop string costs time at every token
MOST_LOGPROBS: Final = 20
MOST_TOOLS: Final = 128  # OpenAI's API has the same limit
LARGEST_SEED: Final = 2**64 - 1
MOST_BIAS: Final = 100.0
NO_LIMIT: Final = -1

Count = Annotated[int, Limits(0)]
Tokens = Annotated[list[Count], Expected("a list of token IDs")]
JsonSchema = Annotated[dict[str, Any] | bool | str, Expected("a JSON schema")]
Unused = Annotated[str, "Accepted for compatibility, without effect on the answer."]
Fingerprint = Annotated[str, "Identifies everything that can change the bytes of an answer."]
Stop = Annotated[str, Limits(1, LONGEST_STOP)]
Stops = Annotated[
    Stop | Annotated[list[Stop], Limits(0, MOST_STOPS, "string")],
    Expected("a string or a list of strings"),
    "Texts that end the answer. The answer does not contain them.",
]
Choices = Annotated[list[Annotated[str, Limits(1)]], Limits(1, noun="choice")]
TokenLimit = Annotated[int, Limits(NO_LIMIT), Without(0), Expected("an integer of at least 1, or -1 for no limit")]
Budget = Annotated[int, Limits(NO_LIMIT), "The maximum number of thinking tokens; -1 means no limit."]
TopLogprobs = Annotated[int, Limits(0, MOST_LOGPROBS), "The number of likeliest tokens to return at each position."]
Effort = Annotated[
    Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"],
    "none turns thinking off. All other values turn thinking on if the model can think.",
]
ToolName = Annotated[
    str,
    Matching(
        rf"[a-zA-Z0-9_-]{{1,{LONGEST_TOOL_NAME}}}",
        f"1 to {LONGEST_TOOL_NAME} letters, digits, underscores and hyphens",
    ),
]
Strict = Annotated[bool, "Refuse the tool if its schema cannot be enforced."]


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
    """The sampling parameters of a request."""

    parameters: Annotated[dict[str, Any], Inline(sampling_fields)]
    seed: Annotated[
        int,
        Limits(-1, LARGEST_SEED),
        "The same seed gives the same answer, as long as `system_fingerprint` is the same. Every answer contains its "
        "seed. -1 or a missing value means a random seed. Choice 0 uses this seed, and choice i uses the i-th output "
        "of a SplitMix64 generator that starts with this seed.",
    ]
    logit_bias: Annotated[
        dict[str, Annotated[float, Limits(-MOST_BIAS, MOST_BIAS)]],
        "Numbers to add to the logits of tokens, by token ID. -100 bans a token.",
    ]
    ignore_eos: Annotated[bool, "Ban the tokens that end an answer."]


class _Adapter(TypedDict, total=False):
    id: Annotated[int, Limits(0), "The number of an adapter in /lora-adapters."]
    name: str
    scale: Required[Annotated[float, Limits(-LARGEST_SCALE, LARGEST_SCALE)]]


class StructuredOutputs(TypedDict, total=False):
    """One format for the answer, as in vLLM."""

    json: JsonSchema
    regex: str
    choice: Choices
    grammar: str
    json_object: bool


class Shared(Sampling, total=False):
    """The fields that all of OpenAI's routes for generating text share."""

    model: Annotated[str, "The name of a model or preset. A missing or empty name selects the default model."]
    stream: Annotated[bool, "Send the answer as server-sent events while it is generated."]
    lora: Annotated[
        list[_Adapter], "The LoRA adapters to use. By default, the adapters and scales of `--lora` are used."
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
        "Accepted for compatibility, without effect on the answer.",
    ]


class StreamOptions(TypedDict, total=False):
    """The options of a stream."""

    include_usage: Annotated[bool, "Send a last chunk with the token counts."]
    # OpenAI pads chunks to hide their lengths from eavesdroppers.
    include_obfuscation: Annotated[Literal[False], Usual((False,)), "Chunks are never padded."]


class _DescribedSchema(TypedDict, total=False):
    name: str
    description: str
    schema: Required[JsonSchema]
    strict: Annotated[bool, "Every schema is enforced, even without `strict`."]


class ResponseFormat(TypedDict, total=False):
    """The format that the answer must have. A format cannot be combined with tools."""

    type: Required[Literal["text", "json_object", "json_schema"]]
    schema: Annotated[JsonSchema, "A schema for json_object, as in llama-server."]
    json_schema: _DescribedSchema


class Common(Shared, total=False):
    """The fields that chat completions and completions share."""

    stream_options: StreamOptions
    n: Annotated[int, Limits(1, MOST_CHOICES), "The number of choices for each prompt."]
    max_completion_tokens: Annotated[
        TokenLimit,
        "The maximum number of generated tokens, including thinking. -1 means no limit, which is the default. This "
        "field takes precedence over `max_tokens`.",
    ]
    max_tokens: Annotated[
        TokenLimit,
        "The maximum number of generated tokens, including thinking. -1 means no limit, which is the default.",
    ]
    n_predict: Annotated[
        TokenLimit,
        "llama.cpp's name for `max_tokens`: the maximum number of generated tokens, including thinking. -1 means no "
        "limit, which is the default.",
    ]
    response_format: ResponseFormat
    metadata: Annotated[dict[str, Any], "Accepted for compatibility, without effect on the answer."]
    store: Annotated[Literal[False], Usual((False,)), "Accepted for compatibility, without effect on the answer."]


class Thinking(TypedDict, total=False):
    """The fields that control thinking."""

    enable_thinking: Annotated[bool, "Turn thinking on or off."]
    thinking_budget_tokens: Budget
    thinking_budget: Budget
    think_budget: Budget
    chat_template_kwargs: Annotated[dict[str, Any], "Variables for the model's chat template."]


class _TextPart(TypedDict, total=False):
    type: Required[Literal["text", "input_text", "output_text"]]
    text: Required[str]
    annotations: Annotated[list[Any], Usual(([],)), "Every answer of the Responses API contains this field."]
    logprobs: Annotated[list[Any], Usual(([],))]


class _RefusalPart(TypedDict, total=False):
    type: Required[Literal["refusal"]]
    refusal: Required[str]


PARTS: Final = Tagged("type", unknown="parts of the type {} are not supported", advice="send text only")
TextParts = Annotated[str | list[_TextPart], Expected("a string or a list of parts")]
