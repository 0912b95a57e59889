"""The plan of a draft head: the layer for multi-token prediction (MTP), called `nextn` in files.

Given the model's hidden state at one position and the next token, a head predicts the token after that token. A head
has its own layer and its own cache, and shares the embedding and output matrices with the model. The formula comes from
DeepSeek V3 (arXiv:2412.19437, section 2.2).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from llmrun.base.errors import ModelFileError
from llmrun.model.archs.parts.architecture import PlanWriter

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.archs.parts.architecture import Hyperparameters
    from llmrun.model.plan.plan import Plan
    from llmrun.model.plan.twin import Value

# Heads draft only the first tokens of large vocabularies, because the output matrix takes most of the time of a draft
# (FastMTP, arXiv:2509.18362). Qwen3.5 has 248,320 tokens, roughly in order of frequency. The table shows the share of a
# text's tokens below a bound (the texts in other languages are Vim's tutor):
#
#             English  Python  German  French  Chinese  Japanese  Russian
#    65,536      97 %    98 %    94 %    94 %     64 %      72 %     75 %
#    98,304     100 %   100 %   100 %    99 %     70 %      80 %     83 %
#   131,072     100 %   100 %   100 %   100 %     99 %      94 %     90 %
#
# Other tokens are never drafted. In Qwen3.5 2B (Q4_K_M, 2 threads), a draft took at least 10.7 ms with 65,536 tokens,
# 15.1 ms with 131,072 tokens and 29.7 ms with all tokens, and a step took 112 ms.
DRAFTED_TOKENS: Final = 131072

# A function that applies the head's layer to the given value. The layer's tensor names begin with the given block.
AddLayer = Callable[[PlanWriter, str, "Value"], None]


def draft_plan(file: GGUFFile, config: Hyperparameters, unused: int, add_layer: AddLayer) -> Plan | None:
    """Return the plan of the model's draft head, or None if the file contains no draft head.

    The tensors of the `unused` layers at the end may be missing, and models with several heads are not supported.
    Raises BadGGUF and UnsupportedModel for tensors that do not match the config. The model can still run without the
    draft head.
    """
    block = f"blk.{config.layers}"
    if unused != 1 or f"{block}.nextn.eh_proj.weight" not in file.tensors:
        return None
    try:
        return _plan(PlanWriter(file, config), config, block, add_layer)
    except ModelFileError as error:
        error.hint = "--speculate off runs the model without its draft head"
        raise


def _plan(w: PlanWriter, config: Hyperparameters, block: str, add_layer: AddLayer) -> Plan:
    token = w.rmsnorm(f"{block}.nextn.enorm", w.embed(name=_own(w, f"{block}.nextn.embed_tokens", "token_embd")))
    state = w.rmsnorm(f"{block}.nextn.hnorm", w.plan.take_hidden(config.width))
    x = w.linear(f"{block}.nextn.eh_proj", w.plan.concat(token, state), config.width)
    add_layer(w, block, x)
    norm = w.tensors.vector(f"{_own(w, f'{block}.nextn.shared_head_norm', 'output_norm')}.weight", x.width)
    w.plan.hidden = h = w.plan.rmsnorm_wanted(x, norm, w.epsilon)
    name = _own(w, f"{block}.nextn.shared_head_head", w.output_name)
    output = w.tensors.matrix(f"{name}.weight", x.width, config.vocabulary_size)
    w.plan.output(h, output, min(config.vocabulary_size, DRAFTED_TOKENS))
    w.tensors.finish(f"{block}.")
    return w.plan


def _own(w: PlanWriter, own: str, shared: str) -> str:
    """Return the name of the head's own tensor, or of the model's tensor if the head has no tensor of its own."""
    return own if f"{own}.weight" in w.tensors else shared
