"""One connection to a server, and how whoever waits for it is called back.

httpx2 has no way to end a request from another thread. So the socket below it is remembered, and shut down: the thread
that reads from it wakes at once, wherever it is.
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
KEPT_S = 3.0  # an unused connection; uvicorn hangs up after 5


class Line:
    """A connection that is used for one request at a time, and kept open in between."""

    def __init__(self, headers: dict[str, str], tls: ssl.SSLContext, *, through_proxy: bool) -> None:
        """`through_proxy`: if the environment names one. Raises what httpx2 does about a proxy it cannot use."""
        import httpx2

        self.socket: socket.socket | None = None
        self.used = False
        self.client = httpx2.Client(
            headers=headers,
            verify=tls,
            trust_env=through_proxy,
            follow_redirects=False,  # the key is for this host alone
            timeout=httpx2.Timeout(None, connect=CONNECT_S, write=WRITE_S),  # what is read has a Call's deadlines
            limits=httpx2.Limits(max_connections=1, keepalive_expiry=KEPT_S),
        )

    def send(self, method: str, url: str, content: bytes | None, call: Call) -> httpx2.Response:
        """Begin a request. The response is still to be read, and to be closed."""

        def watch(event: str, facts: dict[str, Any]) -> None:
            if event.endswith((".connect_tcp.complete", ".start_tls.complete")):
                self.socket = facts["return_value"].get_extra_info("socket")
                call.take(self)

        call.take(self)
        headers = {} if content is None else {"content-type": "application/json"}
        request = self.client.build_request(method, url, content=content, headers=headers, extensions={"trace": watch})
        response = self.client.send(request, stream=True)
        self.used = True
        return response

    def hang_up(self) -> None:
        """End whatever waits for the other side, now."""
        if self.socket is not None:
            with contextlib.suppress(OSError):  # it is closed already
                # Not SSLSocket's own, which would let go of the TLS state under the thread that reads.
                socket.socket.shutdown(self.socket, socket.SHUT_RDWR)

    def close(self) -> None:
        self.client.close()


class Call:
    """One request on its way. `stop` may be called at any time, by any thread and by a signal handler.

    stopped  it is not wanted any more
    expired  what the other side had to do by its deadline, when it did not: "no answer within 600 s"
    """

    def __init__(self) -> None:
        self.stopped = False
        self.expired = ""
        self._line: Line | None = None
        self._deadline = (time.monotonic() + CONNECT_S, "")
        self._lock = threading.RLock()  # a signal handler may come while its own thread holds it

    def take(self, line: Line) -> None:
        """This line carries the call now."""
        with self._lock:
            self._line = line
            if self.stopped:
                line.hang_up()

    def let_go(self) -> None:
        """The call is over; its line may carry another one."""
        with self._lock:
            self._line = None

    def expect(self, what: str, seconds: float) -> None:
        """From now on, something has to come within `seconds`, or else `what` has happened."""
        self._deadline = (time.monotonic() + seconds, what)

    def stop(self) -> None:
        self.stopped = True
        self._hang_up()

    def expire_if_late(self, now: float) -> None:
        deadline, what = self._deadline
        if what and now > deadline and not self.expired:
            self.expired = what
            self._hang_up()

    def _hang_up(self) -> None:
        with self._lock:
            if self._line is not None:
                self._line.hang_up()


class Watch:
    """Ends the calls whose deadline has passed: a thread that looks ten times a second while there are calls."""

    LOOKS_S = 0.1

    def __init__(self) -> None:
        self._calls: set[Call] = set()
        self._changed = threading.Condition()
        self._over = False
        self._thread: threading.Thread | None = None

    def add(self, call: Call) -> None:
        with self._changed:
            self._calls.add(call)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="llmrun-remote-watch", daemon=True)
                self._thread.start()
            self._changed.notify()

    def remove(self, call: Call) -> None:
        with self._changed:
            self._calls.discard(call)

    def close(self) -> None:
        """End the thread, and every call that is left."""
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
