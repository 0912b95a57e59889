"""The profiles of `scripts/soak`, with the promises that they check."""

from __future__ import annotations

from typing import NamedTuple


class Profile(NamedTuple):
    """A profile. `code` is MODULE:FUNCTION, a generator function as driver.py describes."""

    code: str
    promise: str


PROFILES = {
    "background": Profile(
        "tests.soak.background:starts", "background engines come and go and leave nothing, however they or clients end"
    ),
    "batch": Profile("tests.soak.batch:batch", "a killed `llmrun batch` resumes and writes the same bytes"),
    "bench": Profile("tests.soak.bench:bench", "`llmrun bench` seldom reports a false difference and finds one of 5 %"),
    "chat": Profile("tests.soak.chat:chat", "a chat in a terminal loses no text, never hangs and leaks nothing"),
    "constraints": Profile("tests.soak.brief:constraints", "answers within real JSON Schemas are valid"),
    "downloads": Profile("tests.soak.downloads:downloads", "a disturbed download leaves a complete model or none"),
    "gguf": Profile("tests.soak.brief:gguf", "broken GGUF files are refused and crash nothing"),
    "hub": Profile("tests.soak.brief:hub", "the model store keeps its contents in any sequence of operations"),
    "image-chats": Profile(
        "tests.soak.image_chats:image_chats", "answers about images do not depend on company, caches, restarts or kills"
    ),
    "images": Profile("tests.soak.images:images", "broken images end in pixels or one clear line, within the memory"),
    "models": Profile("tests.soak.models:models", "broken models end in an answer or an error, on both backends"),
    "projectors": Profile(
        "tests.soak.projectors:projectors", "broken projectors end in rows of embeddings or in an error of one line"
    ),
    "ray": Profile("tests.soak.batch:ray", "a Ray cluster writes the bytes of one process, even if parts of it die"),
    "samplers": Profile("tests.soak.samplers.soak:samplers", "samplers keep the same candidates as libllama's"),
    "serve-cancel": Profile(
        "tests.soak.serving.cancel:cancel", "a client that leaves costs at most one more engine step"
    ),
    "serve-hostile": Profile("tests.soak.serving.hostile:hostile", "hostile clients harm no one and leak nothing"),
    "serve-kill": Profile("tests.soak.serving.disturbed:kill", "a killed engine changes no answer"),
    "serve-same": Profile("tests.soak.serving.disturbed:same", "no answer depends on the load or a full KV cache"),
    "serve-swap": Profile(
        "tests.soak.serving.disturbed:swap", "no request fails if the models do not fit in memory together"
    ),
    "serve-upstreams": Profile("tests.soak.serving.disturbed:upstreams", "a killed upstream loses no request"),
    "speculation": Profile("tests.soak.speculation:speculation", "drafts change no answer of any architecture"),
    "store": Profile("tests.soak.store:store", "a damaged kernel cache causes at most a note"),
    "templates": Profile("tests.soak.brief:templates", "hostile chat templates give a text or a one-line error"),
    "terminal": Profile("tests.soak.terminal_soak:terminal", "hostile answers write only text and our own colors"),
    "tokenizers": Profile("tests.soak.tokenizer_soak:tokenizers", "token ids equal those of llama.cpp"),
    "tool-calls": Profile("tests.soak.brief:tool_calls", "forced tool calls are complete and match their schemas"),
}
