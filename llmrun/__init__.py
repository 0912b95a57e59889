"""llmrun runs quantized GGUF language models on your own machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmrun.engine.engine import Engine as Engine

__version__ = "0.1.0"
DISTRIBUTION = "llmrun-gguf"  # the package name for pip; "llmrun" on the package index is an unrelated project
__all__ = ["Engine", "__version__"]


def __getattr__(name: str) -> Any:
    # Import `Engine` lazily: it imports NumPy, which would slow down `llmrun --help`.
    if name == "Engine":
        from llmrun.engine.engine import Engine

        return Engine
    raise AttributeError(f"module 'llmrun' has no attribute {name!r}")
