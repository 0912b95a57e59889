"""API keys: reading them from files, and comparing them in constant time."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import stat
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from llmrun.base.errors import UsageError
from llmrun.engine.remote.url import is_endpoint, parse_endpoint

_SECRET_BYTES = 32
_SHORTEST = 16  # characters; shorter keys can be guessed
_FLAG = "--api-key-file"
UPSTREAM_FLAG = "--upstream-key-file"
_MAKE_ONE = "make a key: python3 -c 'import secrets; print(secrets.token_urlsafe(32))'"


class ApiKeys:
    """The keys of a server. A client needs one of them, unless there are none."""

    def __init__(self, keys: Sequence[str], secret: bytes = b"") -> None:
        """Hold keys. With the same secret, a key has the same tenant in every process; by default, it is random."""
        self._digests = [_digest(key) for key in keys]
        self._secret = secret or secrets.token_bytes(32)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def accept(self, key: str) -> bool:
        """Return whether a key is valid. The time does not depend on the keys."""
        digest, found = _digest(key), False
        for known in self._digests:
            found |= hmac.compare_digest(digest, known)
        return found

    def tenant(self, key: str) -> str:
        """Return a name for the owner of a key, which does not reveal the key."""
        return hmac.new(self._secret, key.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()[:16]


def read_keys(path: Path) -> tuple[str, ...]:
    """Return the keys in a file: one per line, without empty lines and lines that begin with `#`.

    Raises UsageError, whose message never contains a key.
    """
    keys = []
    for number, key in _lines(path, _FLAG):
        if len(key) < _SHORTEST:
            raise UsageError(f"{_FLAG}: {path}: line {number}: shorter than {_SHORTEST} characters", hint=_MAKE_ONE)
        _check_letters(key, f"{_FLAG}: {path}: line {number}", _MAKE_ONE)
        keys.append(key)
    if not keys:
        raise UsageError(f"{_FLAG}: {path}: contains no keys", hint=_MAKE_ONE)
    return tuple(keys)


def read_upstream_keys(path: Path, bases: Sequence[str]) -> dict[str, str]:
    """Return the key of each upstream that has one.

    Each line is `URL KEY`, or a KEY for all upstreams without a line of their own.

    bases  the URLs of the upstreams, as in Endpoint.base

    Raises UsageError, whose message never contains a key.
    """
    common: str | None = None
    own: dict[str, str] = {}
    for number, line in _lines(path, UPSTREAM_FLAG):
        where = f"{UPSTREAM_FLAG}: {path}: line {number}"
        url, space, key = line.rpartition(" ")
        _check_letters(key, where, "each line is URL KEY, or a KEY for all upstreams")
        if not space and is_endpoint(key):
            raise UsageError(f"{where}: a URL without a key", hint="write URL KEY")
        if not space:
            common = key
        elif (base := parse_endpoint(url.strip()).base) in bases:
            own[base] = key
        else:
            raise UsageError(f"{where}: {base} is not an upstream", hint=f"add --upstream {base}, or remove the line")
    return {base: found for base in bases if (found := own.get(base, common)) is not None}


def _lines(path: Path, flag: str) -> Iterator[tuple[int, str]]:
    """Yield the numbers and contents of the lines of a file that are neither empty nor comments. Raises UsageError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UsageError(f"{flag}: {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{flag}: {path}: not a text file in UTF-8") from None
    for number, line in enumerate(map(str.strip, lines), 1):
        if line and not line.startswith("#"):
            yield number, line


def _check_letters(key: str, where: str, hint: str) -> None:
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise UsageError(f"{where}: a key must be printable ASCII without spaces", hint=hint)


def kept_secret(folder: Path) -> bytes:
    """Return the random secret in a folder's file, which is created if necessary. Raises UsageError."""
    path = folder / "secret"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            descriptor, name = tempfile.mkstemp(dir=folder)  # only this user may read it
            try:
                with open(descriptor, "wb") as file:  # noqa: PTH123  pathlib cannot open a descriptor
                    file.write(secrets.token_bytes(_SECRET_BYTES))
                Path(name).replace(path)
            finally:
                Path(name).unlink(missing_ok=True)
        secret = path.read_bytes()
    except OSError as error:
        raise UsageError(f"--save-prefixes: {error.filename or path}: {error.strerror}") from None
    if len(secret) != _SECRET_BYTES:
        raise UsageError(f"--save-prefixes: {path}: {len(secret)} bytes, expected {_SECRET_BYTES}", hint="remove it")
    return secret


def others_can_read(path: Path) -> bool:
    """Return whether other users of this machine can read a file. False on systems without such permissions."""
    return sys.platform != "win32" and bool(path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH))


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
