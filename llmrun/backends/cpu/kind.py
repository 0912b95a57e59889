"""The registry entry of the CPU engine. The engine itself is imported only when a model is opened."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.backends.registry import ImageCosts, Probe

if TYPE_CHECKING:
    from llmrun.backends.base import Backend, OpenOptions
    from llmrun.backends.cpu.speeds.forecast import Forecast
    from llmrun.backends.cpu.speeds.machine import Speeds
    from llmrun.backends.registry import BackendKind
    from llmrun.backends.sizing import Footprint
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.vision.projector import ProjectorFile


class CpuKind:
    """The BackendKind of our own engine."""

    gpus = None

    def probe(self) -> Probe:
        return Probe()

    def open(self, file: GGUFFile, options: OpenOptions) -> Backend:
        from llmrun.backends.cpu.early_memory import early_memory

        early = early_memory(file.tensors, options.reserved_memory)
        try:
            from llmrun.backends.cpu.backend import CpuBackend

            return CpuBackend(file, options, early)
        finally:
            if early is not None:
                early.stop()

    def footprint(self, file: GGUFFile, options: OpenOptions) -> Footprint:
        from llmrun.backends.cpu.adapters import adapted
        from llmrun.backends.cpu.cache_size import footprint_on_cpu, kv_type_of, rows_of_step
        from llmrun.backends.cpu.vision_costs import EncoderMemory
        from llmrun.backends.encoders import check_plan, opened_projector
        from llmrun.backends.lora_files import opened_adapters
        from llmrun.backends.sizing import LARGEST_DEFAULT
        from llmrun.base.machine.cpu_count import default_threads
        from llmrun.model.archs.parts.architecture import draft_plan_of_header, plan_of_header
        from llmrun.model.tokenizers.kinds import tokenizer_kernels

        tokenizer_kernels(file)  # raises an error if the vocabulary is not supported
        with opened_adapters(options.adapters, file) as adapters:
            plan = adapted(plan_of_header(file), adapters)
        projector, encoder, n_threads = opened_projector(options, file), None, options.threads or default_threads()
        if projector is not None:
            check_plan(plan, projector, file)
            encoder = EncoderMemory.in_header(projector, n_threads)
        train_context = file.integer(f"{file.string('general.architecture')}.context_length")
        return footprint_on_cpu(
            file,
            plan,
            draft_plan_of_header(file) if options.draft_head else None,
            max_sequences=options.max_sequences,
            context_size=options.context_size or min(train_context, LARGEST_DEFAULT),
            kv_type=kv_type_of(file, options),
            max_rows=rows_of_step(plan, train_context, options.context_size, projector),
            encoder=encoder,
            n_threads=n_threads,
        )

    def forecast(self, file: GGUFFile, options: OpenOptions, speeds: Speeds, prompt: int) -> Forecast | None:
        from llmrun.backends.cpu.cache_size import MAX_ROWS, kv_type_of
        from llmrun.backends.cpu.speeds.forecast import forecast_on_cpu
        from llmrun.model.archs.parts.architecture import plan_of_header

        return forecast_on_cpu(
            plan_of_header(file),
            speeds,
            vocabulary_size=len(file.strings("tokenizer.ggml.tokens")),
            prompt=prompt,
            kv_type=kv_type_of(file, options),
            max_rows=MAX_ROWS,
        )

    def image_costs(self, file: GGUFFile, projector: ProjectorFile, threads: int, speeds: Speeds | None) -> ImageCosts:
        from llmrun.backends.cpu.vision_costs import EncoderMemory, EncoderTimes, encoder_of_header
        from llmrun.model.vision.layout import PHOTO

        encoder = encoder_of_header(file, projector)
        memory = EncoderMemory.of(file, encoder, threads)
        photo_s = None if speeds is None else EncoderTimes(encoder, speeds).layout(projector.layout(*PHOTO))
        return ImageCosts(memory.weights + memory.scratch, photo_s)


KIND: BackendKind = CpuKind()
