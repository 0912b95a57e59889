#!/usr/bin/env python3
"""Compare the embeddings of llmrun and llama-server: their angle, and the tokens per second of each.

Both servers run side by side, and take turns with requests for 32 texts of different lengths. The result is the median
ratio of their times, with the range of the ratios, and the least cosine of two vectors of the same text.

Example:
    scripts/measure_embeddings.py model.gguf --llama-server path/to/llama-server --rounds 10
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

BATCH = 32
START_S = 300.0
WORDS = ["the", "sky", "is", "blue", "and", "why", "does", "a", "quick", "brown", "fox", "jump", "over", "lazy", "dogs"]


def main() -> int:
    arguments = _arguments()
    texts = _texts(arguments.words)
    ours = [sys.executable, "-m", "llmrun", "serve", str(arguments.model), "--backend", "cpu"]
    theirs = [arguments.llama_server, "-m", str(arguments.model), "--embedding", "-b", "8192", "-ub", "8192"]
    theirs += ["-c", "32768", "-np", str(BATCH), "--pooling", arguments.pooling, "--no-webui"]
    if arguments.threads:
        ours += ["--threads", arguments.threads]
        theirs += ["-t", arguments.threads]
    with _served(ours) as our_url, _served(theirs) as their_url:
        our_vectors, tokens, _ = _asked(our_url, texts)
        their_vectors, _, _ = _asked(their_url, texts)
        cosines = (our_vectors * their_vectors).sum(1)
        times = [[_asked(url, texts)[2] for url in (our_url, their_url)] for _ in range(arguments.rounds)]
    ratios = sorted(theirs / ours for ours, theirs in times)
    for name, column in (("llmrun", 0), ("llama-server", 1)):
        print(f"{name:14}{tokens / statistics.median(row[column] for row in times):10,.0f} tokens/s")
    print(f"{'ratio':14}{statistics.median(ratios):10.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
    print(f"{'least cosine':14}{cosines.min():10.6f}")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--llama-server", required=True)
    parser.add_argument("--pooling", default="cls", help="the model's own, which llmrun reads from the file")
    parser.add_argument("--words", type=int, default=100, help="the most words of a text")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", help="threads of each server")
    return parser.parse_args()


def _texts(most: int) -> list[str]:
    source = random.Random(1)
    return [" ".join(source.choices(WORDS, k=source.randint(most // 4, most))) for _ in range(BATCH)]


@contextlib.contextmanager
def _served(command: list[str]) -> Iterator[str]:
    """Run a server until the block ends. Yields its URL once it is ready."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    process = subprocess.Popen([*command, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    try:
        while time.monotonic() < end and process.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health") as answer:
                if answer.status == 200:
                    break
            time.sleep(0.2)
        else:
            raise SystemExit(f"the server did not start: {' '.join(command)}")
        yield url
    finally:
        process.terminate()
        process.wait()


def _asked(url: str, texts: list[str]) -> tuple[NDArray[np.float32], int, float]:
    """Return the vectors of texts, the number of their tokens, and the time in seconds."""
    body = json.dumps({"input": texts}).encode()
    request = urllib.request.Request(f"{url}/v1/embeddings", body, {"content-type": "application/json"})
    started = time.perf_counter()
    with urllib.request.urlopen(request) as answer:
        found: dict[str, Any] = json.loads(answer.read())
    seconds = time.perf_counter() - started
    vectors = np.array([each["embedding"] for each in found["data"]], np.float32)
    return vectors, found["usage"]["prompt_tokens"], seconds


if __name__ == "__main__":
    sys.exit(main())
