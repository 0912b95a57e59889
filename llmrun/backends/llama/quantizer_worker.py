"""The child process that runs llama.cpp's quantizer: `python -m llmrun.backends.llama.quantizer_worker`.

llama.cpp can neither stop a quantization nor survive a failed assertion, so it runs in a separate process that the
parent can kill. The protocol is that of the model worker (messages.py), but with a single operation.
"""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmrun.backends.llama.messages import answer_line
from llmrun.backends.llama.worker import declarations, serve

if TYPE_CHECKING:
    from llmrun.backends.llama.imatrix_file import Imatrix

_ERROR = 4  # ggml log level
_TEXT_BYTES = 127  # the maximum length of a string in a metadata override
_TENSOR = re.compile(r"\[ *(\d+)/ *\d+\] ")
_REASON_PREFIX = "llama_model_quantize: failed to quantize: "


def main() -> None:
    serve(lambda answers, _, number, fields: _Quantizer(number, answers).quantize(**fields))


class _Quantizer:
    def __init__(self, number: int, answers: int) -> None:
        self._number, self._answers = number, answers
        self._pieces: list[str] = []
        self._errors: list[str] = []
        self._llama = declarations()
        # Keep a reference to the callback while llama.cpp may call it.
        self._log = self._llama.llama_log_callback(self._take_log)
        self._llama.llama_log_set(self._log, ctypes.c_void_p(0))
        self._llama.llama_backend_init()

    def quantize(
        self,
        path: str,
        out: str,
        file_type: int,
        threads: int,
        imatrix: str | None,
        output_type: int | None,
        embedding_type: int | None,
        pure: bool,
        allow_requantize: bool,
        only_copy: bool,
        dry_run: bool,
    ) -> dict[str, Any]:
        """Quantize a model, or only choose the types of its tensors. The progress is reported as the tensor's number.

        Returns llama.cpp's log, and the reason for a failure or "".
        """
        parameters = self._llama.llama_model_quantize_default_params()
        parameters.ftype, parameters.nthread = file_type, threads
        if output_type is not None:
            parameters.output_tensor_type = output_type
        if embedding_type is not None:
            parameters.token_embedding_type = embedding_type
        parameters.pure, parameters.allow_requantize = pure, allow_requantize
        parameters.only_copy, parameters.dry_run = only_copy, dry_run
        if imatrix is not None:
            from llmrun.backends.llama.imatrix_file import read_imatrix

            measured = read_imatrix(Path(imatrix))
            parameters.imatrix = self._imatrix(measured)
            parameters.kv_overrides = self._overrides(imatrix, measured)
        failed = self._llama.llama_model_quantize(os.fsencode(path), os.fsencode(out), ctypes.byref(parameters))
        reason = self._errors[-1].strip().removeprefix(_REASON_PREFIX) if self._errors else "no reason given"
        return {"failed": reason if failed else "", "log": "".join(self._pieces)}

    def _imatrix(self, measured: Imatrix) -> Any:
        llama, means = self._llama, measured.means()
        entries = (llama.llama_model_imatrix_data * (len(means) + 1))()  # an empty entry ends the array
        for entry, (name, values) in zip(entries, means.items(), strict=False):
            entry.name, entry.size = name.encode(errors="surrogateescape"), values.size
            entry.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        self._kept = means  # the entries contain pointers to these arrays
        return entries

    def _overrides(self, path: str, measured: Imatrix) -> Any:
        """Return the metadata with which llama-quantize records the imatrix, in the order of llama-quantize."""
        texts = {"file": path} | ({"dataset": measured.datasets[0]} if measured.datasets else {})
        numbers = {"entries_count": len(measured.entries)}
        if measured.chunks > 0:
            numbers["chunks_count"] = measured.chunks
        overrides = (self._llama.llama_model_kv_override * (len(texts) + len(numbers) + 1))()  # the last entry is empty
        for override, (name, value) in zip(overrides, [*texts.items(), *numbers.items()], strict=False):
            override.key = f"quantize.imatrix.{name}".encode()
            if isinstance(value, str):
                override.tag = self._llama.LLAMA_KV_OVERRIDE_TYPE_STR
                override.value.val_str = value.encode(errors="surrogateescape")[:_TEXT_BYTES]
            else:
                override.tag, override.value.val_i64 = self._llama.LLAMA_KV_OVERRIDE_TYPE_INT, value
        return overrides

    def _take_log(self, level: int, text: bytes, data: Any) -> None:
        line = text.decode(errors="replace")
        self._pieces.append(line)
        if level == _ERROR:
            os.write(2, text)  # The parent keeps the end of this stream, even if llama.cpp aborts now.
            if line.strip():
                self._errors.append(line)
        if begun := _TENSOR.match(line):
            os.write(self._answers, answer_line(self._number, {"progress": int(begun[1])}))


if __name__ == "__main__":
    main()
