"""The JSON schemas of Ollama's API, in the notation of schema_notation.py.

Tests compare them with the parsers and the bodies.
"""

from __future__ import annotations

from typing import Final

OLLAMA_SCHEMAS: Final = """
nanoseconds = count // In nanoseconds.
no_images = array(..0) // Only an empty list is supported.
ollama_common = {
  model?: string // A model's name. If it is missing, the server's first model answers.
  stream?: boolean // Send the answer in lines of JSON. On by default.
  think?: boolean | LEVELS // Turn thinking on or off. An error if it is on and the model does not think.
  format?: "json" | "" | object // JSON, or a JSON schema.
  options?: OllamaOptions
  keep_alive?: number | string(duration)
    // How long the model stays loaded: seconds, a duration such as 5m, or -1 for forever.
  logprobs?: boolean // Return the log-probability of every token.
  top_logprobs?: integer(0..MOST_LOGPROBS)
    // The number of likeliest tokens to return at each position. Needs `logprobs`.
  truncate?: false // Prompts are never truncated.
  shift?: false // The context is never shifted.
  _debug_render_only?: false // Not supported.
}
OllamaChatRequest = {
  messages?: OllamaMessage[]
    // Without messages, the model is only loaded, or unloaded if `keep_alive` is 0.
  ...tools
  ...ollama_common
}
OllamaGenerateRequest = {
  prompt?: string
    // The text of a user's message. Without it, the model is only loaded, or unloaded if `keep_alive` is 0.
  suffix?: string
    // The text after the answer, which then fills the gap after the prompt. Not with `system` or `raw`, and only if the
    // model can fill in the middle.
  system?: string // The text of the system message.
  raw?: boolean // Continue the prompt itself, without the chat template.
  images?: no_images
  context?: array(..0) // Only an empty list is supported. Use /api/chat.
  template?: "" // The model's own template is used.
  ...ollama_common
}
OllamaOptions = {
  ...sampling
  stop?: stops
  num_predict?: num_predict
    // The maximum number of generated tokens, including thinking; -1 or -2 for no limit.
  num_ctx?: integer(1..) // An error if it is larger than the server's context. Other values have no effect.
} // Options that a server sets when it starts, such as num_gpu, have no effect.
OllamaMessage = {
  role: "system" | "user" | "assistant" | "tool"
  content?: string
  thinking?: string // The thinking before a past answer.
  tool_calls?: OllamaToolCall[]
  tool_name?: string // The tool that returned this result.
  tool_call_id?: string
    // The call with this result. Without it, a result belongs to the first call of its tool that has none.
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
    // Tool calls that were cut off by the limit of tokens are left out.
  total_duration?: nanoseconds
  load_duration?: 0 // The times begin when the model is loaded.
  prompt_eval_count?: count; prompt_eval_duration?: nanoseconds
  eval_count?: count; eval_duration?: nanoseconds
  seed?: count // llmrun's own. Send it in `options` to get the same answer.
  system_fingerprint?: string // llmrun's own. See ChatCompletion.
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
    // The keys of the file whose values are not lists. If the model is loaded, its context length is that of the
    // server.
  capabilities: ("completion" | "embedding" | "tools" | "thinking" | "insert")[]
    // If the model is not loaded, they are guessed from the text of the template.
  template: string // The chat template in the file.
  parameters: string // The defaults of some options, one in each line, if the model is loaded.
  license?: string
  system?: string // The system prompt of a preset.
}
listed = {
  name: string; model: string; size: count
  digest: string // Changes when the file changes. It is the sha256 of the file if that is known.
  details: details
}
OllamaModels = {models: {...listed; modified_at: time}[]}
OllamaLoadedModels = {models: {...listed; size_vram: count; expires_at: time; context_length: count}[]}
OllamaVersion = {version: string; llmrun: string}
OllamaError = {error: string}
"""
