"""Sends HTTP range requests to untrusted servers and validates the responses strictly.

The user's token must only be sent to the Hub's own origin. Therefore, this module itself follows redirects, and drops
the caller's headers when a redirect leads to another scheme, host or port.

This module also describes models at plain URLs on any web server. The policies for retries and for the number of
parallel connections (`Patience` and `Growth`) use neither a clock nor the network.
"""

from __future__ import annotations

import contextlib
import email.utils
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit

from msgspec import Struct

from llmrun.base.errors import IntegrityError, LlmrunError, ModelNotFound, NetworkError
from llmrun.hub.names import LOOPBACK, SHA256, Artifact, Expected, RemoteFile, UrlSource, shards_of
from llmrun.hub.remote.network_errors import ANSWER_SECONDS, plain, translated
from llmrun.hub.remote.repository import is_size

if TYPE_CHECKING:
    import httpx2

MOST_REDIRECTS = 10
MOST_WAIT_S = 300.0  # the longest Retry-After to honor
_EXPIRED = (401, 403, 404, 410)  # the status codes that servers send for expired signed URLs
# The patterns limit the number of digits because int() raises ValueError for very long numbers.
_SPAN = re.compile(r"bytes (\d{1,20})-(\d{1,20})/(\d{1,20}|\*)", re.ASCII)
_LENGTH = re.compile(r"\d{1,20}", re.ASCII)
_LONGEST_VALIDATOR = 256
_PORTS = {"http": 80, "https": 443}
# Without an accept-encoding header, proxies may compress the response.
_UNENCODED = {"accept-encoding": "identity"}
_RESUMES = "check the connection and run the command again; the download will resume"


class TryAgain(NetworkError):
    """A temporary failure. `after` is the server's Retry-After in seconds, or 0 if absent."""

    def __init__(self, message: str, *, hint: str = _RESUMES, after: float = 0.0) -> None:
        super().__init__(message, hint=hint)
        self.after = after


class AnotherFile(IntegrityError):
    """The response contains a different file, such as a proxy's error page. Earlier bytes may still be valid."""


class RangeResponse(Struct, frozen=True):
    """A validated response to a range request.

    whole      whether the server ignored the range and is sending the whole file
    validator  the server's identifier of this version of the file (an ETag or a date); "" if the server sends none
    pieces     an iterator over the bytes as they arrive; raises TryAgain if the connection breaks or times out
    """

    whole: bool
    validator: str
    pieces: Iterator[bytes]
    connection: socket.socket | None

    def hang_up(self) -> None:
        """Shut down the connection and wake the thread that reads `pieces`. This method is thread-safe."""
        if self.connection is not None:
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)


class Remote:
    """The remote location of one file, which several threads may use at the same time.

    `address` returns the initial URL and the headers for its origin. If the target of the redirect has expired,
    `address` is called again.
    """

    def __init__(self, file: RemoteFile, address: Callable[[], tuple[str, Mapping[str, str]]]) -> None:
        self.file = file
        self._address = address
        self._led_to: str | None = None  # the redirect target at another origin; the headers must not be sent to it

    @contextlib.contextmanager
    def open(self, start: int, end: int, validator: str) -> Iterator[RangeResponse]:
        """Request the bytes [start, end). If `validator` is not "", only that version of the file is accepted.

        Raises TryAgain for temporary failures, NetworkError or ModelNotFound for permanent ones, and AnotherFile if the
        response belongs to another file. After a TryAgain, raised by this method or in the `with` block, the next
        request starts at the initial URL again, which may redirect to a host that works.
        """
        try:
            with self._opened(start, end, validator) as answer:
                yield answer
        except TryAgain:
            self._led_to = None
            raise

    @contextlib.contextmanager
    def _opened(self, start: int, end: int, validator: str) -> Iterator[RangeResponse]:
        wanted = {"range": f"bytes={start}-{end - 1}"}
        if validator:
            wanted["if-range"] = validator
        response = self._ask(wanted)
        try:
            self._require_good(response)
            whole = self._is_whole_file(response, start, end)
            stream = response.extensions.get("network_stream")
            connection = stream.get_extra_info("socket") if stream else None
            yield RangeResponse(whole, validator_of(response.headers), self._pieces(response), connection)
        finally:
            with contextlib.suppress(Exception):  # closing a broken connection may fail, which does no harm
                response.close()

    def measure(self) -> int:
        """Return the file size in bytes. Raises the same errors as `open`, and NetworkError if the size is unknown."""
        response = self._ask({}, "HEAD")
        response.close()
        length = _parsed_size(response.headers.get("content-length", ""))
        if response.status_code == 200 and length is not None:
            return length
        if response.status_code not in (200, 405, 501):  # many signed URLs allow only GET
            self._require_good(response)
        response = self._ask({"range": "bytes=0-0"})
        response.close()
        self._require_good(response)
        span = _SPAN.fullmatch(response.headers.get("content-range", ""))
        told = _parsed_size(span[3] if span else response.headers.get("content-length", ""))
        if told is None:
            raise NetworkError("the server does not report the file size")
        return told

    # --- requests -----------------------------------------------------------------------------------------------------

    def _ask(self, wanted: Mapping[str, str], method: str = "GET") -> httpx2.Response:
        led_to = self._led_to
        if led_to is not None:
            response = self._send(method, led_to, wanted)
            if response.status_code not in _EXPIRED and not response.has_redirect_location:
                return response
            response.close()
            self._led_to = None
        return self._follow(method, wanted)

    def _follow(self, method: str, wanted: Mapping[str, str]) -> httpx2.Response:
        """Send the request to the initial URL and follow its redirects."""
        first, headers = self._address()
        url = first
        for _ in range(MOST_REDIRECTS):
            at_home = _origin(url) == _origin(first)
            response = self._send(method, url, {**(headers if at_home else {}), **wanted})
            if at_home:
                self._require_same_file(response)
            if not response.has_redirect_location:
                self._led_to = None if at_home else url
                return response
            response.close()
            url = _next_address(url, response.headers["location"])
        raise NetworkError(f"more than {MOST_REDIRECTS} redirects", hint="check the address and the proxy settings")

    def _send(self, method: str, url: str, headers: Mapping[str, str]) -> httpx2.Response:
        with _transient(), translated():
            import httpx2
            from huggingface_hub import constants
            from huggingface_hub.utils import get_session  # type: ignore[attr-defined]  # documented but not exported

            client = get_session()
            limits = httpx2.Timeout(constants.HF_HUB_DOWNLOAD_TIMEOUT, connect=ANSWER_SECONDS)
            request = client.build_request(method, url, headers={**headers, **_UNENCODED}, timeout=limits)
            return client.send(request, stream=True, follow_redirects=False)

    def _pieces(self, response: httpx2.Response) -> Iterator[bytes]:
        with _transient(), translated():
            yield from response.iter_raw()

    # --- validation of responses --------------------------------------------------------------------------------------

    def _require_same_file(self, response: httpx2.Response) -> None:
        """Raise AnotherFile if the response has an unexpected sha256. Only the Hub's responses contain a sha256."""
        told = response.headers.get("x-linked-etag", "").strip('"')
        if self.file.sha256 and SHA256.fullmatch(told) and told != self.file.sha256:
            response.close()
            raise AnotherFile(f"the file on the server has changed: sha256 {told}, expected {self.file.sha256}")

    def _require_good(self, response: httpx2.Response) -> None:
        status = response.status_code
        if status in (200, 206):
            return
        if status == 416:
            raise AnotherFile(f"the server's file is too short: expected {self.file.size:,} bytes (HTTP 416)")
        if status in (408, 425, 429) or status >= 500:
            after = _seconds(response.headers.get("retry-after", ""))
            if after > MOST_WAIT_S:
                raise NetworkError(
                    f"refused (HTTP {status})", hint=f"try again in {after:,.0f} s, as the server requested"
                )
            words = "too many requests" if status == 429 else "server error"
            raise TryAgain(f"{words} (HTTP {status})", after=after)
        raise _refusal(status, response.headers.get("x-error-code", ""))

    def _is_whole_file(self, response: httpx2.Response, start: int, end: int) -> bool:
        """Return True for the whole file and False for the requested range. Raises an error for all other responses."""
        coding = response.headers.get("content-encoding", "identity")
        if coding != "identity":
            raise NetworkError(
                f"the server sent {plain(coding)} instead of the plain file", hint="check the proxy settings"
            )
        length = response.headers.get("content-length")
        if response.status_code == 200:
            if length is not None and length != str(self.file.size):
                raise AnotherFile(f"the server's file is {plain(length)} bytes, expected {self.file.size:,}")
            return True
        told = response.headers.get("content-range", "")
        span = _SPAN.fullmatch(told)
        if span and span[3] not in ("*", str(self.file.size)):
            raise AnotherFile(f"the server's file is {int(span[3]):,} bytes, expected {self.file.size:,}")
        if not span or (int(span[1]), int(span[2])) != (start, end - 1):
            raise TryAgain(f"requested bytes {start}-{end - 1}, but the server sent {plain(told) or 'others'}")
        return False


def _parsed_size(text: str) -> int | None:
    """Parse a size sent by a server. Returns None for missing sizes and for sizes that are implausible for a model."""
    size = int(text) if _LENGTH.fullmatch(text) else None
    return size if is_size(size) else None


def validator_of(headers: Mapping[str, str]) -> str:
    """Return the value for an If-Range header: a strong ETag, else a Last-Modified date, else ""."""
    etag = headers.get("etag", "")
    found = etag if re.fullmatch(r'"[^"]*"', etag) else headers.get("last-modified", "")
    return found if found.isascii() and found.isprintable() and len(found) <= _LONGEST_VALIDATOR else ""


@contextlib.contextmanager
def _transient() -> Iterator[None]:
    """Convert temporary network errors to TryAgain. Permanent errors, such as invalid settings, propagate unchanged."""
    import httpx2

    try:
        yield
    except LlmrunError as error:
        cause = error.__cause__
        passing = isinstance(cause, httpx2.TimeoutException | httpx2.NetworkError | httpx2.ProtocolError)
        if passing and "CERTIFICATE_VERIFY_FAILED" not in str(cause):
            raise TryAgain(str(error)) from cause
        raise


def _refusal(status: int, code: str) -> LlmrunError:
    if status == 404:
        return ModelNotFound(f"no such file (HTTP {status})")
    login = "accept the model's licence on its Hub page if it has one, then run `hf auth login`"
    words = {401: "not authorised", 403: "access denied"}
    reason = "the repository is gated" if code == "GatedRepo" else words.get(status, "refused")
    return NetworkError(f"{reason} (HTTP {status})", hint=login if status in (401, 403) else "")


def _next_address(url: str, location: str) -> str:
    """Return the target of a redirect. Raises NetworkError if the redirect must not be followed."""
    try:
        target = urljoin(url, location)
        split = urlsplit(target)
        downgrade = split.scheme == "http" and urlsplit(url).scheme == "https"
        plain_host = (split.hostname or "").isprintable()  # a host name appears in error messages
        if split.scheme not in _PORTS or not split.hostname or split.username is not None or not plain_host:
            raise ValueError("not a valid URL")
        if downgrade and not LOOPBACK.fullmatch(split.hostname):
            raise ValueError("redirects from https to http are not allowed")
        _origin(target)
    except ValueError as error:
        where = plain(location.partition("?")[0])  # the query is omitted because it may contain a signature
        raise NetworkError(f"refused a redirect to {where}: {plain(error)}") from error
    return target


def _origin(url: str) -> tuple[str, str | None, int | None]:
    """Return the origin of a URL as (scheme, host, port). Raises ValueError for a malformed port."""
    split: SplitResult = urlsplit(url)
    return split.scheme, split.hostname, split.port or _PORTS.get(split.scheme)


def _seconds(retry_after: str) -> float:
    """Convert a Retry-After header, which is a number or a date, to seconds from now. Returns 0.0 for other values."""
    if retry_after.isdecimal():
        return float(retry_after[:9])
    try:
        return max(0.0, email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time())
    except (ValueError, OverflowError, OSError):
        return 0.0


def pin(source: UrlSource, expected: tuple[Expected, ...], *, name: str) -> Artifact:
    """Return the files that are available at the URL now, with the sizes that the server reports.

    Web servers do not publish digests, so a sha256 is known only if `expected` contains it. Raises IntegrityError for
    unexpected sizes, and NetworkError or ModelNotFound if the request fails.
    """
    known = expected or tuple(Expected(shard) for shard in shards_of(file_name(source)))
    files = []
    for wanted in known:
        unmeasured = RemoteFile(wanted.file, 0, wanted.sha256)
        size = remote_file(source, unmeasured).measure()
        if wanted.size not in (None, size):
            raise IntegrityError(f"{wanted.file}: the server's file is {size:,} bytes, expected {wanted.size:,}")
        files.append(RemoteFile(wanted.file, size, wanted.sha256))
    return Artifact(name, source, tuple(files))


def file_name(source: UrlSource) -> str:
    """Return the file name at the end of the URL, percent-decoded."""
    return unquote(urlsplit(source.url).path.rpartition("/")[2])


def remote_file(source: UrlSource, file: RemoteFile) -> Remote:
    """Return a remote for the file at the URL or for another shard in the same folder."""

    def address() -> tuple[str, Mapping[str, str]]:
        split = urlsplit(source.url)
        folder = split.path.rpartition("/")[0]
        path = split.path if file.path == file_name(source) else f"{folder}/{quote(file.path)}"
        return split._replace(path=path).geturl(), {}

    return Remote(file, address)


TRIES = 6  # the maximum of attempts without a single byte; users should not wait long for a dead server
# The consecutive attempts without progress once bytes have arrived take at least 84 s, enough for a router restart.
TRIES_ON_THE_WAY = 16
PROGRESS = 64 << 10  # bytes that must arrive to reset the failure count
FIRST_WAIT_S = 0.2
LONGEST_WAIT_S = 8.0

MOST_CONNECTIONS = 8
PROBE_S = 1.0  # duration of each speed measurement
GAIN = 1.3  # the minimum speedup that justifies doubling the number of connections
WORTH_S = 3.0  # the speed is not measured again if the download will finish in fewer seconds


class Patience:
    """A counter of consecutive failures, which is reset when enough new bytes arrive."""

    def __init__(self, file: str, size: int, received: int) -> None:
        self._file, self._size = file, size
        self._farthest = received
        self._failures = 0
        self._tries = TRIES

    def wait_after(self, trouble: TryAgain, received: int) -> float:
        """Return the delay in seconds before the next attempt. Raises NetworkError after the last attempt."""
        if received >= self._farthest + PROGRESS:
            self._farthest, self._failures, self._tries = received, 0, TRIES_ON_THE_WAY
        self._failures += 1
        if self._failures >= self._tries:
            count = f"gave up after {self._tries} tries, with {received:,} of {self._size:,} bytes received"
            raise NetworkError(f"{self._file}: {trouble}: {count}", hint=trouble.hint) from trouble
        return max(trouble.after, min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** (self._failures - 1)))


class Growth:
    """A controller for the number of parallel connections of a download.

    A download starts with one connection, and the number is doubled as long as that measurably increases the speed.
    Some servers and networks limit the speed of each connection, but most do not.
    """

    def __init__(self, now: float, received: int) -> None:
        self._since, self._from = now, received
        self._rate = 0.0  # bytes per second, measured with half as many connections
        self._settled = False

    def advise(self, now: float, received: int, missing: int, connections: int) -> int:
        """Return the number of connections to use from now on.

        now          seconds, on the same clock as the constructor's `now`
        received     bytes received so far
        missing      bytes not received yet
        connections  the number of connections since the last call
        """
        if self._settled or now - self._since < PROBE_S:
            return connections
        rate = (received - self._from) / (now - self._since)
        if rate <= 0.0:  # the speed of a stalled download does not depend on the number of connections
            self._since = now
            return connections
        if rate < GAIN * self._rate:
            self._settled = True
            return connections // 2
        if connections >= MOST_CONNECTIONS or missing < WORTH_S * rate:
            self._settled = True
            return connections
        self._since, self._from, self._rate = now, received, rate
        return min(connections * 2, MOST_CONNECTIONS)
