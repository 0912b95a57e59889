"""The kernels that wheels contain: all kernels that do not depend on a shape, and attention for known shapes.

If Numba is installed, kernels that are not in this list are compiled on the user's machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from llmrun.backends.cpu.team import SPIN, START, WAIT, WORK
from llmrun.backends.cpu.timed_team import WORK_TIMED
from llmrun.base.compiled.host import IDENTIFY
from llmrun.base.compiled.kernel import TRIAL, KernelName
from llmrun.base.compiled.library import BASE, EXTENDS
from llmrun.base.compiled.sources import sources
from llmrun.formats.layouts.kv import parse_kv_type
from llmrun.formats.layouts.linear import PACKED_TYPES
from llmrun.hub.catalog import read_file, read_whole, shipped_catalog
from llmrun.model.plan.ops.activations import Activation

FLOAT_TYPES = ("f32", "f16", "bf16")
CACHES = ("f16", "q8_0", "q4_0", "q8_0:q4_0")

Shape = tuple[int, int, int, bool]  # (query heads per KV head, head size, value size, whether scores are capped)

# The shapes of the tiny models in tests/support/models.
_SHAPES_OF_TESTS: tuple[Shape, ...] = (
    (1, 16, 16, False),
    (1, 64, 32, False),
    (2, 16, 16, False),
    (2, 32, 32, False),
    (2, 32, 32, True),
    (2, 64, 64, False),
    (4, 64, 32, False),
)

# The shapes of image encoders, whose heads of 72 features are padded to 80. They use two types of caches.
_SHAPES_OF_ENCODERS: tuple[Shape, ...] = ((1, 64, 64, False), (1, 80, 80, False))
_CACHES_OF_ENCODERS = ("f16", "q8_0")

# Kernels that run before the level is known. They are compiled for the portable level.
BASE_KERNELS = (IDENTIFY, TRIAL)

# Kernels that do not depend on a shape.
SHAPELESS = (
    TRIAL,
    *(KernelName.of("linear.int8", "linear", weight=kind) for kind in PACKED_TYPES),
    *(KernelName.of("linear.floats", "linear", weight=kind) for kind in FLOAT_TYPES),
    *(KernelName.of("linear.adapters", name) for name in ("reduce", "look_up", "expand")),
    KernelName.of("linear.quantize", "quantize"),
    *(KernelName.of("linear.embed", "embed", weight=kind) for kind in (*PACKED_TYPES, *FLOAT_TYPES)),
    *(KernelName.of("packing.pack", "pack_integers", weight=kind) for kind in PACKED_TYPES),
    *(KernelName.of("packing.pack", "pack_floats", element_bytes=size) for size in (2, 4)),
    *(KernelName.of("experts.int8", "experts", weight=kind) for kind in PACKED_TYPES),
    *(KernelName.of("experts.floats", "experts", weight=kind) for kind in FLOAT_TYPES),
    *(KernelName.of("experts.routing", name) for name in ("route", "group")),
    *(KernelName.of("experts.rows", name) for name in ("bias", "combine")),
    *(KernelName.of("rows.norms", name) for name in ("rmsnorm", "layernorm")),
    *(KernelName.of("rows.rowwise", "gated", activation=activation.value) for activation in Activation),
    *(KernelName.of("rows.rowwise", name) for name in ("xielu", "clamp", "add", "soft_cap", "concat")),
    *(KernelName.of("rows.convolution", name) for name in ("keep", "convolve")),
    *(KernelName.of("rows.images", name) for name in ("place_images", "add_images")),
    *(KernelName.of("rows.lengths", name) for name in ("match_length", "cut_off")),
    KernelName.of("recurrent.convolution", "causal_convolution"),
    *(
        KernelName.of("recurrent.recurrences", name, vectors=vectors)
        for name in ("delta_rule", "ssd")
        for vectors in (1, 2, 4)
    ),
    KernelName.of("recurrent.recurrences", "selective_scan"),
    WORK,
    WORK_TIMED,
    START,
    WAIT,
    SPIN,
    *(KernelName.of(f"tokens.{model}_merge", "merge") for model in ("bpe", "spm")),
    KernelName.of("tokens.spm_merge", "find_joined"),
    KernelName.of("tokens.word_pieces", "encode"),
    *(KernelName.of("tokens.unigram", name) for name in ("normalize", "measure", "encode")),
    KernelName.of("tokens.token_table", "build"),
    *(KernelName.of("tokens.special_tokens", name) for name in ("build", "find")),
    KernelName.of("tokens.split", "split"),
    KernelName.of("sampling.chain", "sample"),
    *(KernelName.of("limits", name) for name in ("read", "multiply")),
)


def attention_kernels(shapes: Iterable[Shape], caches: Iterable[str] = CACHES) -> Iterator[KernelName]:
    """Yield the attention kernels for the given shapes and types of the KV cache, each kernel once."""
    named = (name for shape in shapes for cache in caches for name in _of_shape(*shape, cache))
    return iter(dict.fromkeys(named))


def _of_shape(group: int, head_size: int, value_size: int, capped: bool, cache: str) -> Iterator[KernelName]:
    keys, values = (kind.name for kind in parse_kv_type(cache))
    sizes = {"head_size": head_size, "value_size": value_size}
    function = "capped_attention" if capped else "attention"
    yield KernelName.of("attention.attention", function, **sizes, group=group, keys=keys, values=values)
    yield KernelName.of("attention.attention", "merge", value_size=value_size, values=values)
    yield KernelName.of("attention.rope", "rope_store", **sizes, keys=keys, values=values)
    yield KernelName.of("attention.rope", "rotate", head_size=head_size, keys=keys)


def takes_dots(name: KernelName) -> bool:
    """Return whether a kernel computes integer dot products (kernels/code/dots.py).

    Only these kernels differ between a level and the level that it extends (`EXTENDS`). Attention kernels compute such
    products only if the keys or the values have 8 bits.
    """
    caches = {value for parameter, value in name.parameters if parameter in ("keys", "values")}
    return "kernels.code.dots" in sources(name.module) and (not caches or "q8_0" in caches)


def kernels_of(library: str, shapes: Iterable[Shape]) -> list[KernelName]:
    """Return the kernels in the library of a level, or of BASE."""
    if library == BASE:
        return list(BASE_KERNELS)
    of_encoders = attention_kernels(_SHAPES_OF_ENCODERS, _CACHES_OF_ENCODERS)
    names = [*SHAPELESS, *dict.fromkeys([*attention_kernels(shapes), *of_encoders])]
    return [name for name in names if takes_dots(name)] if library in EXTENDS else names


def known_shapes() -> set[Shape]:
    """Return the shapes of the catalogue's models and of the tests' models."""
    entries = read_whole(read_file(shipped_catalog())).values()
    shapes = {head for entry in entries for head in entry.attention}
    catalogue = {(head.heads // head.kv_heads, head.head_size, head.value_size, head.capped) for head in shapes}
    return catalogue | set(_SHAPES_OF_TESTS)
