"""Whether a model that is about to be fetched could run on this machine: gigabytes would come for nothing otherwise."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.amounts import bytes_in_words
from llmrun.errors import DoesNotFit, LlmrunError
from llmrun.hub.model import Artifact, HubSource, PypiSource, Wanted

if TYPE_CHECKING:
    from llmrun.backends.fitting import Fit
    from llmrun.hub.catalog import CatalogEntry

_SURELY_FITS = 0.5  # of the memory: a file that is no larger fits, and its header need not be asked for


def require_memory(artifact: Artifact, wanted: Wanted) -> None:
    """Raise DoesNotFit, with the sum and the largest quantization that fits, for a model that is larger than all memory
    of this machine: what other programs hold now does not count. Its header is fetched for that, where it is close.

    Raises what `read_header` raises.
    """
    from llmrun.backends import free_memory

    memory = free_memory.whole_memory()
    if memory is None or artifact.size <= _SURELY_FITS * memory or isinstance(artifact.source, PypiSource):
        return
    from llmrun.backends.fitting import Resources, fit_of
    from llmrun.hub.headers import read_header

    gpus = Resources.of_this_machine().gpus
    with read_header(artifact) as file:
        found = fit_of(file, Resources(memory, gpus))
    if not found.fits:
        raise DoesNotFit(_sentence(artifact.name, found), hint=_choice(artifact, wanted, found.most_weights))


def smaller_choice(entry: CatalogEntry, most_bytes: int) -> str:
    """The name of the largest of the model's quantizations whose file takes no more; "" for none, or none known."""
    sizes = {quant.name: quant.estimated_size for quant in entry.quants.values()}
    return _largest({entry.name_with(name): size for name, size in sizes.items() if size is not None}, most_bytes)


def _sentence(name: str, found: Fit) -> str:
    assert found.memory is not None
    sizes = found.footprint
    needed, weights, cache, rest, memory = map(
        bytes_in_words,
        (
            found.needed,
            sizes.weights,
            found.context * sizes.kv_token,
            sizes.scratch + sizes.vocabulary,
            found.memory,
        ),
    )
    return (
        f"{name}: needs {needed} of memory: weights {weights}, a KV cache of {found.context:,} tokens {cache}, "
        f"scratch {rest}; this machine has {memory}"
    )


def _choice(artifact: Artifact, wanted: Wanted, most_bytes: int) -> str:
    smaller = (
        smaller_choice(wanted.entry, most_bytes) if wanted.entry is not None else _in_repository(artifact, most_bytes)
    )
    found = f"the largest that fits is {smaller}" if smaller else "no quantization of it fits: choose a smaller model"
    return f"{found}; `llmrun pull --anyway` fetches it nevertheless"


def _in_repository(artifact: Artifact, most_bytes: int) -> str:
    from llmrun.hub.offers import offers

    if not isinstance(artifact.source, HubSource):
        return ""
    try:
        repository = HubSource(artifact.source.repository, revision=artifact.source.revision)
        found = offers(Wanted(str(repository), (repository,)))
    except LlmrunError:  # that it does not fit is known, and is what the user must hear
        return ""
    return _largest({one.name: one.size for one in found}, most_bytes)


def _largest(sizes: dict[str, int], most_bytes: int) -> str:
    fitting = {name: size for name, size in sizes.items() if size <= most_bytes}
    return max(fitting, key=lambda name: fitting[name], default="")
