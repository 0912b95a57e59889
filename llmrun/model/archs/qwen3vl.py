"""The `qwen3vl` architecture: like qwen3, with M-RoPE and deepstack.

With deepstack, the rows of images have one part for the embeddings and one for each of the first layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.model.archs import qwen3
from llmrun.model.archs.parts.architecture import Architecture, layers_of
from llmrun.model.archs.parts.keys import Keys

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.archs.parts.architecture import Hyperparameters
    from llmrun.model.plan.plan import Plan


def read_config(file: GGUFFile) -> Hyperparameters:
    return qwen3.read_config(file).with_sections_of(Keys(file))


def plan(file: GGUFFile, config: Hyperparameters) -> Plan:
    return qwen3.plan(file, config, deepstack_of(Keys(file)))


def deepstack_of(keys: Keys) -> int:
    """Return the number of layers to whose output a part of each row of an image is added."""
    return keys.integer("n_deepstack_layers", 0, minimum=0, maximum=layers_of(keys))


ARCHITECTURE = Architecture("qwen3vl", read_config, plan, models="Qwen3-VL, dense")
