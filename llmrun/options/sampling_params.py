"""The sampling parameters. Settings, flags, validation and requests are all derived from the declarations in this file.

The declarations are separate from types.py because every command reads the settings, but few need the other types.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from llmrun.base.sampling_texts import BREAKER_LIST, DEFAULT_BREAKERS, DEFAULT_SAMPLERS, SAMPLER_LIST, ListOfTexts


class SamplingParameter(NamedTuple):
    """The declaration of one sampling parameter.

    The name of the parameter's field in SamplingParams is also the name of the setting (`LLMRUN_*`, config.toml,
    `/set`) and the key in models.toml.

    default   llmrun's default for models without a recommended value; the parameter has the type of its default
    flags     the command-line flags; () for a flag with the parameter's name; error messages use the first flag
    minimum, maximum  limits of numbers, both inclusive
    as_minimum  another value that means the minimum, as in llama.cpp and vLLM
    texts     the notation for a list of strings, which servers receive as a JSON list; None for numbers
    gguf_key  the metadata key that holds the model file's default; None if the GGUF format has no such key
    wire      the field names in a request to a server; () for a field with the parameter's name
    openai    whether OpenAI's API defines the fields; other fields are omitted once a server has rejected them
    optional  whether `-v` and requests to servers leave the parameter out if it has llmrun's default
    """

    default: int | float | str
    metavar: str
    help: str
    flags: tuple[str, ...] = ()
    minimum: float = -math.inf
    maximum: float = math.inf
    as_minimum: float | None = None
    texts: ListOfTexts | None = None
    gguf_key: str | None = None
    wire: tuple[str, ...] = ()
    openai: bool = False
    optional: bool = False

    @property
    def kind(self) -> type[int] | type[float] | type[str]:
        return type(self.default)

    @property
    def shown_default(self) -> str:
        """The default as shown in help texts, with spaces after semicolons so that the line can break."""
        return value_text(self.default).replace(";", "; ")

    def wire_value(self, value: float | str) -> float | str | list[str]:
        """Return the JSON value of a parameter for a server."""
        return [*self.texts.parse(value)] if self.texts is not None and isinstance(value, str) else value


def value_text(value: float | str) -> str:
    """Return the value of a sampling parameter as text."""
    return value if isinstance(value, str) else f"{value:g}"


def _declared(default: float | str, **declaration: Any) -> Any:
    return field(default=default, metadata={"parameter": SamplingParameter(default, **declaration)})


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The parameters for choosing the next token, in the order of --help. The defaults match llama.cpp's.

    The penalties apply to the last `repeat_last_n` tokens, including the prompt.
    """

    temperature: float = _declared(
        default=0.8,
        flags=("--temp", "--temperature"),
        metavar="T",
        help="Randomness; 0 always picks the most likely token.",
        minimum=0.0,
        as_minimum=-1.0,
        maximum=100.0,
        gguf_key="general.sampling.temp",
        openai=True,
    )
    top_k: int = _declared(
        default=40,
        metavar="K",
        help="Keep only the K most likely tokens; 0 disables.",
        minimum=0,
        as_minimum=-1,
        gguf_key="general.sampling.top_k",
    )
    top_p: float = _declared(
        default=0.95,
        metavar="P",
        help="Keep the most likely tokens that sum to P; 1 disables.",
        minimum=0.0,
        maximum=1.0,
        gguf_key="general.sampling.top_p",
        openai=True,
    )
    min_p: float = _declared(
        default=0.05,
        metavar="P",
        help="Drop tokens below P times the top probability; 0 disables.",
        minimum=0.0,
        maximum=1.0,
        gguf_key="general.sampling.min_p",
    )
    repeat_penalty: float = _declared(
        default=1.0,
        metavar="R",
        help="Penalty factor for recent tokens; 1 disables.",
        minimum=0.01,
        maximum=100.0,
        gguf_key="general.sampling.penalty_repeat",
        wire=("repeat_penalty", "repetition_penalty"),  # the names in llama.cpp and in vLLM
    )
    presence_penalty: float = _declared(
        default=0.0,
        metavar="R",
        help="Subtract R from the logits of recent tokens; 0 disables.",
        minimum=-100.0,
        maximum=100.0,
        openai=True,
    )
    frequency_penalty: float = _declared(
        default=0.0,
        metavar="R",
        help="Subtract R for each recent occurrence; 0 disables.",
        minimum=-100.0,
        maximum=100.0,
        openai=True,
    )
    repeat_last_n: int = _declared(
        default=64,
        metavar="N",
        help="Number of recent tokens to penalize; -1 means all.",
        minimum=-1,
        gguf_key="general.sampling.penalty_last_n",
    )
    dry_multiplier: float = _declared(
        default=0.0,
        metavar="N",
        help="DRY penalty for continuing a repetition; 0 disables.",
        minimum=0.0,
        maximum=100.0,
        optional=True,
    )
    dry_base: float = _declared(
        default=1.75,
        metavar="N",
        help="Growth of the DRY penalty per repeated token.",
        minimum=1.0,
        maximum=100.0,
        optional=True,
    )
    dry_allowed_length: int = _declared(
        default=2,
        metavar="N",
        help="Length of repetitions without a DRY penalty, in tokens.",
        minimum=0,
        optional=True,
    )
    dry_penalty_last_n: int = _declared(
        default=64,
        metavar="N",
        help="Number of recent tokens DRY searches; -1 means all.",
        minimum=-1,
        optional=True,
    )
    dry_sequence_breakers: str = _declared(
        default=DEFAULT_BREAKERS,
        flags=("--dry-sequence-breaker", "--dry-sequence-breakers"),
        metavar="TEXT",
        help="Text that ends DRY repetitions, a JSON list, or none.",
        texts=BREAKER_LIST,
        optional=True,
    )
    top_n_sigma: float = _declared(
        default=-1.0,
        flags=("--top-n-sigma", "--top-nsigma"),
        metavar="N",
        help="Keep logits within N deviations of the top; -1 disables.",
        minimum=-1.0,
        maximum=1000.0,
        optional=True,
    )
    typical_p: float = _declared(
        default=1.0,
        flags=("--typical", "--typical-p"),
        metavar="P",
        help="Keep locally typical tokens that sum to P; 1 disables.",
        minimum=0.0,
        maximum=1.0,
        optional=True,
    )
    xtc_probability: float = _declared(
        default=0.0,
        metavar="P",
        help="Probability of excluding top choices; 0 disables XTC.",
        minimum=0.0,
        maximum=1.0,
        gguf_key="general.sampling.xtc_probability",
        optional=True,
    )
    xtc_threshold: float = _declared(
        default=0.1,
        metavar="P",
        help="Minimum probability of XTC's top choices; over 0.5 disables.",
        minimum=0.0,
        maximum=1.0,
        gguf_key="general.sampling.xtc_threshold",
        optional=True,
    )
    dynatemp_range: float = _declared(
        default=0.0,
        metavar="T",
        help="Vary the temperature by up to T with entropy; 0 disables.",
        minimum=0.0,
        maximum=100.0,
        optional=True,
    )
    dynatemp_exponent: float = _declared(
        default=1.0,
        flags=("--dynatemp-exp", "--dynatemp-exponent"),
        metavar="N",
        help="Exponent of the entropy in the dynamic temperature.",
        minimum=0.0,
        maximum=100.0,
        optional=True,
    )
    mirostat: int = _declared(
        default=0,
        metavar="N",
        help="Mirostat version, 1 or 2, in place of filters; 0 disables.",
        minimum=0,
        maximum=2,
        gguf_key="general.sampling.mirostat",
        optional=True,
    )
    mirostat_tau: float = _declared(
        default=5.0,
        flags=("--mirostat-ent", "--mirostat-tau"),
        metavar="N",
        help="Target surprise of Mirostat, in bits.",
        minimum=0.0,
        maximum=100.0,
        gguf_key="general.sampling.mirostat_tau",
        optional=True,
    )
    mirostat_eta: float = _declared(
        default=0.1,
        flags=("--mirostat-lr", "--mirostat-eta"),
        metavar="N",
        help="Learning rate of Mirostat.",
        minimum=0.0,
        maximum=1.0,
        gguf_key="general.sampling.mirostat_eta",
        optional=True,
    )
    adaptive_target: float = _declared(
        default=-1.0,
        metavar="P",
        help="Prefer tokens near probability P; -1 disables.",
        minimum=-1.0,
        maximum=1.0,
        optional=True,
    )
    adaptive_decay: float = _declared(
        default=0.9,
        metavar="N",
        help="Weight of earlier tokens in the adaptive target.",
        minimum=0.0,
        maximum=0.99,
        optional=True,
    )
    samplers: str = _declared(
        default=DEFAULT_SAMPLERS,
        metavar="NAMES",
        help="Samplers to apply, in order, separated by semicolons.",
        texts=SAMPLER_LIST,
        gguf_key="general.sampling.sequence",
        optional=True,
    )
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0


def _named(name: str, parameter: SamplingParameter) -> SamplingParameter:
    """Return a parameter with the flag and the request field that its name implies, unless others are declared."""
    flags = parameter.flags or ("--" + name.replace("_", "-"),)
    return parameter._replace(flags=flags, wire=parameter.wire or (name,))


SAMPLING: Mapping[str, SamplingParameter] = {
    f.name: _named(f.name, f.metadata["parameter"]) for f in fields(SamplingParams) if "parameter" in f.metadata
}
