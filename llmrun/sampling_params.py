"""The sampling parameters. Settings, flags, validation and requests are all derived from the declarations in this file.

They are separate from types.py because every command reads the settings, but few commands need the other types.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple


class SamplingParameter(NamedTuple):
    """The declaration of one sampling parameter.

    The name of its field in SamplingParams is also the name of the setting (`LLMRUN_*`, config.toml, `/set`) and the
    key in models.toml.

    default   llmrun's default for models without a recommended value; its type is the type of the parameter
    flags     command-line flags; error messages use the first flag
    minimum, maximum  limits, both inclusive
    gguf_key  the metadata key that holds the model file's default; None if the GGUF format has no such key
    wire      the field names in a request to a server; () if no server supports the parameter
    openai    whether OpenAI's API has these fields; if not, they are omitted once a server has rejected them
    """

    default: int | float
    flags: tuple[str, ...]
    metavar: str
    help: str
    minimum: float
    maximum: float = math.inf
    gguf_key: str | None = None
    wire: tuple[str, ...] = ()
    openai: bool = False

    @property
    def kind(self) -> type[int] | type[float]:
        return type(self.default)


def _declared(parameter: SamplingParameter) -> Any:
    return field(default=parameter.default, metadata={"parameter": parameter})


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The parameters for choosing the next token. The defaults match llama.cpp's, and --help lists them in this order.

    The penalties apply to the last `repeat_last_n` tokens, including the prompt.
    """

    temperature: float = _declared(
        SamplingParameter(
            default=0.8,
            flags=("--temp", "--temperature"),
            metavar="T",
            help="Randomness; 0 always picks the most likely token.",
            minimum=0.0,
            maximum=100.0,
            gguf_key="general.sampling.temp",
            wire=("temperature",),
            openai=True,
        )
    )
    top_k: int = _declared(
        SamplingParameter(
            default=40,
            flags=("--top-k",),
            metavar="K",
            help="Keep only the K most likely tokens; 0 disables.",
            minimum=0,
            gguf_key="general.sampling.top_k",
            wire=("top_k",),
        )
    )
    top_p: float = _declared(
        SamplingParameter(
            default=0.95,
            flags=("--top-p",),
            metavar="P",
            help="Keep the most likely tokens that sum to P; 1 disables.",
            minimum=0.0,
            maximum=1.0,
            gguf_key="general.sampling.top_p",
            wire=("top_p",),
            openai=True,
        )
    )
    min_p: float = _declared(
        SamplingParameter(
            default=0.05,
            flags=("--min-p",),
            metavar="P",
            help="Drop tokens below P times the top probability; 0 disables.",
            minimum=0.0,
            maximum=1.0,
            gguf_key="general.sampling.min_p",
            wire=("min_p",),
        )
    )
    repeat_penalty: float = _declared(
        SamplingParameter(
            default=1.0,
            flags=("--repeat-penalty",),
            metavar="R",
            help="Penalty factor for recent tokens; 1 disables.",
            minimum=0.01,
            maximum=100.0,
            gguf_key="general.sampling.penalty_repeat",
            wire=("repeat_penalty", "repetition_penalty"),  # the names in llama.cpp and in vLLM
        )
    )
    presence_penalty: float = _declared(
        SamplingParameter(
            default=0.0,
            flags=("--presence-penalty",),
            metavar="R",
            help="Subtract R from the logits of recent tokens; 0 disables.",
            minimum=-100.0,
            maximum=100.0,
            wire=("presence_penalty",),
            openai=True,
        )
    )
    frequency_penalty: float = _declared(
        SamplingParameter(
            default=0.0,
            flags=("--frequency-penalty",),
            metavar="R",
            help="Subtract R for each recent occurrence; 0 disables.",
            minimum=-100.0,
            maximum=100.0,
            wire=("frequency_penalty",),
            openai=True,
        )
    )
    repeat_last_n: int = _declared(
        SamplingParameter(
            default=64,
            flags=("--repeat-last-n",),
            metavar="N",
            help="Number of recent tokens to penalize; -1 means all.",
            minimum=-1,
            gguf_key="general.sampling.penalty_last_n",
            wire=("repeat_last_n",),
        )
    )
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0


SAMPLING: Mapping[str, SamplingParameter] = {
    f.name: f.metadata["parameter"] for f in fields(SamplingParams) if "parameter" in f.metadata
}
