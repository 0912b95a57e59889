"""The profiles of `scripts/soak`: what each of them promises, and where its code is."""

from __future__ import annotations

from typing import NamedTuple


class Profile(NamedTuple):
    """A profile. `code` is a module and a generator function in it, as driver.py describes."""

    code: str
    promise: str


PROFILES = {
    "batch": Profile("tests.soak.batch:batch", "a killed `llmrun batch` resumes and writes the same bytes"),
    "bench": Profile("tests.soak.bench:bench", "`llmrun bench` claims no false differences and finds one of 5 %"),
    "chat": Profile("tests.soak.chat:chat", "a chat in a terminal loses no text, never hangs and leaks nothing"),
    "constraints": Profile("tests.soak.brief:constraints", "answers within real JSON Schemas are valid"),
    "downloads": Profile("tests.soak.downloads:downloads", "a disturbed download ends whole, or not listed"),
    "gguf": Profile("tests.soak.brief:gguf", "broken GGUF files are refused, and crash nothing"),
    "hub": Profile("tests.soak.brief:hub", "the model store keeps its contents in any sequence of operations"),
    "models": Profile("tests.soak.models:models", "broken models end in an answer or an error, on both backends"),
    "ray": Profile("tests.soak.batch:ray", "a Ray cluster whose parts die writes the bytes of one process"),
    "samplers": Profile("tests.soak.samplers.soak:samplers", "samplers keep the candidates that libllama's keep"),
    "serve-cancel": Profile("tests.soak.serving.cancel:cancel", "a client that leaves costs at most one more step"),
    "serve-hostile": Profile("tests.soak.serving.hostile:hostile", "hostile clients harm no one and leak nothing"),
    "serve-kill": Profile("tests.soak.serving.disturbed:kill", "a killed engine changes no answer"),
    "serve-same": Profile("tests.soak.serving.disturbed:same", "an answer is the same alone, and in a full KV cache"),
    "serve-swap": Profile("tests.soak.serving.disturbed:swap", "models that share too little memory fail no request"),
    "serve-upstreams": Profile("tests.soak.serving.disturbed:upstreams", "a killed upstream loses no request"),
    "speculation": Profile("tests.soak.speculation:speculation", "drafts change no answer of any architecture"),
    "store": Profile("tests.soak.store:store", "a damaged kernel cache costs one note, and never an answer"),
    "templates": Profile("tests.soak.brief:templates", "hostile chat templates end in a text or one line"),
    "terminal": Profile("tests.soak.terminal_soak:terminal", "hostile answers write only text and our own colors"),
    "tokenizers": Profile("tests.soak.tokenizer_soak:tokenizers", "token ids are those of llama.cpp"),
    "tool-calls": Profile("tests.soak.brief:tool_calls", "forced tool calls are complete and match their schemas"),
}
