"""Memory that two processes see: what one writes, the other reads, with nothing copied in between."""

from __future__ import annotations

import mmap
import os
import sys

PAGE = mmap.ALLOCATIONGRANULARITY


class SharedMemory:
    """A growing file without a name, mapped by its maker and by the child that inherits it.

    `handle` is what the child passes to `attached`: a file descriptor (to be inherited), or on Windows, which hands
    none on, a name. Only pages that are written to take memory.
    """

    def __init__(self, handle: str) -> None:
        self.handle = handle

    @classmethod
    def create(cls) -> SharedMemory:
        if sys.platform == "win32":
            import secrets  # not at the top, nor tempfile: the child, which starts by importing this, needs neither

            return cls(f"llmrun-{os.getpid()}-{secrets.token_hex(8)}")
        if hasattr(os, "memfd_create"):
            return cls(str(os.memfd_create("llmrun")))
        import tempfile

        with tempfile.TemporaryFile() as file:
            return cls(str(os.dup(file.fileno())))

    @classmethod
    def attached(cls, handle: str) -> SharedMemory:
        """In the child: the memory its parent made."""
        return cls(handle)

    @property
    def inherited(self) -> tuple[int, ...]:
        """File descriptors that the child must inherit."""
        return () if sys.platform == "win32" else (int(self.handle),)

    def map(self, n_bytes: int) -> mmap.mmap:
        """The first n bytes. A mapping stays valid when a longer one is asked for later."""
        if sys.platform == "win32":
            # A region of Windows never grows: each length is a region of its own.
            return mmap.mmap(-1, n_bytes, tagname=f"{self.handle}-{n_bytes}")
        descriptor = int(self.handle)
        if os.fstat(descriptor).st_size < n_bytes:
            os.ftruncate(descriptor, n_bytes)
        return mmap.mmap(descriptor, n_bytes)

    def close(self) -> None:
        """Let go of the file; what is mapped stays mapped. Idempotent."""
        if self.handle and sys.platform != "win32":
            os.close(int(self.handle))
        self.handle = ""


def rounded_to_pages(n_bytes: int) -> int:
    return -(-n_bytes // PAGE) * PAGE
