"""Describes a batch, and decides whether its files can be used."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmrun.base.errors import UsageError
from llmrun.jobs.batching.files import stamp_of
from llmrun.jobs.batching.journal import journal_path
from llmrun.jobs.batching.lines import check_source
from llmrun.jobs.batching.requests import CallOptions


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch to run.

    source, output  the input and the output; the output must not be a link (see `resolved`)
    model         the name by which the user asked for the model, or "" if only servers know it
    mixed         accept workers whose answers may differ
    retry_errors  rerun the lines whose records are errors
    force         start again, and replace an output that exists
    """

    source: Path
    output: Path
    options: CallOptions
    model: str = ""
    mixed: bool = False
    retry_errors: bool = False
    force: bool = False

    def check_files(self) -> None:
        """Raise UsageError if the input cannot be read or the output cannot be written."""
        source, output, journal = self.source, self.output, journal_path(self.output)
        check_source(source, has_template=self.options.fill is not None)
        if not output.parent.is_dir():
            raise UsageError(f"{output}: the folder {output.parent} does not exist")
        for path in (output, journal):
            if path.exists() and path.samefile(source):
                raise UsageError(f"{path}: the output must not be the input")
        if output.exists() and not output.is_file():
            raise UsageError(f"{output}: not a file")
        if not os.path.lexists(journal):
            self.check_output(None)

    def check_output(self, header: Mapping[str, Any] | None) -> None:
        """Raise UsageError if there is an output that this run must not replace.

        header  the header of the run's journal, or None if there is none

        A run may replace the output that was there when it began with --force or --retry-errors.
        """
        if self.output.exists() and not (self.force or self.retry_errors or self.may_continue(header)):
            hint = "--retry-errors runs its errors again, --force replaces it"
            raise UsageError(f"{self.output}: the file exists", hint=hint)

    def may_continue(self, header: Mapping[str, Any] | None) -> bool:
        """Return whether the journal belongs to a run that may replace the existing output, if there is one."""
        return header is not None and header.get("replaces") == stamp_of(self.output)
