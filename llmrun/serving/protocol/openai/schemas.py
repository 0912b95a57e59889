"""The JSON schemas of OpenAI's API and of llama-server's routes, in the notation of schema_notation.py.

Tests compare the request schemas with the parsers, and the answer schemas with the bodies.
"""

from __future__ import annotations

import math
from typing import Final

from llmrun.options.sampling_params import SAMPLING, SamplingParameter
from llmrun.serving.protocol.fields import MOST_INTEGER
from llmrun.serving.protocol.schema_notation import Schema


def sampling_parameters() -> dict[str, Schema]:
    """Return the schemas of the sampling parameters."""
    found = {field: _parameter(parameter) for parameter in SAMPLING.values() for field in parameter.wire}
    found["top_k"] |= {"minimum": -1, "description": "Keep only the K most likely tokens; 0 or -1 disables."}
    return found


def _parameter(parameter: SamplingParameter) -> Schema:
    text = parameter.help
    if parameter.texts is not None:
        return {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "string"}], "description": text}
    kind = {int: "integer", float: "number"}[parameter.kind]
    most = MOST_INTEGER if math.isinf(parameter.maximum) else parameter.maximum
    return {"type": kind, "minimum": parameter.minimum, "maximum": most, "description": text}


OPENAI_SCHEMAS: Final = """
count = integer(0..)
optional = string | null
fingerprint = string // Identifies everything that can change the bytes of an answer.
unused = string // Accepted for compatibility, without effect on the answer.
schema = object | boolean | string
strict = boolean // Refuse the tool if its schema cannot be enforced.
effort = EFFORTS // none turns thinking off. All other values turn thinking on if the model can think.

choice = string(1..)[](1..)
stop = string(1..LONGEST_STOP)
stops = stop | stop[](..MOST_STOPS) // Texts that end the answer. The answer does not contain them.
top_logprobs = integer(0..MOST_LOGPROBS) // The number of likeliest tokens to return at each position.
sampling = {
  ...parameters
  seed?: integer(-1..LARGEST_SEED)
    // The same seed gives the same answer, as long as `system_fingerprint` is the same. Every answer contains its seed.
    // -1 or a missing value means a random seed. Choice 0 uses this seed, and choice i uses the i-th output of a
    // SplitMix64 generator that starts with this seed.
  logit_bias?: {[string]: number(-100..100)} // Numbers to add to the logits of tokens, by token ID. -100 bans a token.
  ignore_eos?: boolean // Ban the tokens that end an answer.
}
shared = {
  model?: string // The name of a model or preset. A missing or empty name selects the default model.
  stream?: boolean // Send the answer as server-sent events while it is generated.
  lora?: {
    id?: integer(0..MOST_INTEGER) // The number of an adapter in /lora-adapters.
    name?: string
    scale: number(-LARGEST_SCALE..LARGEST_SCALE)
  }[] // The LoRA adapters to use. By default, the adapters and scales of `--lora` are used.
  stop?: stops
  ...sampling
  json_schema?: schema // A JSON schema for the answer, as in llama-server.
  grammar?: string // A grammar for the answer, in GBNF or llguidance's Lark dialect.
  structured_outputs?: {json?: schema; regex?: string; choice?: choice; grammar?: string; json_object?: boolean}
    // One format for the answer, as in vLLM.
  guided_json?: schema // A JSON schema for the answer, as in older versions of vLLM.
  guided_regex?: string // A regular expression for the answer, as in older versions of vLLM.
  guided_choice?: choice // The possible answers, as in older versions of vLLM.
  guided_grammar?: string // A grammar for the answer, as in older versions of vLLM.
  user?: unused; safety_identifier?: unused; prompt_cache_key?: unused
  service_tier?: "auto" | "default" // Accepted for compatibility, without effect on the answer.
}
common = {
  ...shared
  stream_options?: {
    include_usage?: boolean // Send a last chunk with the token counts.
  }
  n?: integer(1..MOST_CHOICES) // The number of choices for each prompt.
  max_completion_tokens?: limit
    // The maximum number of generated tokens, including thinking. -1 means no limit, which is the default. This field
    // takes precedence over `max_tokens`.
  max_tokens?: limit
    // The maximum number of generated tokens, including thinking. -1 means no limit, which is the default.
  n_predict?: limit
    // llama.cpp's name for `max_tokens`: the maximum number of generated tokens, including thinking. -1 means no limit,
    // which is the default.
  response_format?: {
    type: "text" | "json_object" | "json_schema"
    schema?: schema // A schema for json_object, as in llama-server.
    json_schema?: {
      name?: string
      description?: string
      schema: schema
      strict?: boolean // Every schema is enforced, even without `strict`.
    }
  } // The format that the answer must have. A format cannot be combined with tools.
  metadata?: object // Accepted for compatibility, without effect on the answer.
  store?: false // Accepted for compatibility, without effect on the answer.
}
tools = {
  tools?: Tool[](..MOST_TOOLS)
  tool_choice?: "none" | "auto" | "required" | {type?: "function"; function?: {name?: string}}
    | {type?: "allowed_tools"; allowed_tools?: {mode?: "auto" | "required"; tools?: array}}
  parallel_tool_calls?: boolean // Allow several tool calls in one answer. The default is true.
}
budget = integer(-1..) // The maximum number of thinking tokens; -1 means no limit.
thinking = {
  enable_thinking?: boolean // Turn thinking on or off.
  thinking_budget_tokens?: budget; thinking_budget?: budget; think_budget?: budget
  chat_template_kwargs?: object // Variables for the model's chat template.
}

ChatRequest = {
  messages: Message[](1..)
  ...common
  logprobs?: boolean // Return the log-probability of every generated token, including thinking and tool calls.
  top_logprobs?: top_logprobs
  ...tools
  reasoning_effort?: effort
  ...thinking
  continue_final_message?: boolean // Continue the last message, whose role must be assistant, as in vLLM.
  add_generation_prompt?: boolean // The opposite of `continue_final_message`, as in vLLM.
}
CompletionRequest = {
  prompt: string | string[](1..) | count[](1..) | count[](1..)[](1..)
    // One or more prompts. Control strings in a text become control tokens.
  suffix?: string
    // The text after the answer, which then fills the gap after the prompt. A suffix requires text prompts and a model
    // that can fill in the middle, and cannot be combined with `echo`. Control strings in both texts remain text.
  ...common
  logprobs?: integer(0..MOST_LOGPROBS)
    // Return the log-probability of every token and of this many likeliest tokens at each position.
  echo?: boolean // Return the prompt before the answer. Requires text prompts, and cannot be combined with `logprobs`.
  best_of?: integer(1..MOST_CHOICES) // The only supported value is the value of `n`.
}
InfillRequest = {
  input_prefix: string // The text before the gap.
  input_suffix: string // The text after the gap.
  prompt?: string // The text between `input_prefix` and the gap. Control strings in this text become control tokens.
  input_extra?: {filename?: string; text: string}[](..MOST_FILES) // Other files, the most important one last.
  ...common
  n_predict?: integer(-1..)
    // llama.cpp's name for `max_tokens`. With 0, the prompt is cached, and the answer is empty.
  n_cmpl?: integer(1..MOST_CHOICES) // llama.cpp's name for `n`.
  n_probs?: integer(0..MOST_LOGPROBS) // The number of likeliest tokens to return at each position.
  return_tokens?: boolean // Return the IDs of the tokens. Streams always contain these IDs.
  response_fields?: string[](..MOST_RESPONSE_FIELDS)
    // The paths of the fields to return. The names in a path are separated by slashes, as in timings/prompt_n.
}
TokenizeRequest = {
  content?: string // The text, as in llama-server.
  prompt?: string // The text, as in vLLM.
  add_special?: boolean // Add special tokens such as a BOS. The default is true with `prompt`, otherwise false.
  add_special_tokens?: boolean // Another name for `add_special`.
  parse_special?: boolean // Convert control strings to control tokens. The default is true.
  with_pieces?: boolean // Also return the text of each token.
}
DetokenizeRequest = {tokens: count[]}

Message = {
  role: ROLES // developer means the same as system.
  content?: string | {type: "text" | "input_text" | "output_text" | "refusal"; text?: string}[] | null
    // The text of the message. The texts of several parts are joined by newlines.
  name?: string
  refusal?: optional
  reasoning_content?: optional // The thinking before a past answer.
  reasoning?: optional // Another name for `reasoning_content`.
  tool_calls?: ToolCall[] | null
  tool_call_id?: string // The ID of the call that a message with the role tool answers.
}
Tool = {
  type?: "function"
  function: {
    name: string(NAME)
    description?: string
    parameters?: object // The JSON schema of the arguments.
    strict?: strict
  }
}

ToolCall = {
  id?: string
  type?: "function"
  function: {
    name: string
    arguments?: string // A JSON object.
  }
}
Usage = {
  prompt_tokens: count; completion_tokens: count; total_tokens: count
  prompt_tokens_details: {cached_tokens: count}
  completion_tokens_details: {reasoning_tokens: count}
}
Timings = {
  cache_n: count
  prompt_n: count; prompt_ms: number; prompt_per_token_ms: number; prompt_per_second: number
  predicted_n: count; predicted_ms: number; predicted_per_token_ms: number; predicted_per_second: number
  draft_n?: count; draft_n_accepted?: count
}
head = {
  id: string; created: count; model: string; system_fingerprint: fingerprint
  seed: count // The seed of choice 0. Send it again to get the same answer.
}
counts = {usage: Usage; timings: Timings}
progress = {
  usage?: Usage | null // Present only with stream_options.include_usage, and null in all chunks except the last.
  timings?: Timings // The timings of one choice, in the chunk with the choice's finish reason.
}
reason = "stop" | "length" | "tool_calls"
open_reason = "stop" | "length" | "tool_calls" | null
token = {token: string; logprob: number; bytes: count[]}
token_logprobs = {...token; top_logprobs: token[]}
chat_logprobs = {content: token_logprobs[]; refusal: null} | null
ChatCompletion = {
  object: "chat.completion"; ...head
  choices: {
    index: count
    message: {
      role: "assistant"; content: optional; refusal: null
      reasoning_content?: string // The thinking before the answer, if there is any.
      tool_calls?: ToolCall[]
    }
    logprobs: chat_logprobs; finish_reason: reason
  }[]
  ...counts
}
ChatCompletionChunk = {
  object: "chat.completion.chunk"; ...head
  choices: {
    index: count
    delta: {
      role?: "assistant"; content?: string; reasoning_content?: string
      tool_calls?: {
        index: count; id?: string; type?: "function"
        function: {name?: string; arguments?: string}
      }[]
    }
    logprobs: chat_logprobs; finish_reason: open_reason
  }[]
  ...progress
}
text_choice = {
  index: count; text: string
  logprobs: {
    tokens: string[]; token_logprobs: number[]; top_logprobs: {[string]: number}[] | null; text_offset: count[]
  } | null
}
Completion = {object: "text_completion"; ...head; choices: {...text_choice; finish_reason: reason}[]; ...counts}
CompletionChunk = {
  object: "text_completion"; ...head; choices: {...text_choice; finish_reason: open_reason}[]; ...progress
}

token_with_id = {id: count; ...token}
infill_head = {
  index: count; content: string; tokens: count[]; tokens_predicted: count; tokens_evaluated: count
  completion_probabilities?: {...token_with_id; top_logprobs: token_with_id[]}[]
}
infill = {
  ...infill_head
  stop: true; model: string; system_fingerprint: fingerprint
  generation_settings: object // The settings that produced the answer, including the seed.
  has_new_line: boolean
  truncated: boolean // True if parts of the texts were left out because the texts were too long.
  stop_type: "eos" | "word" | "limit"
  stopping_word: string; tokens_cached: count; timings: Timings
}
infills = infill[] // Several choices.
Infill = infill | infills
InfillChunk = {...infill_head; stop: false} | infill
Tokens = {tokens: (count | {id: count; piece: string | count[]})[]; count: count; max_model_len: count}
Text = {content: string; prompt: string}

Model = {
  id: string; object: "model"; created: count; owned_by: string
  parent?: string // The name of the base model, if `id` is the name of a LoRA adapter.
  max_model_len?: count
  system_fingerprint?: fingerprint
  default_sampling?: object // The sampling parameters of requests that set none.
  batch_invariant?: boolean // True if answers do not depend on the other requests in the batch.
}
Models = {object: "list"; data: Model[]}
Adapters = {
  id: count; name: string; scale: number
  alora_invocation_tokens?: count[] // The tokens that activate the adapter, for adapters with such tokens.
}[]
Error = {error: {message: string; type: string; param: optional; code: optional}}
"""
