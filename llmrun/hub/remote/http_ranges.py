"""Ranges of a file from a server that is not trusted: who gets the token, what an answer must say to be believed.

The token goes to the Hub's own origin and nowhere else: redirects are followed here, one by one, and another scheme,
host or port gets none of the headers that came with the address.
"""

from __future__ import annotations

import contextlib
import email.utils
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, urljoin, urlsplit

from llmrun.errors import IntegrityError, LlmrunError, ModelNotFound, NetworkError
from llmrun.hub.names.hub_url import LOOPBACK
from llmrun.hub.names.model_sources import RemoteFile
from llmrun.hub.remote.network_errors import ANSWER_SECONDS, plain, translated
from llmrun.hub.remote.repository_listing import is_size

if TYPE_CHECKING:
    import httpx2

MOST_REDIRECTS = 10
MOST_WAIT_S = 300.0  # that a server may ask for
_EXPIRED = (401, 403, 404, 410)  # of an address that was good before
# Numbers of a sane length: Python refuses to read one of thousands of digits.
_SPAN = re.compile(r"bytes (\d{1,20})-(\d{1,20})/(\d{1,20}|\*)", re.ASCII)
_LENGTH = re.compile(r"\d{1,20}", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LONGEST_VALIDATOR = 256
_PORTS = {"http": 80, "https": 443}
# Without it a proxy may send other bytes than the file's.
_AS_IT_IS = {"accept-encoding": "identity"}
_GOES_ON = "check the connection and try again: the download goes on from where it is"


class TryAgain(NetworkError):
    """What may be over in a moment. `after`: seconds to wait, if the server named them."""

    def __init__(self, message: str, *, hint: str = _GOES_ON, after: float = 0.0) -> None:
        super().__init__(message, hint=hint)
        self.after = after


class AnotherFile(IntegrityError):
    """An answer that speaks of another file than the one wanted: a proxy's page, or a server's mistake. It says nothing
    of the bytes that came before."""


@dataclass(frozen=True)
class RangeResponse:
    """A server's answer that speaks of the right bytes.

    whole      the file from its beginning, whatever range was asked for
    validator  what the server calls this version of the file; "" when it does not say
    pieces     the bytes, as they come; raises TryAgain when the connection ends or is silent
    """

    whole: bool
    validator: str
    pieces: Iterator[bytes]
    connection: socket.socket | None

    def hang_up(self) -> None:
        """From any thread: whoever waits for the next piece gets the end."""
        if self.connection is not None:
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)


class Remote:
    """Where one file is. `address` gives the URL to ask first and the headers for its origin, and is asked again when
    the address that it led to has expired. For several threads at once."""

    def __init__(self, file: RemoteFile, address: Callable[[], tuple[str, Mapping[str, str]]]) -> None:
        self.file = file
        self._address = address
        self._led_to: str | None = None  # at another origin, without headers of the first

    @contextlib.contextmanager
    def open(self, start: int, end: int, validator: str) -> Iterator[RangeResponse]:
        """Ask for the bytes [start, end), of the version that `validator` names if it is not "".

        Raises TryAgain for what may pass, NetworkError or ModelNotFound for what will not, AnotherFile for an answer
        that speaks of another file. After a TryAgain, here or in the block, the next question goes to the first
        address: it may lead elsewhere, where this host is dead.
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
            whole = self._judge(response, start, end)
            stream = response.extensions.get("network_stream")
            connection = stream.get_extra_info("socket") if stream else None
            yield RangeResponse(whole, validator_of(response.headers), self._pieces(response), connection)
        finally:
            with contextlib.suppress(Exception):  # of a connection that is of no more use
                response.close()

    def measure(self) -> int:
        """The size of the file. Raises NetworkError for a server that does not tell it, and what `open` raises."""
        response = self._ask({}, "HEAD")
        response.close()
        length = _size_told(response.headers.get("content-length", ""))
        if response.status_code == 200 and length is not None:
            return length
        if response.status_code not in (200, 405, 501):  # many servers of signed addresses know no HEAD
            self._require_good(response)
        response = self._ask({"range": "bytes=0-0"})
        response.close()
        self._require_good(response)
        span = _SPAN.fullmatch(response.headers.get("content-range", ""))
        told = _size_told(span[3] if span else response.headers.get("content-length", ""))
        if told is None:
            raise NetworkError("the server does not say how large the file is")
        return told

    # --- asking -------------------------------------------------------------------------------------------------------

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
        """Ask at the first address, and wherever it sends us."""
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
            from huggingface_hub.utils import get_session  # type: ignore[attr-defined]  # documented, not exported

            client = get_session()
            limits = httpx2.Timeout(constants.HF_HUB_DOWNLOAD_TIMEOUT, connect=ANSWER_SECONDS)
            request = client.build_request(method, url, headers={**headers, **_AS_IT_IS}, timeout=limits)
            return client.send(request, stream=True, follow_redirects=False)

    def _pieces(self, response: httpx2.Response) -> Iterator[bytes]:
        with _transient(), translated():
            yield from response.iter_raw()

    # --- believing ----------------------------------------------------------------------------------------------------

    def _require_same_file(self, response: httpx2.Response) -> None:
        """The Hub says with every answer which file it leads to."""
        told = response.headers.get("x-linked-etag", "").strip('"')
        if self.file.sha256 and _SHA256.fullmatch(told) and told != self.file.sha256:
            response.close()
            raise AnotherFile(f"another file is there now: sha256 {told} seen, {self.file.sha256} expected")

    def _require_good(self, response: httpx2.Response) -> None:
        status = response.status_code
        if status in (200, 206):
            return
        if status == 416:
            raise AnotherFile(f"the server's file is shorter: {self.file.size:,} bytes expected (HTTP 416)")
        if status in (408, 425, 429) or status >= 500:
            after = _seconds(response.headers.get("retry-after", ""))
            if after > MOST_WAIT_S:
                raise NetworkError(f"refused (HTTP {status})", hint=f"the server asks to come back in {after:,.0f} s")
            words = "too many requests" if status == 429 else "the server has trouble"
            raise TryAgain(f"{words} (HTTP {status})", after=after)
        raise _refusal(status, response.headers.get("x-error-code", ""))

    def _judge(self, response: httpx2.Response, start: int, end: int) -> bool:
        """Whether the answer is the whole file. Raises for one that is neither that nor the range."""
        coding = response.headers.get("content-encoding", "identity")
        if coding != "identity":
            raise NetworkError(f"sent as {plain(coding)}, not as it is", hint="check the proxy settings")
        length = response.headers.get("content-length")
        if response.status_code == 200:
            if length is not None and length != str(self.file.size):
                raise AnotherFile(f"{plain(length)} bytes are there, {self.file.size:,} expected")
            return True
        told = response.headers.get("content-range", "")
        span = _SPAN.fullmatch(told)
        if span and span[3] not in ("*", str(self.file.size)):
            raise AnotherFile(f"{int(span[3]):,} bytes are there, {self.file.size:,} expected")
        if not span or (int(span[1]), int(span[2])) != (start, end - 1):
            raise TryAgain(f"{plain(told) or 'other bytes'} sent, bytes {start}-{end - 1} asked for")
        return False


def _size_told(text: str) -> int | None:
    """What a server says of a size; None for nothing, and for what no model can have."""
    size = int(text) if _LENGTH.fullmatch(text) else None
    return size if is_size(size) else None


def validator_of(headers: Mapping[str, str]) -> str:
    """What may stand in If-Range: an ETag that promises the same bytes, or the date of the last change, or ""."""
    etag = headers.get("etag", "")
    found = etag if re.fullmatch(r'"[^"]*"', etag) else headers.get("last-modified", "")
    return found if found.isascii() and found.isprintable() and len(found) <= _LONGEST_VALIDATOR else ""


@contextlib.contextmanager
def _transient() -> Iterator[None]:
    """Tell what may pass from what will not: a connection that broke from a setting that is wrong."""
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
    login = "accept the model's licence on its page at the Hub if it has one, then `hf auth login`"
    words = {401: "not authorised", 403: "no access"}
    reason = "the repository is gated" if code == "GatedRepo" else words.get(status, "refused")
    return NetworkError(f"{reason} (HTTP {status})", hint=login if status in (401, 403) else "")


def _next_address(url: str, location: str) -> str:
    """Where a redirect leads. Raises NetworkError for an address that may not be followed."""
    try:
        target = urljoin(url, location)
        split = urlsplit(target)
        downgrade = split.scheme == "http" and urlsplit(url).scheme == "https"
        plain_host = (split.hostname or "").isprintable()  # names of hosts are told
        if split.scheme not in _PORTS or not split.hostname or split.username is not None or not plain_host:
            raise ValueError("not an address")
        if downgrade and not LOOPBACK.fullmatch(split.hostname):
            raise ValueError("from https to http")
        _origin(target)
    except ValueError as error:
        where = plain(location.partition("?")[0])  # what follows may be a signature
        raise NetworkError(f"redirected to {where}: {plain(error)}: not followed") from error
    return target


def _origin(url: str) -> tuple[str, str | None, int | None]:
    """Scheme, host and port. Raises ValueError."""
    split: SplitResult = urlsplit(url)
    return split.scheme, split.hostname, split.port or _PORTS.get(split.scheme)


def _seconds(retry_after: str) -> float:
    """What a Retry-After means, a number or a date; 0.0 for anything else."""
    if retry_after.isdecimal():
        return float(retry_after[:9])
    try:
        return max(0.0, email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time())
    except (ValueError, OverflowError, OSError):
        return 0.0
