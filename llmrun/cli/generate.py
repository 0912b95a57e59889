"""`llmrun generate`: one prompt, one answer, for a person or a shell script."""

from __future__ import annotations

import secrets
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from llmrun.cli import options
from llmrun.cli.output import out
from llmrun.cli.parsing import (
    chat_messages,
    chosen_sampling,
    described_sampling,
    parse_logit_bias,
    parse_stops,
    parse_template_variables,
)
from llmrun.cli.prompt import checked_text, read_prompt, read_text
from llmrun.errors import UsageError

RANDOM_SEEDS = 1_000_000  # short enough to read out and type again, many enough for a thousand samples


def generate(
    prompt: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PROMPT]...", help="The prompt; `-` stands for standard input."),
    ] = None,
    prompt_option: Annotated[
        str | None, typer.Option("-p", "--prompt", metavar="TEXT", help="The prompt, as an option.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("-f", "--file", metavar="FILE", help="Its text follows the prompt, or is it."),
    ] = None,
    model: options.Model = None,
    system: options.System = None,
    max_tokens: options.MaxTokens = None,
    ctx_size: options.ContextSize = None,
    threads: options.Threads = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repeat_penalty: options.RepeatPenalty = None,
    presence_penalty: options.PresencePenalty = None,
    frequency_penalty: options.FrequencyPenalty = None,
    repeat_last_n: options.RepeatLastN = None,
    logit_bias: options.LogitBias = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    raw: Annotated[bool, typer.Option("--raw", help="Give the model the prompt as it is: no chat template.")] = False,
    chat_template: options.ChatTemplate = None,
    chat_template_kwargs: options.ChatTemplateKwargs = None,
    logprobs: Annotated[
        int | None,
        typer.Option("--logprobs", metavar="N", min=0, help="Each token's probability, and the N likeliest ones."),
    ] = None,
    json_output: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    backend: options.Backend = None,
    offline: options.Offline = False,
    debug: options.Debug = False,
) -> int:
    """Answer one prompt. The answer goes to stdout, everything else to stderr."""
    from llmrun.settings import load_settings

    settings = load_settings(
        {
            "model": model,
            "backend": backend,
            "threads": threads,
            "ctx_size": ctx_size,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "repeat_penalty": repeat_penalty,
            "presence_penalty": presence_penalty,
            "frequency_penalty": frequency_penalty,
            "seed": seed,
            "offline": offline or None,
            "quiet": quiet or None,
        }
    )
    out.quiet, out.verbose, out.color = settings.quiet, verbose, settings.color
    if raw and (system is not None or chat_template is not None or chat_template_kwargs is not None):
        raise UsageError("--raw: leaves no place for a system prompt or a chat template")
    bias = parse_logit_bias(logit_bias or ())
    stops = parse_stops(stop or ())
    template = read_text(chat_template, "--chat-template") if chat_template is not None else None
    variables = parse_template_variables(chat_template_kwargs) if chat_template_kwargs is not None else {}
    text = read_prompt(prompt or (), prompt_option, file)
    messages = chat_messages(text, settings.system if system is None else checked_text(system, "--system"))

    # Nothing heavy is imported above this line: a usage error comes at once.
    from llmrun.cli.answering import answer
    from llmrun.cli.open_model import open_model
    from llmrun.engine.requests import ChatPrompt, Request, TextPrompt

    with open_model(settings, chat_template=template) as opened:
        sampling = replace(
            chosen_sampling(opened.default_sampling, settings),
            logit_bias=bias,
            seed=settings.seed if settings.seed is not None else secrets.randbelow(RANDOM_SEEDS),
        )
        if repeat_last_n is not None:
            sampling = replace(sampling, penalty_last_n=repeat_last_n)
        out.detail(f"sampling   {described_sampling(sampling)}")
        request = Request(
            prompt=TextPrompt(text) if raw else ChatPrompt(messages, template_kwargs=variables),
            max_tokens=settings.max_tokens,
            stop=stops,
            sampling=sampling,
            logprobs=logprobs,
        )
        return answer(opened.engine, request, model=opened.name, as_json=json_output)
