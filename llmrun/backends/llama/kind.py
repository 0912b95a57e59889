"""The registry entry of llama.cpp. The backend itself is imported only when a model is opened."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llmrun.backends.base import AUTO
from llmrun.backends.llama import probe as llama_probe
from llmrun.backends.registry import ImageCosts, NoRoomOnGpu, Probe

if TYPE_CHECKING:
    from llmrun.backends.base import Backend, OpenOptions, Progress
    from llmrun.backends.cpu.speeds.forecast import Forecast
    from llmrun.backends.cpu.speeds.machine import Speeds
    from llmrun.backends.registry import BackendKind, Gpus, GpuSupport
    from llmrun.backends.sizing import Footprint
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.vision.projector import ProjectorFile


class LlamaGpus:
    """The GpuSupport of llama.cpp."""

    def find(self, progress: Progress | None = None) -> Gpus:
        return llama_probe.gpus(progress)

    def memory(self, options: OpenOptions) -> Sequence[dict[str, Any]]:
        if not options.rpc:
            return llama_probe.usable_gpus()
        from llmrun.backends.llama.rpc_devices import devices_with

        return devices_with(options.rpc, anyway=options.rpc_anyway)

    def check_servers(self, options: OpenOptions) -> None:
        from llmrun.backends.llama.rpc_devices import check_servers

        check_servers(options.rpc, anyway=options.rpc_anyway)

    def layers(self, file: GGUFFile, options: OpenOptions, free: Sequence[int]) -> tuple[int, int]:
        from llmrun.backends.encoders import opened_projector
        from llmrun.backends.llama.placement import (
            beside_encoder,
            kv_type_of,
            layer_sizes,
            layers_that_fit,
            rows_at_once,
        )

        assert options.context_size is not None, "the context size must be known"
        tokens = options.context_size * options.max_sequences
        projector = opened_projector(options, file)
        rows = rows_at_once(projector)
        sizes = layer_sizes(file, tokens, kv_type_of(options), max_sequences=options.max_sequences, rows=rows)
        return layers_that_fit(sizes, beside_encoder(free, projector)) or layers_that_fit(sizes, free), len(
            sizes.layers
        ) + 1


class LlamaKind:
    """The BackendKind of llama.cpp."""

    gpus: GpuSupport = LlamaGpus()

    def probe(self) -> Probe:
        if llama_probe.is_installed():
            return Probe()
        from llmrun.backends.llama.build_command import install_command

        return Probe("llama.cpp is not installed", f"install it: {install_command()}")

    def open(self, file: GGUFFile, options: OpenOptions) -> Backend:
        if options.gpu_layers == AUTO and not options.rpc and not (found := self.gpus.find(options.progress)).names:
            raise NoRoomOnGpu(found.reason)
        from llmrun.backends.llama.backend import LlamaBackend

        return LlamaBackend(file, options)

    def footprint(self, file: GGUFFile, options: OpenOptions) -> Footprint:
        from llmrun.backends.encoders import opened_projector
        from llmrun.backends.llama.placement import cache_by_context, footprint_on_llama, kv_type_of, rows_at_once
        from llmrun.backends.lora_files import opened_adapters

        kv_type, projector = kv_type_of(options), opened_projector(options, file)
        rows = rows_at_once(projector)
        cache = cache_by_context(file, kv_type, max_sequences=options.max_sequences, rows=rows)
        with opened_adapters(options.adapters, file) as adapters:
            return footprint_on_llama(file, adapters, cache=cache, kv_type=kv_type, projector=projector)

    def forecast(self, file: GGUFFile, options: OpenOptions, speeds: Speeds, prompt: int) -> Forecast | None:
        return None

    def image_costs(self, file: GGUFFile, projector: ProjectorFile, threads: int, speeds: Speeds | None) -> ImageCosts:
        return ImageCosts(projector.memory_bytes)


KIND: BackendKind = LlamaKind()
