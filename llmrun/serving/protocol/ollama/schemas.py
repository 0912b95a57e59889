"""The JSON schemas of Ollama's API, in the notation of schema_notation.py.

Tests compare the schemas with the parsers and the bodies.
"""

from __future__ import annotations

from typing import Final

OLLAMA_SCHEMAS: Final = """
nanoseconds = count // A duration in nanoseconds.
no_images = array(..0) // Only an empty list is supported.
ollama_common = {
  model?: string // The name of a model. By default, the server's first model answers.
  stream?: boolean // Stream the answer as lines of JSON. The default is true.
  think?: boolean | LEVELS // Turn thinking on or off. Turning thinking on is an error if the model cannot think.
  format?: "json" | "" | object // The format of the answer: JSON, or a JSON schema.
  options?: OllamaOptions
  keep_alive?: number | string(duration)
    // The time that the model stays loaded: a number of seconds, a duration such as 5m, or -1 for no limit.
  logprobs?: boolean // Return the log-probability of every token.
  top_logprobs?: integer(0..MOST_LOGPROBS)
    // The number of likeliest tokens to return at each position. Requires `logprobs`.
  truncate?: false // Prompts are never truncated.
  shift?: false // The context is never shifted.
  _debug_render_only?: false // Not supported.
}
OllamaChatRequest = {
  messages?: OllamaMessage[]
    // The conversation. Without messages, the model is only loaded, or unloaded if `keep_alive` is 0.
  ...tools
  ...ollama_common
}
OllamaGenerateRequest = {
  prompt?: string
    // The text of a user message. Without a prompt, the model is only loaded, or unloaded if `keep_alive` is 0.
  suffix?: string
    // The text after the answer, which then fills the gap after the prompt. A suffix requires a model that can fill in
    // the middle, and cannot be combined with `system` or `raw`.
  system?: string // The text of the system message.
  raw?: boolean // Continue the prompt itself, without the chat template.
  images?: no_images
  context?: array(..0) // Only an empty list is supported. Use /api/chat.
  template?: "" // Not supported. The server always uses the model's own template.
  ...ollama_common
}
OllamaOptions = {
  ...sampling
  stop?: stops
  num_predict?: num_predict
    // The maximum number of generated tokens, including thinking; -1 or -2 for no limit.
  num_ctx?: integer(1..) // Values larger than the server's context are an error. Smaller values are ignored.
} // Options that a server sets when it starts, such as num_gpu, have no effect.
OllamaMessage = {
  role: "system" | "user" | "assistant" | "tool"
  content?: string
  thinking?: string // The thinking before a past answer.
  tool_calls?: OllamaToolCall[]
  tool_name?: string // The tool that returned this result.
  tool_call_id?: string
    // The ID of the call with this result. A result without an ID belongs to the tool's first call without a result.
  images?: no_images
}
OllamaToolCall = {id?: string; function: {index?: count; name: string; arguments: object}}
OllamaShowRequest = {
  model: string
  name?: string // The old name of `model`.
  verbose?: false
}

ollama_answer = {
  model: string; created_at: time; done: boolean
  logprobs?: token_logprobs[]
  done_reason?: "stop" | "length" | "load" | "unload"
    // With "length", tool calls that were truncated by the token limit are left out.
  total_duration?: nanoseconds
  load_duration?: 0 // Always 0, because the times begin after the model is loaded.
  prompt_eval_count?: count; prompt_eval_duration?: nanoseconds
  eval_count?: count; eval_duration?: nanoseconds
  seed?: count // The seed of the answer, which only llmrun returns. Send the seed in `options` to get the same answer.
  system_fingerprint?: string // A field of llmrun that identifies everything that can change the bytes of an answer.
  timings?: Timings
}
OllamaChat = {
  ...ollama_answer
  message: {role: "assistant"; content: string; thinking?: string; tool_calls?: OllamaToolCall[]}
}
OllamaText = {...ollama_answer; response: string; thinking?: string}
details = {
  parent_model: string; format: string; family: string; families: string[]
  parameter_size: string; quantization_level: string; context_length: count
}
OllamaModelFacts = {
  modified_at: time
  details: details
  model_info: object
    // All keys of the file's header whose values are not lists. For loaded models, the context length is the server's
    // setting.
  capabilities: ("completion" | "embedding" | "tools" | "thinking" | "insert")[]
    // For unloaded models, the capabilities are guessed from the text of the template.
  template: string // The chat template in the file.
  parameters: string // The default values of some options, one option per line. Empty if the model is not loaded.
  license?: string
  system?: string // The system prompt of a preset.
}
listed = {
  name: string; model: string; size: count
  digest: string // The sha256 of the file if known, or another hash that changes with the file.
  details: details
}
OllamaModels = {models: {...listed; modified_at: time}[]}
OllamaLoadedModels = {models: {...listed; size_vram: count; expires_at: time; context_length: count}[]}
OllamaVersion = {version: string; llmrun: string}
OllamaError = {error: string}
"""
