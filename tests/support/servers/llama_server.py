"""llama-cpp-python's own server, an OpenAI-compatible server that we did not write."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def llama_server(model: Path) -> Iterator[int]:
    """Run the server and yield its port. Raises RuntimeError with its output if it does not start."""
    command = [sys.executable, "-m", "llama_cpp.server", "--model", str(model), "--n_ctx", "2048", "--n_threads", "1"]
    environment = {name: value for name, value in os.environ.items() if name not in ("HOST", "PORT", "CONFIG_FILE")}
    with subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", "0", "--verbose", "false", "--interrupt_requests", "false"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environment,
    ) as process:
        assert process.stderr is not None
        log = b""
        try:
            for line in process.stderr:
                log += line
                if found := re.search(rb"running on http://127\.0\.0\.1:(\d+)", line):
                    threading.Thread(target=process.stderr.read, daemon=True).start()  # a full pipe would block it
                    yield int(found[1])
                    return
            raise RuntimeError(f"llama_cpp.server did not start:\n{log.decode(errors='replace')}")
        finally:
            process.terminate()
            process.wait(timeout=30)
