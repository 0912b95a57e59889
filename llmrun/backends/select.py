"""Chooses a backend for a model file and opens the file. Our strict GGUF reader validates every file first."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from llmrun.backends.base import AUTO, RPC_OFF
from llmrun.backends.lora_files import LoraOption
from llmrun.backends.registry import BACKENDS, CHOICES, NoRoomOnGpu, backend_named, stand_in_named
from llmrun.base.errors import UnsupportedModel, UsageError
from llmrun.formats.layouts.kv import KV_TYPE, parse_kv_type

if TYPE_CHECKING:
    from llmrun.backends.base import Backend, OpenOptions
    from llmrun.backends.registry import Entry
    from llmrun.formats.gguf.reader import GGUFFile


def open_backend(path: Path, options: OpenOptions) -> Backend:
    """Open a model file with the requested backend, or with the best backend if the options request "auto".

    "auto" uses the first backend that can run layers of the model on a GPU. If no backend can use a GPU, "auto" uses
    the first backend that supports the model. Software drivers count as GPUs only if the options request GPU layers.
    If RPC servers are given, the backend that can use RPC servers is chosen. Raises ModelFileError, UnsupportedModel,
    DoesNotFit, BackendCrashed, NetworkError and UsageError.
    """
    stand_in = stand_in_named(options.backend)
    if stand_in is not None:
        return stand_in.open(path, options)
    named = _named(options)
    from llmrun.formats.gguf.metadata import check_is_model
    from llmrun.formats.gguf.reader import open_gguf

    with open_gguf(path) as file:
        check_is_model(file)
        return _open_best(file, options) if named is None else _open_named(named, file, options)


def check_options(options: OpenOptions) -> None:
    """Check the options before the model is located, because locating a model may require a download.

    Raises UsageError for invalid options, and the errors of RPC servers that cannot be used.
    """
    for text in options.adapters:
        LoraOption.parse(text).check()
    if stand_in_named(options.backend) is None and _named(options) is not None and options.rpc:
        from llmrun.backends.llama.rpc_devices import check_servers

        check_servers(options.rpc, anyway=options.rpc_anyway)


def _named(options: OpenOptions) -> Entry | None:
    """Return the requested backend, or None for "auto". Raises UsageError for invalid options."""
    choices = ", ".join
    if options.backend not in CHOICES:
        raise UsageError(f"invalid value for --backend: '{options.backend}', choose from {choices(CHOICES)}")
    try:
        parse_kv_type(options.kv_type)
    except ValueError:
        raise UsageError(f"invalid value for --kv-type: '{options.kv_type}', choose from {KV_TYPE.words}") from None
    if options.main_gpu is not None and options.split_mode != "none":
        raise UsageError("--main-gpu: works only with --split-mode none", hint="add --split-mode none")
    if options.tensor_split and options.split_mode == "none":
        raise UsageError("--tensor-split: cannot be combined with --split-mode none, which uses a single device")
    if options.rpc:
        return _with_rpc(options)
    entry = backend_named(options.backend)
    if entry is not None and (probe := entry.kind().probe()).missing:
        raise UsageError(f"{probe.missing}: --backend {entry.name}", hint=probe.hint)
    return entry


def _with_rpc(options: OpenOptions) -> Entry:
    """Return the backend that uses RPC servers. Raises UsageError if the options request another backend."""
    if options.gpu_layers == 0:
        raise UsageError("--rpc: cannot be combined with --gpu-layers 0, which leaves no layers for the servers")
    entry = next(entry for entry in BACKENDS if entry.rpc)
    if options.backend not in (AUTO, entry.name):
        raise UsageError(
            f"--rpc: works only with --backend {entry.name}, not with {options.backend}",
            hint=f"use --backend {entry.name}, or --rpc {RPC_OFF}",
        )
    return entry


def _open_named(entry: Entry, file: GGUFFile, options: OpenOptions) -> Backend:
    """Open the model with this backend. Use only the CPU if `gpu_layers` is "auto" and no layer fits on a GPU.

    Raises NoRoomOnGpu if no layer fits on any RPC server, because the user requested the servers.
    """
    try:
        return entry.kind().open(file, options)
    except NoRoomOnGpu as refusal:
        if options.rpc:
            raise
        options.explain(f"not using GPUs: {refusal}")
    return entry.kind().open(file, options.without_gpus())


def _open_best(file: GGUFFile, options: OpenOptions) -> Backend:
    reason = "no GPU layers were requested"
    for entry in BACKENDS:
        kind = entry.kind()
        if options.gpu_layers == 0 or kind.gpus is None:
            continue
        found = kind.gpus.find(options.progress)
        reason = found.reason
        if found.are_software and options.gpu_layers == AUTO:
            reason = f"{' and '.join(found.names)} is not a GPU but a software driver"
        elif found.names:
            try:
                opened = kind.open(file, options)
            except (NoRoomOnGpu, UnsupportedModel) as refusal:
                reason = str(refusal)
            else:
                options.explain(f"auto chose {entry.name}: it can use {' and '.join(found.names)}")
                return opened
    return _open_without_gpus(file, options.without_gpus(), reason)


def _open_without_gpus(file: GGUFFile, options: OpenOptions, reason: str) -> Backend:
    refusal: UnsupportedModel | None = None
    for entry in BACKENDS:
        kind = entry.kind()
        probe = kind.probe()
        if probe.missing:
            if refusal is not None:
                hint = f"{entry.title} may support this model; {probe.hint}"
                refusal = UnsupportedModel(str(refusal), hint=hint)
            continue
        try:
            opened = kind.open(file, options)
        except UnsupportedModel as error:
            refusal, reason = error, str(error)
        else:
            options.explain(f"auto chose {entry.name}: {reason}")
            return opened
    assert refusal is not None, "at least the CPU engine is always installed"
    raise refusal
