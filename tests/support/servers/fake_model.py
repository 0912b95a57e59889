"""A server that answers as a model would, with slots, a queue and 429s. Its text depends on the prompt."""

from __future__ import annotations

import hashlib
import json
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.support.servers.hostile_server import DONE, Asked, HangUp, event, response

_CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@dataclass
class FakeModel:
    """A script for `hostile_server.serving`. Every wait ends early if the client leaves.

    slots         the number of answers at a time
    prefill_s, step_s  seconds until the first token, and between two tokens
    most_waiting  a longer queue gets a 429
    retry_after   the header of a 429; None for none
    faults        called with the number of each completion; returns what goes wrong: "", "500", "die" or "silent die"
    rejects       fields that lead to a 400
    """

    slots: int = 4
    prefill_s: float = 0.004
    step_s: float = 0.001
    most_waiting: int = 10_000
    retry_after: str | None = "1"
    faults: Callable[[int], str] = lambda number: ""
    rejects: tuple[str, ...] = ()
    counts_tokens: bool = True
    running: int = 0
    waiting: int = 0
    most_running: int = 0
    completions: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._changed = threading.Condition()

    def __call__(self, asked: Asked, connection: socket.socket) -> None:
        if asked.method == "GET":
            connection.sendall(self._get(asked.path))
            raise HangUp
        body = asked.body
        refused = [name for name in self.rejects if name in body]
        if refused:
            said = json.dumps({"error": {"message": f"unknown field {refused[0]}"}}).encode()
            connection.sendall(response(said, status="400 Bad Request", kind="application/json"))
            return
        with self._changed:
            self.bodies.append(body)
            number, self.completions = self.completions, self.completions + 1
            if self.running >= self.slots and self.waiting >= self.most_waiting:
                headers = {} if self.retry_after is None else {"Retry_After": self.retry_after}
                said = b'{"error": {"message": "the queue is full"}}'
                connection.sendall(response(said, status="429 Too Many", kind="application/json", **headers))
                raise HangUp
        fault = self.faults(number)
        if fault == "500":
            said = b'{"error": {"message": "out of memory"}}'
            connection.sendall(response(said, status="500 Oops", kind="application/json"))
            raise HangUp
        if fault == "silent die":
            raise HangUp
        self._answer(body, connection, dies=fault == "die")
        raise HangUp

    def _answer(self, body: dict[str, Any], connection: socket.socket, *, dies: bool) -> None:
        with self._changed:
            self.waiting += 1
            while self.running >= self.slots:
                self._changed.wait(0.005)
                if self._is_gone(connection):
                    self.waiting -= 1
                    raise HangUp
            self.waiting -= 1
            self.running += 1
            self.most_running = max(self.most_running, self.running)
        try:
            self._wait(self.prefill_s, connection)
            words = self._words(body)
            if body.get("stream"):
                last = self._stream(words, connection, dies)
            else:
                for _ in words:
                    self._wait(self.step_s, connection)
                said = {"choices": [{"text": "".join(words), "finish_reason": "length"}]}
                last = response(json.dumps(said).encode(), kind="application/json")
        finally:
            with self._changed:
                self.running -= 1
                self._changed.notify_all()
        connection.sendall(last)  # A client that has seen the end may ask again at once, and then finds its slot free.

    def _stream(self, words: list[str], connection: socket.socket, dies: bool) -> bytes:
        """Send a stream except for its end, which is returned."""
        connection.sendall(_CHUNKED)
        for number, word in enumerate(words):
            if number:
                self._wait(self.step_s, connection)
            if dies and number == 1:
                raise HangUp
            connection.sendall(_chunk(event({"choices": [{"index": 0, "text": word, "finish_reason": None}]})))
        last = event({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
        if self.counts_tokens:
            usage = {"prompt_tokens": 7, "completion_tokens": len(words), "prompt_tokens_details": {"cached_tokens": 3}}
            last += event({"choices": [], "usage": usage})
        return _chunk(last + DONE) + b"0\r\n\r\n"

    def _words(self, body: dict[str, Any]) -> list[str]:
        seen = json.dumps([body["prompt"], body.get("temperature"), body.get("seed")]).encode()
        digest = hashlib.sha256(seen).hexdigest()
        return [f" {digest[number % 32 : number % 32 + 4]}" for number in range(body["max_tokens"])]

    def _wait(self, seconds: float, connection: socket.socket) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if self._is_gone(connection):
                raise HangUp
            time.sleep(min(left, 0.002))

    def _is_gone(self, connection: socket.socket) -> bool:
        try:
            return bool(select.select([connection], [], [], 0)[0]) and not connection.recv(1, socket.MSG_PEEK)
        except (OSError, ValueError):
            return True

    def _get(self, path: str) -> bytes:
        if path == "/v1/models":
            return response(b'{"data": [{"id": "tiny"}]}', kind="application/json")
        return response(b"", status="404 Not Found", kind="text/plain")


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)
