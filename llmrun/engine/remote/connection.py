"""A connection to a server whose requests can be cancelled from other threads and can time out.

httpx2 cannot cancel a request from another thread. This module therefore keeps a reference to the underlying socket.
Shutting the socket down immediately wakes the thread that reads from it.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import ssl

    import httpx2

CONNECT_S = 10.0
WRITE_S = 60.0
KEPT_S = 3.0  # How long to keep an idle connection. uvicorn closes idle connections after 5 s.


class Line:
    """A connection that carries one request at a time and stays open between requests."""

    def __init__(self, headers: dict[str, str], tls: ssl.SSLContext, *, through_proxy: bool) -> None:
        """Create a connection, which is opened by the first request.

        If `through_proxy` is True, the connection uses the proxy from the environment, if one is set. Raises httpx2's
        errors if the proxy is invalid.
        """
        import httpx2

        self.socket: socket.socket | None = None
        self.used = False
        self.client = httpx2.Client(
            headers=headers,
            verify=tls,
            trust_env=through_proxy,
            follow_redirects=False,  # The key must not be sent to other hosts.
            timeout=httpx2.Timeout(None, connect=CONNECT_S, write=WRITE_S),  # Reading is limited by a Call's deadlines.
            limits=httpx2.Limits(max_connections=1, keepalive_expiry=KEPT_S),
        )

    def send(self, method: str, url: str, content: bytes | None, call: Call, last_event: str = "") -> httpx2.Response:
        """Send a request and return its response, which the caller must read and close.

        last_event  the ID of the event after which a stream continues; "" for a new one
        """

        def watch(event: str, facts: dict[str, Any]) -> None:
            if event.endswith((".connect_tcp.complete", ".start_tls.complete")):
                self.socket = facts["return_value"].get_extra_info("socket")
                call.take(self)

        call.take(self)
        headers = {} if content is None else {"content-type": "application/json"}
        if last_event:
            headers["last-event-id"] = last_event
        request = self.client.build_request(method, url, content=content, headers=headers, extensions={"trace": watch})
        response = self.client.send(request, stream=True)
        self.used = True
        return response

    def hang_up(self) -> None:
        """Shut the socket down, which immediately wakes the thread that is waiting for the server."""
        if self.socket is not None:
            with contextlib.suppress(OSError):  # The socket is already closed.
                # SSLSocket.shutdown would drop the TLS state that the reading thread still uses.
                socket.socket.shutdown(self.socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        self.client.close()


class Call:
    """A running request. `stop` may be called at any time from any thread or signal handler.

    stopped  True after `stop`
    expired  a description of the deadline that has passed, such as "no answer within 600 s"; empty if none has
    """

    def __init__(self) -> None:
        self.stopped = False
        self.expired = ""
        self._line: Line | None = None
        self._deadline = (time.monotonic() + CONNECT_S, "")
        self._lock = threading.RLock()  # reentrant, because a signal handler may interrupt the thread that holds it

    def take(self, line: Line) -> None:
        """Record the connection that now carries the call."""
        with self._lock:
            self._line = line
            if self.stopped:
                line.hang_up()

    def let_go(self) -> None:
        """Forget the connection after the call, so that the connection can carry another call."""
        with self._lock:
            self._line = None

    def expect(self, what: str, seconds: float) -> None:
        """Set the deadline to `seconds` from now. `what` describes the failure if the deadline passes."""
        self._deadline = (time.monotonic() + seconds, what)

    def stop(self) -> None:
        """Cancel the request and wake the thread that is waiting for it."""
        self.stopped = True
        self._hang_up()

    def expire_if_late(self, now: float) -> None:
        """End the request if its deadline has passed."""
        deadline, what = self._deadline
        if what and now > deadline and not self.expired:
            self.expired = what
            self._hang_up()

    def _hang_up(self) -> None:
        with self._lock:
            if self._line is not None:
                self._line.hang_up()


class Watch:
    """A thread that ends calls whose deadline has passed. It checks ten times a second while there are calls."""

    LOOKS_S = 0.1

    def __init__(self) -> None:
        self._calls: set[Call] = set()
        self._changed = threading.Condition()
        self._over = False
        self._thread: threading.Thread | None = None

    def add(self, call: Call) -> None:
        """Watch a call. The first call starts the thread."""
        with self._changed:
            self._calls.add(call)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="llmrun-remote-watch", daemon=True)
                self._thread.start()
            self._changed.notify()

    def remove(self, call: Call) -> None:
        """Stop watching a call."""
        with self._changed:
            self._calls.discard(call)

    def close(self) -> None:
        """Stop the thread and all remaining calls."""
        with self._changed:
            self._over = True
            for call in self._calls:
                call.stop()
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._calls and not self._over:
                    self._changed.wait()
                if self._over:
                    return
                now = time.monotonic()
                for call in self._calls:
                    call.expire_if_late(now)
            time.sleep(self.LOOKS_S)
