"""Convert an AWQ or GPTQ checkpoint to a GGUF file.

FOLDER contains the files of a Hugging Face checkpoint: config.json, tokenizer.json and safetensors files. Llama,
Mistral, Qwen2 and Qwen3 models can be converted. The weights do not change: 4-bit weights become Q4_0 if all zero
points are 8, and Q5_0 otherwise. Checkpoints that are not quantized keep their F16, BF16 or F32 weights.

Examples:
    llmrun convert ./Qwen2.5-7B-Instruct-AWQ qwen2.5-7b.gguf
    llmrun convert ./Llama-2-7B-GPTQ llama2.gguf --json
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmrun.base.amounts import counted, format_bytes
from llmrun.base.machine import shell
from llmrun.cli.arguments import options
from llmrun.cli.arguments.options import apply_settings, check_gguf_name
from llmrun.cli.console.output import out

if TYPE_CHECKING:
    from llmrun.jobs.converting.convert import Conversion

LISTING = {"heading": "Make model files", "place": 132}


def command(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of the checkpoint.")],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="The .gguf file to write; must not exist.")],
    json_output: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    apply_settings({"quiet": quiet})
    check_gguf_name(output)

    from llmrun.jobs.batching.journal import check_absent
    from llmrun.jobs.converting.checkpoint import Checkpoint
    from llmrun.jobs.converting.convert import plan_conversion

    check_absent(output)
    with Checkpoint(folder) as checkpoint:
        conversion = plan_conversion(checkpoint)
        _write(conversion, output)
    for note in conversion.notes:
        out.note(note)
    if json_output:
        types = conversion.type_counts
        out.json({"path": str(output), "bytes": conversion.nbytes, "tensors": types, "notes": conversion.notes})
        return 0
    summary = ", ".join(f"{count} {name}" for name, count in conversion.type_counts.items())
    count = counted(len(conversion.tensors), "tensor")
    out.lines([f"{output}: {format_bytes(conversion.nbytes)}, {count}: {summary}"])
    out.note(f"to try it: {shell.words(['llmrun', 'chat', '-m', str(output)])}")
    return 0


def _write(conversion: Conversion, output: Path) -> None:
    from llmrun.cli.console.progress import HubReporter
    from llmrun.jobs.batching.journal import absent_file
    from llmrun.jobs.converting.convert import write_conversion

    reporter = HubReporter()
    with absent_file(output, conversion.nbytes) as file:
        write_conversion(conversion, file, output, lambda done, total: reporter.progress(output.name, done, total))
