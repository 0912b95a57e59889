"""The JSON schemas of requests and answers, for the OpenAPI document.

Tests compare the schemas of requests with the parsers, and those of answers with the bodies.
"""

from __future__ import annotations

import math
from typing import Final

from llmrun.base.types import LARGEST_SCALE
from llmrun.options.sampling_params import SAMPLING, SamplingParameter
from llmrun.serving.protocol.fields import MOST_INTEGER
from llmrun.serving.protocol.infill import MOST_FILES, MOST_RESPONSE_FIELDS
from llmrun.serving.protocol.openai.messages import MOST_TOOLS, ROLES
from llmrun.serving.protocol.openai.options import (
    BUDGETS,
    EFFORTS,
    LONGEST_STOP,
    MOST_CHOICES,
    MOST_LOGPROBS,
    MOST_STOPS,
)
from llmrun.serving.protocol.wire import (
    BOOLEAN,
    COUNT,
    FINGERPRINT,
    NO_EFFECT,
    NUMBER,
    OPTIONAL_TEXT,
    TEXT,
    Schema,
    boolean,
    fixed_object,
    integer,
    ref,
)

_TOKEN_IDS: Final[Schema] = {"type": "array", "items": {"type": "integer", "minimum": 0}}


def chat_request() -> Schema:
    """Return the schema of the body of a chat completion."""
    properties = {
        "messages": {"type": "array", "minItems": 1, "items": ref("Message")},
        **common_fields(),
        "logprobs": boolean("Return the log-probability of every generated token, including thinking and tool calls."),
        "top_logprobs": integer("The number of likeliest tokens to return at each position.", 0, MOST_LOGPROBS),
        **tool_fields(),
        **thinking_fields(),
        "continue_final_message": boolean("Continue the last message, whose role must be assistant, as in vLLM."),
        "add_generation_prompt": boolean("The opposite of `continue_final_message`, as in vLLM."),
    }
    return {"type": "object", "required": ["messages"], "properties": properties}


def completion_request() -> Schema:
    """Return the schema of the body of a completion."""
    properties = {
        "prompt": {
            "description": "One prompt or several. Control strings in a text become control tokens.",
            "anyOf": [
                {"type": "string"},
                {"type": "array", "minItems": 1, "items": {"type": "string"}},
                {**_TOKEN_IDS, "minItems": 1},
                {"type": "array", "minItems": 1, "items": {**_TOKEN_IDS, "minItems": 1}},
            ],
        },
        "suffix": {
            "type": "string",
            "description": "The text after the answer, which then fills the gap after the prompt. Only for texts, not "
            "with `echo`, and only if the model can fill in the middle. Control strings in both texts remain text.",
        },
        **common_fields(),
        "logprobs": integer(
            "Return the log-probability of every token, and this many of the likeliest ones.", 0, MOST_LOGPROBS
        ),
        "echo": boolean("Return the prompt before the answer. Only for texts, and not with `logprobs`."),
        "best_of": integer("Only the value of `n` is supported.", 1, MOST_CHOICES),
    }
    return {"type": "object", "required": ["prompt"], "properties": properties}


def infill_request() -> Schema:
    """Return the schema of the body of /infill."""
    text = {"type": "string"}
    file = {"type": "object", "required": ["text"], "properties": {"filename": text, "text": text}}
    properties = {
        "input_prefix": {**text, "description": "The text before the gap."},
        "input_suffix": {**text, "description": "The text after the gap."},
        "prompt": {
            **text,
            "description": "Text between `input_prefix` and the gap. Control strings in it become control tokens.",
        },
        "input_extra": {
            "type": "array",
            "maxItems": MOST_FILES,
            "items": file,
            "description": "Other files, the most important one last.",
        },
        **common_fields(),
        "n_predict": {
            "type": "integer",
            "minimum": -1,
            "description": "llama.cpp's name for `max_tokens`. With 0, the answer is empty, but the prompt is cached.",
        },
        "n_cmpl": integer("llama.cpp's name for `n`.", 1, MOST_CHOICES),
        "n_probs": integer("Return this many of the likeliest tokens at each position.", 0, MOST_LOGPROBS),
        "return_tokens": boolean("Return the IDs of the tokens, which streams always contain."),
        "response_fields": {
            "type": "array",
            "maxItems": MOST_RESPONSE_FIELDS,
            "items": text,
            "description": "The fields to return, with a slash before those of inner objects, as in timings/prompt_n.",
        },
    }
    return {"type": "object", "required": ["input_prefix", "input_suffix"], "properties": properties}


def message() -> Schema:
    """Return the schema of a message."""
    part = {
        "type": "object",
        "required": ["type"],
        "properties": {"type": {"enum": ["text", "input_text", "output_text", "refusal"]}, "text": {"type": "string"}},
    }
    return {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"enum": [*ROLES], "description": "developer means the same as system."},
            "content": {
                "anyOf": [{"type": "string"}, {"type": "array", "items": part}, {"type": "null"}],
                "description": "Text. The texts of several parts are joined by newlines.",
            },
            "name": {"type": "string"},
            "refusal": {"type": ["string", "null"]},
            "reasoning_content": {"type": ["string", "null"], "description": "The thinking before a past answer."},
            "reasoning": {"type": ["string", "null"], "description": "Another name for `reasoning_content`."},
            "tool_calls": {"type": ["array", "null"], "items": ref("ToolCall")},
            "tool_call_id": {"type": "string", "description": "The call that a message with the role tool answers."},
        },
    }


def tokenize_request() -> Schema:
    """Return the schema of the body of /tokenize."""
    return {
        "type": "object",
        "properties": {
            "content": {"type": "string", "description": "The text, as in llama-server."},
            "prompt": {"type": "string", "description": "The text, as in vLLM."},
            "add_special": boolean("Add special tokens such as a BOS. On by default only with `prompt`."),
            "add_special_tokens": boolean("Another name for `add_special`."),
            "parse_special": boolean("Turn control strings into control tokens. On by default."),
            "with_pieces": boolean("Also return the text of each token."),
        },
    }


def detokenize_request() -> Schema:
    """Return the schema of the body of /detokenize."""
    return {"type": "object", "required": ["tokens"], "properties": {"tokens": _TOKEN_IDS}}


def _adapter_choice() -> Schema:
    scale = {"type": "number", "minimum": -LARGEST_SCALE, "maximum": LARGEST_SCALE}
    names = {"id": integer("The number of an adapter in /lora-adapters.", 0, MOST_INTEGER), "name": {"type": "string"}}
    return {"type": "object", "required": ["scale"], "properties": {**names, "scale": scale}}


def common_fields() -> dict[str, Schema]:
    """Return the schemas of the fields that chat completions and completions share."""
    return {
        "model": {
            "type": "string",
            "description": "The name of the served model. It may be missing or empty; other names are an error.",
        },
        "stream": boolean("Send the answer as server-sent events while it is generated."),
        "stream_options": {
            "type": "object",
            "properties": {"include_usage": boolean("Send a last chunk with the token counts.")},
        },
        "n": integer("The number of choices for each prompt.", 1, MOST_CHOICES),
        "lora": {
            "type": "array",
            "items": _adapter_choice(),
            "description": "The LoRA adapters to use. By default, those of `--lora` with their scales.",
        },
        "max_completion_tokens": _limit("Takes precedence over `max_tokens`."),
        "max_tokens": _limit(""),
        "n_predict": _limit("llama.cpp's name for `max_tokens`."),
        "stop": stop_strings(),
        **sampling_fields(),
        **_formats(),
        "user": {"type": "string", "description": NO_EFFECT},
        "safety_identifier": {"type": "string", "description": NO_EFFECT},
        "prompt_cache_key": {"type": "string", "description": NO_EFFECT},
        "metadata": {"type": "object", "description": NO_EFFECT},
        "store": {"enum": [False], "description": NO_EFFECT},
        "service_tier": {"enum": ["auto", "default"], "description": NO_EFFECT},
    }


def stop_strings() -> Schema:
    """Return the schema of the strings that end an answer."""
    stop = {"type": "string", "minLength": 1, "maxLength": LONGEST_STOP}
    return {
        "description": "Texts that end the answer and are not part of it.",
        "anyOf": [stop, {"type": "array", "maxItems": MOST_STOPS, "items": stop}],
    }


def sampling_fields() -> dict[str, Schema]:
    """Return the schemas of the fields that decide how tokens are chosen."""
    found = {field: _parameter(parameter) for parameter in SAMPLING.values() for field in parameter.wire}
    found["top_k"] |= {"minimum": -1, "description": "Keep only the K most likely tokens; 0 or -1 disables."}
    return {
        **found,
        "seed": {
            "type": "integer",
            "minimum": -1,
            "maximum": 2**64 - 1,
            "description": "The same seed gives the same answer, as long as `system_fingerprint` is the same. Every "
            "answer contains its seed. -1 or nothing means a random seed. Choice 0 has this seed, and choice i the "
            "i-th output of the generator SplitMix64 that starts with this seed.",
        },
        "logit_bias": {
            "type": "object",
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "description": "Numbers to add to the logits of tokens, by token ID. -100 bans a token.",
        },
        "ignore_eos": boolean("Ban the tokens that end an answer."),
    }


def _parameter(parameter: SamplingParameter) -> Schema:
    text = parameter.help
    if parameter.texts is not None:
        return {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "string"}], "description": text}
    kind = {int: "integer", float: "number"}[parameter.kind]
    most = MOST_INTEGER if math.isinf(parameter.maximum) else parameter.maximum
    return {"type": kind, "minimum": parameter.minimum, "maximum": most, "description": text}


def _formats() -> dict[str, Schema]:
    schema: Schema = {"type": ["object", "boolean", "string"]}
    choice = {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}}
    vllm = {"json": schema, "regex": {"type": "string"}, "choice": choice, "grammar": {"type": "string"}}
    return {
        "response_format": {
            "type": "object",
            "required": ["type"],
            "properties": {
                "type": {"enum": ["text", "json_object", "json_schema"]},
                "schema": {**schema, "description": "A schema for json_object, as in llama-server."},
                "json_schema": {
                    "type": "object",
                    "required": ["schema"],
                    "properties": {
                        "name": {"type": "string"},
                        "description": {"type": "string"},
                        "schema": schema,
                        "strict": boolean("Every schema is enforced, also without `strict`."),
                    },
                },
            },
            "description": "The format that the answer must have. It cannot be combined with tools.",
        },
        "json_schema": {**schema, "description": "A JSON schema for the answer, as in llama-server."},
        "grammar": {"type": "string", "description": "A grammar for the answer, in GBNF or llguidance's Lark dialect."},
        "structured_outputs": {
            "type": "object",
            "properties": {**vllm, "json_object": {"type": "boolean"}},
            "description": "One format for the answer, as in vLLM.",
        },
        **{f"guided_{name}": {**each, "description": "As in older versions of vLLM."} for name, each in vllm.items()},
    }


def tool_fields() -> dict[str, Schema]:
    """Return the schemas of the fields about tools."""
    named = {"type": "object", "properties": {"name": {"type": "string"}}}
    return {
        "tools": {"type": "array", "maxItems": MOST_TOOLS, "items": ref("Tool")},
        "tool_choice": {
            "anyOf": [
                {"enum": ["none", "auto", "required"]},
                {"type": "object", "properties": {"type": {"const": "function"}, "function": named}},
                {
                    "type": "object",
                    "properties": {
                        "type": {"const": "allowed_tools"},
                        "allowed_tools": {
                            "type": "object",
                            "properties": {"mode": {"enum": ["auto", "required"]}, "tools": {"type": "array"}},
                        },
                    },
                },
            ]
        },
        "parallel_tool_calls": boolean("Whether one answer may have several tool calls. On by default."),
    }


def thinking_fields() -> dict[str, Schema]:
    """Return the schemas of the fields about thinking."""
    budget = "The maximum number of thinking tokens; -1 means no limit."
    return {
        "reasoning_effort": {
            "enum": [*EFFORTS],
            "description": "none turns thinking off, and the others turn it on if the model can think.",
        },
        "enable_thinking": boolean("Turn thinking on or off."),
        **{name: {"type": "integer", "minimum": -1, "description": budget} for name in BUDGETS},
        "chat_template_kwargs": {"type": "object", "description": "Variables for the model's chat template."},
    }


def _limit(description: str) -> Schema:
    text = "The maximum number of generated tokens, including thinking. Without it, or with -1, there is no limit."
    return {"type": "integer", "minimum": -1, "not": {"const": 0}, "description": f"{text} {description}".rstrip()}


def answer_schemas() -> dict[str, Schema]:
    """Return the schemas of everything that the server answers, by name."""
    return {
        "ToolCall": _tool_call(),
        "Usage": _usage(),
        "Timings": _timings(),
        "ChatCompletion": _answer("chat.completion", _chat_choice()),
        "ChatCompletionChunk": _chunk("chat.completion.chunk", _chat_chunk_choice()),
        "Completion": _answer("text_completion", _completion_choice(["string"])),
        "CompletionChunk": _chunk("text_completion", _completion_choice(["string", "null"])),
        "Infill": {"anyOf": [_infill(), {"type": "array", "items": _infill(), "description": "Several choices."}]},
        "InfillChunk": {"anyOf": [_infill_chunk(), _infill()]},
        "Model": _model(),
        "Models": fixed_object(object={"const": "list"}, data={"type": "array", "items": ref("Model")}),
        "Tokens": _tokens(),
        "Text": fixed_object(content=TEXT, prompt=TEXT),
        "Adapters": {"type": "array", "items": _adapter()},
        "Error": fixed_object(error=fixed_object(message=TEXT, type=TEXT, param=OPTIONAL_TEXT, code=OPTIONAL_TEXT)),
    }


def _adapter() -> Schema:
    always = fixed_object(id=COUNT, name=TEXT, scale={"type": "number"})
    tokens = {"type": "array", "items": COUNT, "description": "The tokens that activate the adapter, if it has any."}
    return {**always, "properties": {**always["properties"], "alora_invocation_tokens": tokens}}


def _model() -> Schema:
    always = fixed_object(id=TEXT, object={"const": "model"}, created=COUNT, owned_by=TEXT)
    others = {
        "parent": {**TEXT, "description": "The name of the model, if this is the name of a LoRA adapter."},
        "max_model_len": COUNT,
        "system_fingerprint": {**TEXT, "description": FINGERPRINT},
        "default_sampling": {"type": "object", "description": "The sampling of requests that do not set their own."},
        "batch_invariant": {"type": "boolean", "description": "Whether an answer is the same in any company."},
    }
    return {**always, "properties": {**always["properties"], **others}}


def _answer(kind: str, choice: Schema) -> Schema:
    choices = {"type": "array", "items": choice}
    counts = {"usage": ref("Usage"), "timings": ref("Timings")}
    return fixed_object(object={"const": kind}, **_head(), choices=choices, **counts)


def _chunk(kind: str, choice: Schema) -> Schema:
    schema = fixed_object(object={"const": kind}, **_head(), choices={"type": "array", "items": choice})
    usage = {
        "anyOf": [ref("Usage"), {"type": "null"}],
        "description": "Present only with stream_options.include_usage. Set only in the last chunk.",
    }
    timings = {**ref("Timings"), "description": "Those of one choice, in the chunk with its finish reason."}
    return {**schema, "properties": {**schema["properties"], "usage": usage, "timings": timings}}


def _head() -> dict[str, Schema]:
    return {
        "id": TEXT,
        "created": COUNT,
        "model": TEXT,
        "system_fingerprint": {**TEXT, "description": FINGERPRINT},
        "seed": {**COUNT, "description": "The seed of choice 0. Send it again to get the same answer."},
    }


def _chat_choice() -> Schema:
    message = fixed_object(role={"const": "assistant"}, content=OPTIONAL_TEXT, refusal={"type": "null"})
    message["properties"] |= {
        "reasoning_content": {**TEXT, "description": "The thinking before the answer, if there is any."},
        "tool_calls": {"type": "array", "items": ref("ToolCall")},
    }
    return fixed_object(index=COUNT, message=message, logprobs=_chat_logprobs(), finish_reason=_reason(["string"]))


def _chat_chunk_choice() -> Schema:
    piece = {
        "type": "object",
        "required": ["index", "function"],
        "properties": {
            "index": COUNT,
            "id": TEXT,
            "type": {"const": "function"},
            "function": {"type": "object", "properties": {"name": TEXT, "arguments": TEXT}},
        },
    }
    delta = {
        "type": "object",
        "properties": {
            "role": {"const": "assistant"},
            "content": TEXT,
            "reasoning_content": TEXT,
            "tool_calls": {"type": "array", "items": piece},
        },
    }
    return fixed_object(index=COUNT, delta=delta, logprobs=_chat_logprobs(), finish_reason=_reason(["string", "null"]))


def _completion_choice(kinds: list[str]) -> Schema:
    logprobs = fixed_object(
        tokens={"type": "array", "items": TEXT},
        token_logprobs={"type": "array", "items": NUMBER},
        top_logprobs={"type": ["array", "null"], "items": {"type": "object", "additionalProperties": NUMBER}},
        text_offset={"type": "array", "items": COUNT},
    )
    optional = {"anyOf": [logprobs, {"type": "null"}]}
    return fixed_object(index=COUNT, text=TEXT, logprobs=optional, finish_reason=_reason(kinds))


def _infill() -> Schema:
    schema = fixed_object(
        **_infill_head(stop=True),
        model=TEXT,
        system_fingerprint={**TEXT, "description": FINGERPRINT},
        generation_settings={"type": "object", "description": "The settings that decided the answer, with its seed."},
        has_new_line=BOOLEAN,
        truncated={**BOOLEAN, "description": "Whether a part of the texts was left out because they are too long."},
        stop_type={"enum": ["eos", "word", "limit"]},
        stopping_word=TEXT,
        tokens_cached=COUNT,
        timings=ref("Timings"),
    )
    schema["properties"] |= {"completion_probabilities": _probabilities()}
    return schema


def _infill_chunk() -> Schema:
    schema = fixed_object(**_infill_head(stop=False))
    schema["properties"] |= {"completion_probabilities": _probabilities()}
    return schema


def _infill_head(*, stop: bool) -> dict[str, Schema]:
    return {
        "index": COUNT,
        "content": TEXT,
        "tokens": {"type": "array", "items": COUNT},
        "stop": {"const": stop},
        "tokens_predicted": COUNT,
        "tokens_evaluated": COUNT,
    }


def _probabilities() -> Schema:
    return {"type": "array", "items": token_logprobs(id=COUNT)}


def _chat_logprobs() -> Schema:
    logprobs = fixed_object(content={"type": "array", "items": token_logprobs()}, refusal={"type": "null"})
    return {"anyOf": [logprobs, {"type": "null"}]}


def token_logprobs(**more: Schema) -> Schema:
    """Return the schema of the log-probabilities at one position. Each token also has the fields in `more`."""
    one = {**more, "token": TEXT, "logprob": NUMBER, "bytes": {"type": "array", "items": COUNT}}
    return fixed_object(**one, top_logprobs={"type": "array", "items": fixed_object(**one)})


def _reason(kinds: list[str]) -> Schema:
    return {"type": kinds, "enum": ["stop", "length", "tool_calls", *([None] if "null" in kinds else [])]}


def _tool_call() -> Schema:
    return {
        "type": "object",
        "required": ["function"],
        "properties": {
            "id": TEXT,
            "type": {"const": "function"},
            "function": {
                "type": "object",
                "required": ["name"],
                "properties": {"name": TEXT, "arguments": {**TEXT, "description": "A JSON object."}},
            },
        },
    }


def _usage() -> Schema:
    return fixed_object(
        prompt_tokens=COUNT,
        completion_tokens=COUNT,
        total_tokens=COUNT,
        prompt_tokens_details=fixed_object(cached_tokens=COUNT),
        completion_tokens_details=fixed_object(reasoning_tokens=COUNT),
    )


def _timings() -> Schema:
    schema = fixed_object(
        cache_n=COUNT,
        prompt_n=COUNT,
        prompt_ms=NUMBER,
        prompt_per_token_ms=NUMBER,
        prompt_per_second=NUMBER,
        predicted_n=COUNT,
        predicted_ms=NUMBER,
        predicted_per_token_ms=NUMBER,
        predicted_per_second=NUMBER,
    )
    schema["properties"] |= {"draft_n": COUNT, "draft_n_accepted": COUNT}
    return schema


def _tokens() -> Schema:
    piece = fixed_object(id=COUNT, piece={"anyOf": [TEXT, {"type": "array", "items": COUNT}]})
    tokens = {"type": "array", "items": {"anyOf": [COUNT, piece]}}
    return fixed_object(tokens=tokens, count=COUNT, max_model_len=COUNT)
