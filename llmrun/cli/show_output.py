"""Prints the output of `llmrun show`: the metadata in a GGUF header, in sections.

All text from a file passes through `visible_line` before it is printed.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llmrun.base.amounts import counted, format_bytes
from llmrun.base.errors import LlmrunError
from llmrun.base.types import Pooling, named_pooling
from llmrun.cli.console.output import aligned, beside, out
from llmrun.cli.console.terminal import room, visible_line
from llmrun.cli.vision_output import vision_as_json, vision_fields
from llmrun.formats.gguf.metadata import ADAPTER, StringArray, purpose_of
from llmrun.model.archs.parts.tensors import parameter_count, quantization
from llmrun.model.tokenizers.vocabulary import fill_tokens_of
from llmrun.options.sampling_params import SAMPLING, value_text

if TYPE_CHECKING:
    from llmrun.cli.vision_output import VisionFacts
    from llmrun.formats.gguf.metadata import Value
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.hub.catalog import CatalogEntry


TEMPLATE = "tokenizer.chat_template"
_TOKENS = "tokenizer.ggml.tokens"
_SAMPLING = "general.sampling."
_LONGEST = 200  # maximum number of characters to show per value
_FIRST = 5  # maximum number of array elements to show

# The most useful metadata keys of an architecture, with their labels.
_HYPERPARAMETERS = (
    ("block_count", "layers"),
    ("embedding_length", "width"),
    ("feed_forward_length", "feed-forward"),
    ("attention.head_count", "heads"),
    ("attention.head_count_kv", "KV heads"),
    ("expert_count", "experts"),
    ("expert_used_count", "experts used"),
    ("attention.sliding_window", "window"),
)
_SPECIAL = (("bos", "begin"), ("eos", "end"), ("eot", "end of turn"), ("unknown", "unknown"), ("padding", "padding"))

Fields = Sequence[tuple[str, str]]


def show_all(file: GGUFFile, name: str, entry: CatalogEntry | None, vision: VisionFacts | None) -> None:
    """Print the overview, in sections with one line per field."""
    for title, fields in _sections(file, name, entry):
        show_section(title, fields)
    if vision is not None:
        show_section("Vision", [*vision_fields(vision)])
    out.lines(["", "Tensors"], dim=True)
    out.lines(f"  {line}" for line in aligned(_types(file), (1, 2)))


def show_section(title: str, fields: Fields) -> None:
    """Print one section of an overview. The first section has no title."""
    out.lines(["", title] if title else [], dim=True)
    out.lines(f"  {line}" for line in _fitting(fields))


def _fitting(fields: Fields) -> Iterator[str]:
    """Yield a line for each field. Long values are wrapped, except paths and digests, which users may copy."""
    widest = max(len(label) for label, _ in fields)
    for label, value in fields:
        begin = f"{label:<{widest}}  "
        if label in ("path", "sha256"):
            yield begin + value
        else:
            yield from beside(begin, _cut(value), room(sys.stdout) - 2)


def _sections(file: GGUFFile, name: str, entry: CatalogEntry | None) -> Iterator[tuple[str, Fields]]:
    yield "", [("name", name), ("path", str(file.path)), ("size", f"{file.file_bytes:,} bytes")]
    yield "File" if purpose_of(file) else "Model", [*_purpose(file), *_model(file), *_catalogue(entry)]
    if file.has("tokenizer.ggml.model"):
        yield "Tokenizer", _tokenizer(file)
    sampling = dict(_sampling(file, entry))
    if sampling:
        yield "Sampling", [(key, value_text(value)) for key, value in sampling.items()]
    templates = _templates(file)
    if purpose_of(file):
        return
    yield (
        "Chat template",
        [
            field
            for key, text in templates.items()
            for field in (
                (key, f"{len(text):,} characters, {counted(text.count(chr(10)) + 1, 'line')}; --template prints it"),
                ("sha256", _digest(text)),
            )
        ]
        or [("", "none in the file")],
    )


def _model(file: GGUFFile) -> Iterator[tuple[str, str]]:
    architecture = _text(file, "general.architecture")
    for label, text in (("title", _text(file, "general.name")), ("architecture", architecture)):
        if text:
            yield label, text
    yield "parameters", f"{parameter_count(file):,}"
    yield "quantization", quantization(file)
    context = file.metadata.get(f"{architecture}.context_length")
    if isinstance(context, int):
        yield "context", f"{context:,} tokens"
    facts = [
        f"{file.metadata[key]} {word}"
        for ending, word in _HYPERPARAMETERS
        if isinstance(file.metadata.get(key := f"{architecture}.{ending}"), int)
    ]
    if facts:
        yield "shape", ", ".join(facts)
    if pooling := named_pooling(file.metadata, architecture):
        ranks = pooling is Pooling.RANK
        yield (
            "embeddings",
            "ranks documents (llmrun rerank)" if ranks else f"pooling {pooling.name.lower()} (llmrun embed)",
        )
    if file.metadata.get(f"{architecture}.nextn_predict_layers"):
        yield "draft head", _draft_head(file)
    for key, label in (("license", "licence"), ("license.link", "licence text"), ("description", "description")):
        if text := _text(file, f"general.{key}"):
            yield label, text


def _purpose(file: GGUFFile) -> Iterator[tuple[str, str]]:
    """Yield the purpose of a file that is not a model, and the details of an adapter."""
    purpose = purpose_of(file)
    if not purpose:
        return
    yield "kind", purpose
    if file.metadata.get("general.type") == ADAPTER:
        ranks = sorted({tensor.shape[0] for name, tensor in file.tensors.items() if name.endswith(".lora_b")})
        yield "changes", f"{len(file.tensors) // 2:,} tensors"
        yield "rank", ", ".join(map(str, ranks))
        if isinstance(alpha := file.metadata.get("adapter.lora.alpha"), float):
            yield "alpha", f"{alpha:g}"


def _draft_head(file: GGUFFile) -> str:
    """Describe how the CPU engine uses the layer for multi-token prediction, or why the engine does not use it."""
    from llmrun.model.archs.parts.architecture import draft_plan_of_header

    try:
        head = draft_plan_of_header(file)
    except LlmrunError as error:
        return f"not used: {error}"
    if head is None:
        return "not used: the CPU engine supports one layer of Qwen3.5, Qwen3-Next, GLM-4.5 and DeepSeek V3"
    return "used by the CPU engine, unless --speculate is off or names a draft model"


def _catalogue(entry: CatalogEntry | None) -> Iterator[tuple[str, str]]:
    if entry is not None:
        yield "catalogue", f"{entry.description} ({entry.license})"
        yield "available as", ", ".join(entry.quants)
        if entry.thinking:
            yield "thinking", f"between {entry.thinking[0]} and {entry.thinking[1]}"
        if entry.end_of_turn:
            yield "end of turn", " ".join(entry.end_of_turn)


def show_entry(entry: CatalogEntry, name: str) -> None:
    """Print what the catalogue knows about a model, whose header is not available."""
    fields = [("name", name)]
    if entry.parameters:
        fields.append(("parameters", f"{entry.parameters:,}"))
    if entry.context:
        fields.append(("context", f"{entry.context:,} tokens"))
    show_section("", [*fields, *_catalogue(entry)])
    if entry.sampling:
        show_section("Sampling", [(key, value_text(value)) for key, value in entry.sampling.items()])
    sizes = [
        (quant, f"{'~' if known.size is None else ''}{format_bytes(size)}")
        for quant, known in entry.quants.items()
        if (size := entry.size_of(quant))
    ]
    show_section("Sizes", sizes or [("", "unknown")])


def entry_as_json(entry: CatalogEntry, name: str) -> dict[str, Any]:
    """Return what the catalogue knows about a model as a JSON object, with None for what only the header says."""
    return {
        "name": name,
        "path": None,
        "bytes": None,
        "architecture": None,
        "parameters": entry.parameters,
        "context": entry.context,
        "sampling": dict(entry.sampling),
        "quantizations": {
            quant: {"bytes": entry.size_of(quant), "exact": known.size is not None}
            for quant, known in entry.quants.items()
        },
        "catalogue": _entry_as_json(entry),
    }


def _entry_as_json(entry: CatalogEntry | None) -> dict[str, str] | None:
    if entry is None:
        return None
    return {"name": entry.name, "description": entry.description, "license": entry.license}


def _tokenizer(file: GGUFFile) -> Fields:
    tokens = file.metadata.get(_TOKENS)
    words = [("kind", " ".join(filter(None, (_text(file, "tokenizer.ggml.model"), _text(file, "tokenizer.ggml.pre")))))]
    if isinstance(tokens, StringArray):
        words.append(("tokens", f"{len(tokens):,}"))
        for key, label in _SPECIAL:
            number = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
            if isinstance(number, int) and not isinstance(number, bool) and 0 <= number < len(tokens):
                words.append((label, f"{tokens[number]}  ({number})"))
        fill = fill_tokens_of(file)
        if fill is not None:
            shown = " ".join(tokens[number] for number in (fill.prefix, fill.suffix, fill.middle))
            words.append(("fill in the middle", shown))
    return words


def _sampling(file: GGUFFile, entry: CatalogEntry | None) -> Iterator[tuple[str, float | str]]:
    """Yield the sampling parameters in the catalogue, and then the file's parameters, which take precedence."""
    names = {parameter.gguf_key: name for name, parameter in SAMPLING.items()}
    yield from (entry.sampling if entry else {}).items()
    for key, value in file.metadata.items():
        if key.startswith(_SAMPLING) and isinstance(value, int | float | str) and not isinstance(value, bool):
            yield names.get(key) or key.removeprefix(_SAMPLING), value


def _templates(file: GGUFFile) -> dict[str, str]:
    """Return the chat templates by name. The main template is "default"; others have names such as "tool_use"."""
    return {
        key.removeprefix(f"{TEMPLATE}.").replace(TEMPLATE, "default"): value
        for key, value in file.metadata.items()
        if (key == TEMPLATE or key.startswith(f"{TEMPLATE}.")) and isinstance(value, str)
    }


def _types(file: GGUFFile) -> list[tuple[str, str, str]]:
    """Return rows of (tensor type, number of tensors, total size), with the largest total size first."""
    return [(kind, f"{count:,}", format_bytes(size)) for kind, (count, size) in _by_type(file).items()]


def _by_type(file: GGUFFile) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for tensor in file.tensors.values():
        count, size = found.get(tensor.type.name, (0, 0))
        found[tensor.type.name] = (count + 1, size + tensor.nbytes)
    return dict(sorted(found.items(), key=lambda item: -item[1][1]))


def metadata_lines(file: GGUFFile) -> list[str]:
    """Return a line for each metadata key, with its type and value. Truncate long values."""
    return aligned([(key, file.types[key], _value(value)) for key, value in file.metadata.items()])


def tensor_lines(file: GGUFFile) -> list[str]:
    """Return a line for each tensor, with its type, shape (row length first) and size in bytes."""
    rows = [
        (tensor.name, tensor.type.name, " x ".join(map(str, tensor.shape)), f"{tensor.nbytes:,}")
        for tensor in file.tensors.values()
    ]
    return aligned(rows, (3,)) if rows else []


def as_json(file: GGUFFile, name: str, entry: CatalogEntry | None, vision: VisionFacts | None) -> dict[str, Any]:
    """Return the overview as a JSON object. For arrays in the metadata, only the type and the length are included."""
    return {
        "name": name,
        "path": str(file.path),
        "bytes": file.file_bytes,
        "architecture": _text(file, "general.architecture"),
        "quantization": quantization(file),
        "parameters": parameter_count(file),
        "tensor_types": {kind: {"tensors": count, "bytes": size} for kind, (count, size) in _by_type(file).items()},
        "sampling": {name: _json_number(value) for name, value in _sampling(file, entry)},
        "templates": {
            key: {"characters": len(text), "sha256": _digest(text)} for key, text in _templates(file).items()
        },
        "catalogue": _entry_as_json(entry),
        "fills": file.has(_TOKENS) and fill_tokens_of(file) is not None,
        "vision": vision_as_json(vision),
        **metadata_as_json(file),
    }


def metadata_as_json(file: GGUFFile) -> dict[str, Any]:
    """Return the metadata as a JSON object.

    Arrays are replaced by their type and length. Numbers that JSON cannot represent become strings.
    """
    return {"metadata": {key: _json_value(value, file.types[key]) for key, value in file.metadata.items()}}


def tensors_as_json(file: GGUFFile) -> list[Mapping[str, Any]]:
    return [
        {
            "name": tensor.name,
            "type": tensor.type.name,
            "shape": tensor.shape,
            "offset": tensor.offset,
            "bytes": tensor.nbytes,
        }
        for tensor in file.tensors.values()
    ]


def _json_number(value: float | str) -> float | str:
    return value if isinstance(value, str) or math.isfinite(value) else str(value)


def _json_value(value: Value, kind: str) -> Any:
    if isinstance(value, float):
        return _json_number(value)
    return value if isinstance(value, bool | int | str) else {"type": kind, "length": len(value)}


def _value(value: Value) -> str:
    if isinstance(value, str):
        return visible_line(_cut(value))
    if isinstance(value, bool | int | float):
        return str(value)
    first = [repr(each) if isinstance(each, str) else str(each) for each in value[:_FIRST]]
    more = ", …" if len(value) > _FIRST else ""
    return f"{len(value):,}: {', '.join(first)}{more}"


def _cut(text: str) -> str:
    return text[:_LONGEST] + ("…" if len(text) > _LONGEST else "")


def _text(file: GGUFFile, key: str) -> str:
    value = file.metadata.get(key, "")
    return value if isinstance(value, str) else ""


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
