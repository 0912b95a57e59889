"""The flags shared by all commands that generate answers, declared in one dataclass.

Each format of an answer (JSON, a regular expression, a grammar or a choice) is both a flag and a chat setting with the
same name. An answer can have only one format.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from llmrun.base.errors import UsageError
from llmrun.base.machine import shell
from llmrun.cli.arguments import options
from llmrun.cli.arguments.parsing import checked_text, read_text
from llmrun.cli.arguments.prompts import check_params, parse_params
from llmrun.cli.console.output import out
from llmrun.engine.remote.request import is_endpoint
from llmrun.options.sampling_params import SAMPLING
from llmrun.options.settings import Settings, load_settings, templates_folder

if TYPE_CHECKING:
    from llmrun.engine.constraint.base import ResponseFormat

JSON_SCHEMA, JSON_OBJECT, REGEX, GRAMMAR, CHOICE = NAMES = ("json_schema", "json_object", "regex", "grammar", "choice")
ON: Final = "on"  # the value of json_object
# The texts of these formats begin as listed here. A value that begins otherwise is the name of a file.
_TEXT_BEGINS = {JSON_SCHEMA: ("{", "[", '"', "true", "false"), GRAMMAR: ()}


def format_text(name: str, value: str, flag: str) -> str:
    """Return the text of a format, which is read from a file if the value names a file. Raises UsageError.

    flag  the flag or setting, for error messages
    """
    value = checked_text(value, flag)
    if not value.strip():
        raise UsageError(f"{flag}: the text must not be empty")
    if name in _TEXT_BEGINS and not value.lstrip().startswith(_TEXT_BEGINS[name]):
        return read_text(Path(value), flag)
    return value


def response_format(name: str, text: str, origin: str) -> ResponseFormat:
    """Return the format with this name and text.

    origin  the flag or setting, for error messages
    """
    from llmrun.engine.constraint.base import FormatKind, ResponseFormat

    choices = tuple(choice.strip() for choice in text.split(",")) if name == CHOICE else ()
    return ResponseFormat(FormatKind(name), text, choices, origin)


def checked_format(name: str, text: str, origin: str) -> ResponseFormat:
    """Return the format with this name and text. Raises UsageError for mistakes that can be found without a model.

    A model may have to be downloaded, so most mistakes should be reported before the download.
    """
    from llmrun.engine.constraint.matcher import check_format

    wanted = response_format(name, text, origin)
    check_format(wanted)
    return wanted


_NOT_FOR_SERVERS = (
    *("ctx_size", "threads", "kv_type", "lora", "chat_template", "backend", "speculate", "gpu_layers"),
    *("tensor_split", "split_mode", "main_gpu", "rpc", "rpc_anyway"),
)


@dataclass(frozen=True, slots=True)
class AnswerFlags:
    """The values of the flags, in the order of --help. None or False means that the flag was not given."""

    model: options.Model = None
    system: options.System = None
    params: options.Params = None
    max_tokens: options.MaxTokens = None
    ctx_size: options.ContextSize = None
    kv_type: options.KVType = None
    lora: options.Lora = None
    threads: options.Threads = None
    sampling: Mapping[str, int | float | str] = field(default_factory=dict)  # each parameter in SAMPLING has a flag
    seed: options.Seed = None
    stop: options.Stop = None
    think: options.Think = None
    think_budget: options.ThinkBudget = None
    hide_thinking: options.HideThinking = False
    json_schema: options.JsonSchema = None
    json_object: options.JsonObject = False
    regex: options.Regex = None
    grammar: options.Grammar = None
    choice: options.Choice = None
    stream: options.Stream = None
    chat_template: options.ChatTemplate = None
    chat_template_kwargs: options.ChatTemplateKwargs = None
    backend: options.Backend = None
    gpu_layers: options.GpuLayers = None
    tensor_split: options.TensorSplit = None
    split_mode: options.SplitMode = None
    main_gpu: options.MainGpu = None
    rpc: options.Rpc = None
    rpc_anyway: options.RpcAnyway = None
    speculate: options.Speculate = None
    offline: options.Offline = False
    quiet: options.Quiet = False
    verbose: options.Verbose = False
    template: options.PromptTemplate = None

    def given(self) -> dict[str, object]:
        """Return the settings given as flags, without the system prompt, because --system "" is a valid value."""
        values = options.given_by(self) | dict(self.sampling)
        values.pop("system", None)
        return values

    def response_format(self) -> ResponseFormat | None:
        """Return the answer's format, or None. Raises UsageError for an invalid format or more than one format."""
        values = {name: getattr(self, name) for name in NAMES} | {JSON_OBJECT: ON if self.json_object else None}
        given = {"--" + name.replace("_", "-"): name for name, value in values.items() if value is not None}
        if len(given) > 1:
            raise UsageError(f"{' and '.join(given)}: an answer can have only one format", hint="use one of them")
        if not given:
            return None
        [(flag, name)] = given.items()
        return checked_format(name, format_text(name, str(values[name]), flag), origin=flag)

    def prompt_values(self) -> dict[str, str]:
        """Return the values of the variables in the preset's prompts. Raises UsageError."""
        return parse_params(self.params or ())

    def check_model(self, model: str) -> None:
        """Raise UsageError if the model is remote and its server controls a setting that was given as a flag."""
        if is_endpoint(model):
            self.refuse_local()

    def refuse_local(self) -> None:
        """Raise UsageError if a flag was given that applies only to models on this machine."""
        for name in _NOT_FOR_SERVERS:
            if getattr(self, name) is not None:
                raise UsageError(
                    f"--{name.replace('_', '-')}: not supported for models on a server, which controls this setting",
                    hint="leave out this flag, or set it when you start the server",
                )

    def settings(self) -> Settings:
        """Load the settings for this run and configure `out` with them. Raises UsageError."""
        if self.think and self.think_budget == 0:
            raise UsageError("--think: contradicts --think-budget 0, which turns thinking off", hint="use only one")
        if self.template is not None:
            raise UsageError("--template: no longer exists", hint=_successor(self.template))
        if self.system is not None:
            checked_text(self.system, "--system")
        settings = replace(load_settings(self.given()), loras=tuple(self.lora or ()))
        check_params(self.prompt_values(), settings.preset)
        out.quiet, out.verbose, out.color = settings.quiet, self.verbose, settings.color
        return settings


def _successor(template: str) -> str:
    """Return a hint for users of the removed `--template`, whose value was a name or a path."""
    path = Path(template)
    if template == path.stem:
        return f"prompt templates are presets now: -m {shell.quoted(template)}"
    moved = f"move {template} to {templates_folder()}"
    return f"prompt templates are presets now: {moved}, and use -m {shell.quoted(path.stem)}"


def takes_answer_flags(*, but: Collection[str] = ()) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Show Typer the flags in AnswerFlags and SAMPLING instead of the command's parameter `flags`.

    but  the names in AnswerFlags of the flags that the command lacks
    """
    parameters = [parameter for parameter in _answer_parameters() if parameter.name not in but]
    return lambda command: _with_flags(command, parameters, _answer_flags)


def takes_flags(kind: type) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Show Typer one flag for each field of a dataclass instead of the command's parameter `flags`."""
    return lambda command: _with_flags(command, _parameters(kind), kind)


def _parameters(kind: type) -> list[inspect.Parameter]:
    """Return the fields of a dataclass as parameters. As in --help, the class's own fields precede inherited fields."""
    own = inspect.get_annotations(kind)
    parameters = inspect.signature(kind, eval_str=True).parameters.values()
    return sorted(parameters, key=lambda parameter: parameter.name not in own)


def _answer_parameters() -> Iterator[inspect.Parameter]:
    for parameter in _parameters(AnswerFlags):
        if parameter.name != "sampling":
            yield parameter
            continue
        for name, declared in SAMPLING.items():
            text = f"{declared.help}  [default: the model's, or {declared.shown_default}]"
            option = typer.Option(*declared.flags, metavar=declared.metavar, help=text)
            yield parameter.replace(name=name, default=None, annotation=Annotated[declared.kind | None, option])


def _answer_flags(**values: Any) -> AnswerFlags:
    sampling = {name: values.pop(name) for name in SAMPLING}
    return AnswerFlags(**values, sampling={name: value for name, value in sampling.items() if value is not None})


def _with_flags(
    command: Callable[..., int], shared: list[inspect.Parameter], made: Callable[..., object]
) -> Callable[..., int]:
    signature = inspect.signature(command, eval_str=True)
    own = [parameter for name, parameter in signature.parameters.items() if name != "flags"]
    place = list(signature.parameters).index("flags")

    @functools.wraps(command)
    def with_flags(**values: Any) -> int:
        flags = made(**{parameter.name: values.pop(parameter.name) for parameter in shared})
        return command(flags=flags, **values)

    parameters = [*own[:place], *shared, *own[place:]]
    with_flags.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    with_flags.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return with_flags
