"""Redirects kernel warnings to a callback."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from llmrun.base.errors import KernelWarning


@contextmanager
def kernel_warnings_told(tell: Callable[[str], None]) -> Iterator[None]:
    """Inside the `with` block, call `tell` once per distinct KernelWarning message. Show other warnings as usual."""
    with warnings.catch_warnings():
        warnings.simplefilter("once", KernelWarning)
        show = warnings.showwarning

        def told(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if issubclass(category, KernelWarning):
                tell(str(message))
            else:
                show(message, category, filename, lineno, file, line)

        warnings.showwarning = told
        yield
