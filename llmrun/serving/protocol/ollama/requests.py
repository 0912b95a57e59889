"""Converts the bodies of Ollama's /api/chat and /api/generate into requests for the engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from llmrun.engine.facts import ModelFacts
from llmrun.engine.requests import ChatPrompt, FillPrompt, Prompt, Request, TextPrompt
from llmrun.serving.protocol.errors import InvalidField, unsupported
from llmrun.serving.protocol.fields import Fields
from llmrun.serving.protocol.ollama.messages import read_ollama_messages, refuse_images
from llmrun.serving.protocol.ollama.options import OllamaOptions, read_keep_alive, read_ollama_options, read_think
from llmrun.serving.protocol.openai.prompts import require_filling
from llmrun.serving.protocol.openai.requests import ParsedCompletion, chat_request
from llmrun.serving.protocol.openai.thinking import ThinkingOptions
from llmrun.serving.protocol.openai.tools import read_tools

_TO_CHAT: Final = "send the conversation to /api/chat instead"
_NO_TEMPLATE: Final = "this model has no chat template"


def parse_ollama_chat(body: dict[str, Any], facts: ModelFacts, seed: int) -> ParsedCompletion:
    """Convert the body of /api/chat, which has no request if it only loads the model. Raises InvalidField.

    seed  the seed if the body has none
    """
    fields = Fields(body)
    options = read_ollama_options(fields, facts, seed)
    thinking = read_think(fields, facts)
    tools = read_tools(fields, facts)
    messages, unread = read_ollama_messages(fields)
    if not messages:
        return _parsed(None, options, fields.unread())
    if not facts.takes_chats:
        raise unsupported("messages", _NO_TEMPLATE, hint="send a prompt to /api/generate instead")
    request = chat_request(
        messages,
        tools,
        thinking,
        options.response_format,
        max_tokens=options.max_tokens,
        stop=options.stop,
        sampling=options.sampling,
        logprobs=options.logprobs,
    )
    return _parsed(request, options, (*fields.unread(), *unread))


def parse_generate(body: dict[str, Any], facts: ModelFacts, seed: int) -> ParsedCompletion:
    """Convert the body of /api/generate, which has no request if it only loads the model. Raises InvalidField.

    seed  the seed if the body has none
    """
    fields = Fields(body)
    options = read_ollama_options(fields, facts, seed)
    refuse_images(fields)
    if fields.text("template"):
        raise unsupported("template", "the model's own template is used", hint="write the prompt yourself, with raw")
    if fields.items("context"):
        raise unsupported("context", "obsolete", hint=_TO_CHAT)
    text, system, is_raw = fields.text("prompt"), fields.text("system"), bool(fields.boolean("raw"))
    if suffix := fields.text("suffix"):
        require_filling(facts, "suffix")
        if system or is_raw:
            raise unsupported("suffix", f"cannot be combined with {'raw' if is_raw else 'system'}")
        return _parsed(_request(FillPrompt(text or "", suffix), options), options, fields.unread())
    if not text:
        return _parsed(None, options, fields.unread())
    if system and (is_raw or not facts.takes_chats):
        raise InvalidField("system", "cannot be combined with raw" if is_raw else _NO_TEMPLATE)
    if is_raw or not facts.takes_chats:
        return _parsed(_request(TextPrompt(text), options), options, fields.unread())
    thinking = read_think(fields, facts)
    messages = [{"role": "system", "content": system}] if system else []
    prompt = ChatPrompt([*messages, {"role": "user", "content": text}], template_kwargs=thinking.variables)
    return _parsed(_request(prompt, options, thinking), options, fields.unread())


def only_unloads_chat(body: Mapping[str, Any]) -> bool:
    """Return whether a body of /api/chat only unloads the model. Raises InvalidField."""
    return not body.get("messages") and _unloads(Fields(body))


def only_unloads_generate(body: Mapping[str, Any]) -> bool:
    """Return whether a body of /api/generate only unloads the model. Raises InvalidField."""
    return not body.get("prompt") and not body.get("suffix") and _unloads(Fields(body))


def _unloads(fields: Fields) -> bool:
    fields.text("model")
    return read_keep_alive(fields) == 0


def _request(prompt: Prompt, options: OllamaOptions, thinking: ThinkingOptions | None = None) -> Request:
    return Request(
        prompt,
        options.max_tokens,
        options.stop,
        options.sampling,
        options.logprobs,
        thinking.think if thinking is not None else None,
        response_format=options.response_format,
    )


def _parsed(request: Request | None, options: OllamaOptions, unread: Iterable[str]) -> ParsedCompletion:
    return ParsedCompletion(
        requests=() if request is None else (request,),
        stream=options.stream and request is not None,
        ignored=(*unread, *options.ignored),
        n=1,
        seed=options.sampling.seed,
        include_usage=False,
    )
