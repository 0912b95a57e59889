"""Memory that a process shares with its child process."""

from __future__ import annotations

import contextlib
import mmap
import os
import sys

PAGE = mmap.ALLOCATIONGRANULARITY


class SharedMemory:
    """An anonymous, growable file that a process and its child both map.

    The child passes `handle` to `attached`. The handle is an inherited file descriptor, or a name on Windows, where
    descriptors are not inherited. Only pages that have been written to take up memory.
    """

    def __init__(self, handle: str) -> None:
        self.handle = handle

    @classmethod
    def create(cls) -> SharedMemory:
        if sys.platform == "win32":
            import secrets  # Like tempfile below, this is imported late because the child does not need it.

            return cls(f"llmrun-{os.getpid()}-{secrets.token_hex(8)}")
        if hasattr(os, "memfd_create"):
            with contextlib.suppress(OSError):  # a sandbox may forbid the call
                return cls(str(os.memfd_create("llmrun")))
        import tempfile

        with tempfile.TemporaryFile() as file:
            return cls(str(os.dup(file.fileno())))

    @classmethod
    def attached(cls, handle: str) -> SharedMemory:
        """Open the memory that the parent created. The child process calls this."""
        return cls(handle)

    @property
    def inherited(self) -> tuple[int, ...]:
        """The file descriptors that the child must inherit."""
        return () if sys.platform == "win32" else (int(self.handle),)

    def map(self, n_bytes: int) -> mmap.mmap:
        """Map the first n bytes. A mapping stays valid when a longer one is created later."""
        if sys.platform == "win32":
            # A shared memory region cannot grow on Windows, so each length has its own region.
            return mmap.mmap(-1, n_bytes, tagname=f"{self.handle}-{n_bytes}")
        descriptor = int(self.handle)
        if os.fstat(descriptor).st_size < n_bytes:
            os.ftruncate(descriptor, n_bytes)
        return mmap.mmap(descriptor, n_bytes)

    def close(self) -> None:
        """Close the file. Existing mappings stay valid. This is idempotent."""
        if self.handle and sys.platform != "win32":
            os.close(int(self.handle))
        self.handle = ""


def rounded_to_pages(n_bytes: int) -> int:
    return -(-n_bytes // PAGE) * PAGE
