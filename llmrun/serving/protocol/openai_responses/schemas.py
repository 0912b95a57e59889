"""The JSON schemas of the Responses API, in the notation of schema_notation.py.

Tests compare the schemas with the parser and the bodies.
"""

from __future__ import annotations

from typing import Final

RESPONSES_SCHEMAS: Final = """
parts = string | {type: "input_text" | "output_text" | "refusal" | "reasoning_text"; text?: string}[]
optional_count = integer | null
tool_choice = "none" | "auto" | "required" | {type?: "function"; name?: string}
  | {type?: "allowed_tools"; mode?: "auto" | "required"; tools?: array}
format = {
  type: "text" | "json_object" | "json_schema"
  name?: string
  description?: optional
  schema?: schema
  strict?: boolean // Every schema is enforced, even without `strict`.
}

ResponseRequest = {
  input: string | ResponseInputItem[](1..)
    // A text, or all items of a conversation. The server stores no items.
  instructions?: string // The text of a system message before the conversation.
  ...shared
  ...thinking
  stream_options?: object
  metadata?: {[string]: string} // Repeated in the answer.
  max_output_tokens?: integer(1..)
    // The maximum number of generated tokens, including thinking. By default, there is no limit.
  max_tool_calls?: integer(1..) // A limit for tools that run on the server. This server has no such tools.
  text?: {format?: format; verbosity?: "medium"}
    // The format that the answer must have. A format cannot be combined with tools.
  reasoning?: {effort?: effort}
  tools?: ResponseTool[](..MOST_TOOLS)
  tool_choice?: tool_choice
  parallel_tool_calls?: boolean // Allow several tool calls in one answer. The default is true.
  include?: string[]
    // message.output_text.logprobs adds the log-probabilities of the text's tokens. Other names are ignored.
  top_logprobs?: top_logprobs
}
ResponseInputItem = {
  type?: ITEM_TYPES // The default is message.
  role?: ROLES // developer means the same as system.
  content?: parts // The content of a message, or past thinking.
  call_id?: string // The ID of a tool call.
  name?: string // The name of the called function.
  arguments?: string // A JSON object.
  output?: parts // The result of a tool call.
} // The items of past answers can be sent as they were received.
ResponseTool = {
  type?: "function"
  name: string(NAME)
  description?: optional
  parameters?: object | null // The JSON schema of the arguments.
  strict?: boolean | null // Refuse the tool if its schema cannot be enforced.
}

settings = {
  background: false; instructions: optional; max_output_tokens: optional_count; max_tool_calls: optional_count
  metadata: {[string]: string}
  parallel_tool_calls: boolean
  temperature: number; top_p: number; presence_penalty: number; frequency_penalty: number
  previous_response_id: null
  reasoning: {effort: optional; summary: null}
  service_tier: "default"; store: false
  text: {format: format; verbosity: "medium"}
  tool_choice: tool_choice; tools: ResponseTool[]
  top_logprobs: count
  truncation: "disabled"
  user: optional; safety_identifier: optional; prompt_cache_key: optional
}
Response = {
  id: string; object: "response"; created_at: count; completed_at: optional_count; model: string
  status: "in_progress" | "completed" | "incomplete" | "failed"
  error: {code: string; message: string} | null
  incomplete_details: {reason: "max_output_tokens"} | null
  output: ResponseOutputItem[]
  usage: {
    input_tokens: count
    input_tokens_details: {cached_tokens: count; cache_write_tokens: count}
    output_tokens: count
    output_tokens_details: {reasoning_tokens: count}
    total_tokens: count
  } | null
  seed: count // The seed of the answer. Send the same seed again to get the same answer.
  system_fingerprint: fingerprint
  ...settings
  timings?: Timings // Present only after the answer has finished.
}
text_part = {type: "output_text"; text: string; annotations: array(..0); logprobs: token_logprobs[]}
reasoning_part = {type: "reasoning_text"; text: string}
item_head = {id: string; status: "in_progress" | "completed" | "incomplete"}
ResponseOutputItem = {...item_head; type: "message"; role: "assistant"; content: text_part[]}
  | {...item_head; type: "reasoning"; summary: array(..0); content: reasoning_part[]}
  | {...item_head; type: "function_call"; call_id: string; name: string; arguments: string}
problem = {code: optional; message: string; param: optional}
ResponseEvent = {
  type: "response.created" | "response.in_progress" | "response.completed" | "response.incomplete" | "response.failed"
  sequence_number: count; response: Response
} | {
  type: "response.output_item.added" | "response.output_item.done"
    | "response.content_part.added" | "response.content_part.done"
    | "response.output_text.delta" | "response.output_text.done"
    | "response.reasoning_text.delta" | "response.reasoning_text.done"
    | "response.function_call_arguments.delta" | "response.function_call_arguments.done"
  sequence_number: count; output_index: count
  item?: ResponseOutputItem; item_id?: string
  content_index?: count; part?: text_part | reasoning_part
  delta?: string; text?: string; logprobs?: token_logprobs[]; arguments?: string
} | {type: "error"; sequence_number: count; ...problem; error: {type: string; ...problem}}
"""
