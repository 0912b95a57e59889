"""Answer one prompt. The answer is printed to stdout, everything else to stderr.

Text from a pipe or a file on standard input follows the prompt.

Examples:
    llmrun generate "Why is the sky blue?"
    git diff | llmrun generate "What does this change?"
    llmrun generate -m qwen3:4b --json --temp 0 "Name a color."
    llmrun generate -m gemma3:4b --image cat.jpg "What is this?"
    llmrun generate --samples 5 --best-of vote "What is 17 * 3? Reply with the number."
    llmrun generate --prompt-cache book.kv - "Who is Ishmael?" < book.txt
    llmrun generate --json-schema person.json -f article.txt "Who is this about?"
    llmrun generate -m qwen2.5-coder:1.5b -f before.py --suffix-file after.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmrun.base.errors import UsageError
from llmrun.cli.arguments import options
from llmrun.cli.arguments.generating import (
    IMAGE,
    BestOf,
    Images,
    Null,
    Samples,
    Suffix,
    SuffixFile,
    check_prompt_cache,
    check_recordable,
    check_recordable_images,
    parse_samples,
    read_suffix,
)
from llmrun.cli.arguments.options import (
    AnswerFlags,
    names_a_model,
    parse_logit_bias,
    parse_stops,
    parse_template_variables,
    takes_answer_flags,
    with_model_option,
)
from llmrun.cli.arguments.prompts import STDIN, Prompts, chat_messages, names_image, read_prompt, read_text
from llmrun.cli.console.output import out

if TYPE_CHECKING:
    from llmrun.cli.arguments.images import GivenImage
    from llmrun.options.settings import Settings

LISTING = {"heading": "Run models", "place": 11}


@takes_answer_flags()
def command(
    prompt: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PROMPT]...", help="Prompt text; `-` puts the text of standard input here."),
    ] = None,
    prompt_option: Annotated[
        str | None, options.prompt_option("-p", "--prompt", metavar="TEXT", help="Prompt text, instead of an argument.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("-f", "--file", metavar="FILE", help="Append this file to the prompt, or use it as the prompt."),
    ] = None,
    *,
    flags: AnswerFlags,
    no_stdin: Annotated[bool, options.prompt_option("--no-stdin", help="Ignore text on standard input.")] = False,
    logit_bias: options.LogitBias = None,
    raw: Annotated[
        bool, options.prompt_option("--raw", help="Send the prompt as it is, without a chat template.")
    ] = False,
    image: Images = None,
    suffix: Suffix = None,
    suffix_file: SuffixFile = None,
    logprobs: Annotated[
        int | None,
        options.output_option(
            "--logprobs", metavar="N", min=0, help="Show token probabilities and the N most likely tokens."
        ),
    ] = None,
    log: Annotated[
        bool | None,
        options.output_option("--log/--no-log", help="Log the answer (see llmrun logs).  [default: no-log]"),
    ] = None,
    prompt_cache: options.PromptCache = None,
    record: Annotated[
        Path | None,
        options.output_option("--record", metavar="FILE", help="Record the run in a file, for llmrun replay."),
    ] = None,
    samples: Samples = None,
    best_of: BestOf = None,
    null: Null = False,
    json_output: options.Json = False,
) -> int:
    settings = flags.settings()
    flags.check_model(settings.model)
    if flags.model is None:
        _check_first_word(prompt or ())
    after = read_suffix(suffix, suffix_file)
    raw = raw or after is not None
    if raw:
        _check_raw(flags, settings, "--raw" if after is None else "--suffix")
    if prompt_cache is not None:
        check_prompt_cache(prompt_cache, settings.model)
    if record is not None:
        cached, several = prompt_cache is not None, samples is not None
        check_recordable(record, settings, several=several, cached=cached)
    wanted = parse_samples(samples, best_of, null=null, as_json=json_output, seed=settings.fixed_seed)
    bias = parse_logit_bias(logit_bias or ())
    response_format = flags.response_format()
    stops = parse_stops(flags.stop or ())
    template = read_text(flags.chat_template, "--chat-template") if flags.chat_template is not None else None
    variables = {**settings.variables, **parse_template_variables(flags.chat_template_kwargs)}
    prompts = Prompts.of(settings, flags.prompt_values(), flags.system)
    prompts.check_complete()
    asked = read_prompt(
        prompt or (),
        prompt_option,
        file,
        exact=after is not None,
        required=prompts.needs_input,
        no_stdin=no_stdin,
        image_on_stdin=STDIN in (image or ()),
    )
    text, system = prompts.filled(asked)
    images = _images(image or (), text, raw=raw, fills=after is not None, no_stdin=no_stdin)
    if record is not None:
        check_recordable_images(each.data for each in images)
    if not images:
        _check_for_paths([*(prompt or ()), prompt_option or ""])
    messages = chat_messages(text, system, [each.sha256 for each in images])

    # Slow imports must stay below this line, so that usage errors appear immediately.
    from llmrun.cli.answers.answering import (
        answer,
        next_seed,
        open_model,
        sent_sampling,
        tell_of_default_model,
        unwatched,
        with_prompt_cache,
    )
    from llmrun.cli.answers.report import described_sampling
    from llmrun.cli.answers.thinking import Wish, check_thinking, wanted_thinking
    from llmrun.engine.requests import ChatPrompt, FillPrompt, Request, TextPrompt

    recorder = None
    if record is not None:
        from llmrun.cli.answers.recording import Recorder

        recorder = Recorder(record, settings, template, raw=raw)
    if flags.model is None:
        tell_of_default_model(settings)
    count = 1 if wanted is None else wanted.count
    with open_model(
        settings,
        chat_template=template,
        will_chat=not raw,
        max_sequences=count,
        will_constrain=response_format is not None,
        saves_state=prompt_cache is not None,
        images=bool(images),
        watch=recorder.watcher if recorder is not None else unwatched,
    ) as opened:
        seed, sent = next_seed(opened.engine, settings), sent_sampling(opened.engine, settings)
        sampling = replace(opened.default_sampling, **settings.sampling, logit_bias=bias, seed=seed or 0)
        out.detail(f"sampling   {described_sampling(sampling, sent)}")
        typed = flags.given()
        if not raw:
            check_thinking(opened.engine, flags, settings, typed)
        wish = Wish(None, None) if raw else wanted_thinking(opened.engine, settings, typed)
        if images:
            from llmrun.cli.arguments.images import tell_of_images

            tell_of_images(images, opened.projector())
        plain = TextPrompt(text, tuple(each.data for each in images)) if after is None else FillPrompt(text, after)
        files = {each.sha256: each.data for each in images}
        request = Request(
            prompt=plain if raw else ChatPrompt(messages, template_kwargs=variables, images=files),
            max_tokens=settings.token_limit,
            stop=stops,
            sampling=sampling,
            logprobs=logprobs,
            think=wish.think,
            think_budget=wish.think_budget,
            response_format=response_format,
            sent_sampling=sent,
        )
        log_answer = None
        if settings.log if log is None else log:
            from llmrun.cli.answers.answer_log import logger

            log_answer = logger(opened.preset or None, {each.sha256: each.name for each in images})
        if prompt_cache is not None:
            log_answer = with_prompt_cache(prompt_cache, opened.engine, log_answer)
        if wanted is not None:
            from llmrun.cli.answers.samples import answer_samples

            return answer_samples(
                opened.engine,
                request,
                wanted,
                model=opened.name,
                as_json=json_output,
                hide_thinking=settings.hide_thinking,
                log=log_answer,
            )
        return answer(
            opened.engine,
            request,
            model=opened.name,
            as_json=json_output,
            renders=not (raw or json_output) and response_format is None and logprobs is None,
            hide_thinking=settings.hide_thinking,
            stream=settings.stream,
            log=log_answer if recorder is None else recorder.after(opened, log_answer),
        )


def _images(given: Sequence[str], text: str, *, raw: bool, fills: bool, no_stdin: bool) -> Sequence[GivenImage]:
    """Read the images of --image. Raises UsageError."""
    if not given:
        return ()
    if fills:
        raise UsageError(f"{IMAGE}: cannot be combined with --suffix")
    from llmrun.base.amounts import counted
    from llmrun.cli.arguments.images import read_images
    from llmrun.engine.requests import IMAGE_MARKER

    if raw and (count := text.count(IMAGE_MARKER)) != len(given):
        raise UsageError(
            f"{IMAGE}: {counted(len(given), 'image')} for a raw prompt with {counted(count, 'marker')}",
            hint=f"write {IMAGE_MARKER} in the prompt where each image belongs",
        )
    return read_images(given, no_stdin=no_stdin)


def _check_for_paths(words: Sequence[str]) -> None:
    """Print a note if the prompt that was typed names an image file, because users of Ollama may expect to send it."""
    if any(names_image(word) for word in words):
        from llmrun.cli.arguments.images import tell_of_paths_in_text

        tell_of_paths_in_text(" ".join(words), IMAGE)


def _check_first_word(words: Sequence[str]) -> None:
    """Raise UsageError if the prompt begins with an argument that names a model, as in `ollama run`."""
    if words and (len(words) > 1 or ":" in words[0]) and names_a_model(words[0]):
        hint = f"{with_model_option(words[0])}, or put the whole prompt in quotes"
        raise UsageError(f"{words[0]}: the prompt begins with the name of a model, which needs -m", hint=hint)


def _check_raw(flags: AnswerFlags, settings: Settings, flag: str) -> None:
    """Raise UsageError for flags that need a chat template. `flag` is the flag that turns the template off."""
    if flags.system is not None or flags.chat_template is not None or flags.chat_template_kwargs is not None:
        raise UsageError(f"{flag}: cannot be combined with a system prompt or a chat template")
    if flags.think is not None or flags.think_budget is not None:
        raise UsageError(f"{flag}: cannot be combined with --think, --no-think or --think-budget")
    if settings.preset is not None and settings.preset.is_for_chats:
        raise UsageError(
            f"{flag}: preset {settings.preset.name} has a system prompt, template variables or thinking options",
            hint=f"name its model: -m {settings.model}",
        )
