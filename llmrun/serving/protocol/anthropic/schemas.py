"""The JSON schemas of Anthropic's API, in the notation of schema_notation.py.

Tests compare the schemas with the parsers and the bodies.
"""

from __future__ import annotations

from typing import Final

ANTHROPIC_SCHEMAS: Final = """
cacheable = {
  cache_control?: any // Accepted for compatibility, without effect on the answer.
}
texts = string | {type: "text"; text: string; ...cacheable}[]
input_block = {type: "text"; text: string; ...cacheable}
  | {type: "thinking"; thinking: string; signature: string; ...cacheable}
  | {type: "redacted_thinking"; data: string; ...cacheable}
  | {type: "tool_use"; id: string; name: string; input: object; ...cacheable}
  | {type: "tool_result"; tool_use_id: string; content?: texts; is_error?: boolean; ...cacheable}
output_format = {type: "json_schema"; schema: object}

question = {
  model: string(1..) // The name of a model or preset.
  messages: {role: ROLES; content: string | input_block[]}[](1..)
  system?: texts // The system prompt.
  tools?: {
    type?: "custom"
    name: string(NAME)
    description?: string
    input_schema: object // The JSON schema of the arguments.
    strict?: strict
  }[](..MOST_TOOLS)
  tool_choice?: {type: CHOICES; name?: string; disable_parallel_tool_use?: boolean}
  thinking?: {type: KINDS; budget_tokens?: integer(1..); display?: DISPLAYS}
    // Without this field, the model does not think, if thinking can be turned off.
  output_config?: {format?: output_format; effort?: EFFORTS}
    // The format of the answer and the thinking effort. A format cannot be combined with tools.
  output_format?: output_format // The older name of output_config.format.
  context_management?: {
    edits?: {
      type: KNOWN_EDIT
      keep?: any // The value all is the behavior of this server. Other values are ignored.
    }[]
  }
  metadata?: {user_id?: string} // Accepted for compatibility, without effect on the answer.
  cache_control?: object
    // Accepted for compatibility, without effect on the answer. Prefixes are always cached.
  service_tier?: "auto" | "standard_only" // Accepted for compatibility, without effect on the answer.
  speed?: "standard" // Accepted for compatibility, without effect on the answer.
}
MessageRequest = {
  ...question
  max_tokens: integer(1..) // The maximum number of generated tokens, including thinking.
  stream?: boolean // Send the answer as server-sent events while it is generated.
  stop_sequences?: stops
  ...sampling
}
MessageCountRequest = {...question}

stop_reason = "end_turn" | "max_tokens" | "stop_sequence" | "tool_use" | "model_context_window_exceeded"
message = {
  id: string; type: "message"; role: "assistant"; model: string
  content: ContentBlock[]; stop_sequence: optional; usage: MessageUsage
  seed: count // The seed of the answer. Send the same seed again to get the same answer.
  system_fingerprint: fingerprint
}
AnthropicMessage = {...message; stop_reason: stop_reason}
ContentBlock = {type: "text"; text: string}
  | {type: "thinking"; thinking: string; signature: "" | SIGNATURE}
  | {type: "tool_use"; id: string; name: string; input: object}
delta = {type: "text_delta"; text: string}
  | {type: "thinking_delta"; thinking: string}
  | {type: "signature_delta"; signature: SIGNATURE}
  | {type: "input_json_delta"; partial_json: string}
MessageEvent = {type: "message_start"; message: {...message; stop_reason: null}}
  | {type: "content_block_start"; index: count; content_block: ContentBlock}
  | {type: "content_block_delta"; index: count; delta: delta}
  | {type: "content_block_stop"; index: count}
  | {type: "message_delta"; delta: {stop_reason: stop_reason; stop_sequence: optional}; usage: MessageUsage}
  | {type: "message_stop"} | {type: "ping"} | AnthropicError
  // The type of the server-sent event equals the field `type`.
MessageUsage = {
  input_tokens: count // The number of prompt tokens that were not cached.
  cache_creation_input_tokens: count; cache_read_input_tokens: count; output_tokens: count
  output_tokens_details: {thinking_tokens: count}
}
MessageCount = {input_tokens: count}
AnthropicModel = {
  type: "model"; id: string; display_name: string; created_at: time; lifecycle: "active"
  max_input_tokens: integer | null // Null if the model is not loaded.
  max_tokens: integer | null
}
AnthropicModels = {data: AnthropicModel[]; has_more: false; first_id: optional; last_id: optional}
AnthropicError = {
  type: "error"
  error: {
    type: string; message: string
    details?: {error_code: string} // Present only for `thread`.
  }
}
"""
