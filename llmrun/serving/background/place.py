"""The private folder of background engines: sockets, locks and records of calls, and who may use them.

Only the user may enter the folder. Files are accessed through the folder's open descriptor, so replacing the folder or
a part of its path redirects nobody. On Linux, this also allows paths that are too long for a socket's address.

Several computers may share the folder, because home directories can be on network file systems. A socket's name
therefore begins with digits that identify this computer and its current boot.

Python has no Unix sockets on Windows, so nothing in this module works there, except `supported` and `open_folder`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import math
import os
import re
import selectors
import socket
import stat
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from llmrun.base.errors import LlmrunError, UsageError
from llmrun.base.folders import O_NOFOLLOW, O_NONBLOCK, cache_folder, problem_with_private
from llmrun.base.machine.processor import boot_id

_RUNTIME = Path("/run/user")  # with a folder for each user who is logged in, which systemd removes at logout
_DESCRIPTORS = Path("/proc/self/fd")
_LONGEST_ADDRESS = 103  # bytes; macOS stores 104, including a NUL
_COMPUTER_DIGITS = 6  # the first of the 16 hexadecimal digits of a name
_FILE = re.compile(r"([0-9a-f]{16})\.(sock|lock|called|log)|[0-9a-f]{8}\.tmp")
_OLD_S = 3600  # calls, locks and temporary sockets older than this are removed
_ABANDONED_S = 7 * 24 * 3600  # sockets of other computers and earlier boots, and logs, older than this are removed
_ATTEMPTS = 10_000  # to lock a file that others remove; some file systems change a file's identity at each `stat`
_LOOK_S = 0.02  # seconds between two attempts to lock a file or to connect


class PlaceError(LlmrunError):
    """Raised if the folder, a file in it or a socket cannot be used. Clients then run the model themselves."""


class LockHeld(PlaceError):
    """Raised if another process still holds a lock when the caller's waiting time is over."""


def supported() -> bool:
    """Return whether Python has private Unix sockets on this system."""
    return sys.platform == "linux" or sys.platform == "darwin"


def open_folder(*, create: bool) -> Folder | None:
    """Open the folder, which must be private to this user. Returns None if it does not exist and `create` is false.

    Raises PlaceError if the folder cannot be created or opened, or if it is a link or accessible to other users.
    """
    if sys.platform == "win32":
        return None
    path = folder_path()
    try:
        if create:
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                path.mkdir(0o700)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | O_NOFOLLOW)
    except FileNotFoundError:
        if create:
            raise _unusable(path, "its parent folder was removed") from None
        return None
    except OSError as error:
        culprit = error.filename or path  # may be a folder above
        is_other = error.errno in (errno.ENOTDIR, errno.ELOOP, errno.EEXIST)
        reason = "not a folder, or a link to one" if is_other else error.strerror or str(error)
        raise _unusable(culprit, reason) from error
    found = os.fstat(descriptor)
    problem, hint = problem_with_private(path, found)
    if problem:
        os.close(descriptor)
        raise _unusable(path, problem, hint=hint)
    return Folder(path, descriptor)


def _user() -> int:
    if sys.platform == "win32":
        raise _unsupported()
    return os.geteuid()


def _unix_socket() -> socket.socket:
    if sys.platform == "win32":
        raise _unsupported()
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)


def _unsupported() -> PlaceError:
    return PlaceError("background engines do not work on this system")


def has_sockets() -> bool:
    """Return whether there are sockets of engines on this computer. Raises PlaceError."""
    folder = open_folder(create=False)
    if folder is None:
        return False
    with folder:
        return bool(folder.names())


def folder_path() -> Path:
    """Return the same path for all processes of this user, whatever the environment says about the runtime folder.

    LLMRUN_CACHE_DIR moves the folder, because engines serve no client with another cache folder anyway.

    Raises PlaceError if there is none.
    """
    user = _user()
    if not os.environ.get("LLMRUN_CACHE_DIR"):
        with contextlib.suppress(OSError):
            found = (_RUNTIME / str(user)).lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == user:
                return _RUNTIME / str(user) / "llmrun"
    try:
        return cache_folder("run")
    except UsageError as error:
        raise PlaceError(f"no folder for background engines: {error}", hint=error.hint) from error


def _unusable(path: Path | str, reason: str, *, hint: str = "") -> PlaceError:
    return PlaceError(f"cannot use the folder for background engines: {path}: {reason}", hint=hint)


@contextmanager
def _explained(action: str, path: Path) -> Iterator[None]:
    """Turn each OSError in the `with` block into a PlaceError."""
    try:
        yield
    except OSError as error:
        raise PlaceError(f"cannot {action}: {path}: {error.strerror or error}") from error


class Folder:
    """The open folder of background engines. A context manager, which closes the folder at the end.

    A `name` is the result of `socket_name`. Methods raise PlaceError if the system refuses an operation.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        """Take over the descriptor of a folder that has been checked."""
        self.path = path
        self._descriptor = descriptor

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the folder. Calling this method again does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def socket_address(self, file: str) -> str:
        """Return an address for a socket in this folder, for `bind` and `connect`. The folder must stay open."""
        if sys.platform == "linux" and _DESCRIPTORS.exists():
            return str(_DESCRIPTORS / str(self._descriptor) / file)
        path = self.path / file
        if len(os.fsencode(path)) > _LONGEST_ADDRESS:
            raise PlaceError(f"path too long for a socket: {path}: more than {_LONGEST_ADDRESS} bytes")
        return str(path)

    def names(self, kind: str = "sock") -> list[str]:
        """Return the names of the sockets of this computer since it started. They need not be in use.

        kind  "log" for the names of the files to which engines write errors, and which they remove at their end
        """
        computer = this_computer()
        found = [_FILE.fullmatch(file) for file in self._files()]
        return sorted(match[1] for match in found if match and match[2] == kind and match[1].startswith(computer))

    def remove(self, name: str) -> None:
        """Remove a socket on which nobody listens. Hold the lock during the call, or a new socket may vanish."""
        with _explained("remove a leftover socket", self.path / f"{name}.sock"), contextlib.suppress(FileNotFoundError):
            self.unlink(f"{name}.sock")

    @contextmanager
    def lock(
        self, name: str, *, seconds: float = math.inf, waiting: Callable[[], None] | None = None
    ) -> Iterator[None]:
        """Hold the exclusive lock of a name in the `with` block. No other process or thread holds it meanwhile.

        seconds  how long to wait for the lock. A suspended process keeps its lock, so the wait may have no end.
        waiting  is called once if another process holds the lock

        Raises LockHeld if the lock is still held after `seconds`.
        """
        file = f"{name}.lock"
        descriptor = self._locked(file, seconds, waiting)
        try:
            yield
        finally:
            with contextlib.suppress(OSError, PlaceError):
                if self.is_same(file, os.fstat(descriptor)):
                    self.unlink(file)
            os.close(descriptor)

    def _locked(self, file: str, seconds: float, waiting: Callable[[], None] | None) -> int:
        """Return the descriptor of a locked file that is still in the folder."""
        end = time.monotonic() + seconds
        for _ in range(_ATTEMPTS):
            with _explained("lock a file", self.path / file):
                descriptor = self._created(file)
            try:
                while not _try_lock(descriptor, self.path / file):
                    if time.monotonic() >= end:
                        raise LockHeld(f"another process still holds a lock after {seconds:g} s: {self.path / file}")
                    if waiting is not None:
                        waiting()
                        waiting = None
                    time.sleep(_LOOK_S)
                # Holders remove the file before they unlock it. A lock on a removed file excludes nobody.
                if self.is_same(file, os.fstat(descriptor)):
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
        raise PlaceError(f"cannot lock a file: {self.path / file}: the file keeps changing")

    def remember_call(self, name: str) -> None:
        """Record that a command would have used this engine now. Removes old files of all names."""
        file = f"{name}.called"
        now = time.time()
        with _explained("record a call", self.path / file):
            descriptor = self._created(file)
            try:
                os.utime(descriptor, (now, now))  # a file server's clock may differ
            finally:
                os.close(descriptor)
            self._remove_old(now)

    def called_within(self, name: str, seconds: float) -> bool:
        """Return whether `remember_call` recorded a call of this name in the last seconds."""
        found = self.status(f"{name}.called")
        return found is not None and 0 <= time.time() - found.st_mtime <= seconds

    def is_same(self, file: str, expected: os.stat_result) -> bool:
        """Return whether the file in the folder is the one that has this status."""
        found = self.status(file)
        return found is not None and os.path.samestat(found, expected)

    def _remove_old(self, now: float) -> None:
        own = {f"{name}.{kind}" for name in self.names() for kind in ("sock", "log")}
        for file in self._files():
            match = _FILE.fullmatch(file)
            found = self.status(file) if match and file not in own else None
            if match is None or found is None:
                continue
            age = abs(now - found.st_mtime)  # the clock may have been ahead
            if age <= (_ABANDONED_S if match[2] in ("sock", "log") else _OLD_S):
                continue
            if match[2] == "lock":
                with contextlib.suppress(PlaceError), self.lock(match[1], seconds=0):
                    pass  # releasing the lock removes the file
            else:
                with contextlib.suppress(FileNotFoundError):
                    self.unlink(file)

    def _created(self, file: str) -> int:
        """Return the descriptor of a file that is created if necessary. A link is an error."""
        return os.open(file, os.O_RDWR | os.O_CREAT | O_NOFOLLOW | O_NONBLOCK, 0o600, dir_fd=self._descriptor)

    def _files(self) -> list[str]:
        with _explained("list the folder for background engines", self.path):
            return os.listdir(self._descriptor)  # noqa: PTH208  # pathlib does not read descriptors

    def status(self, file: str) -> os.stat_result | None:
        """Return the status of a file, which may be a link, or None if the file does not exist."""
        with _explained("look at a file", self.path / file):
            try:
                return os.stat(file, dir_fd=self._descriptor, follow_symlinks=False)
            except FileNotFoundError:
                return None

    # The methods below raise OSError.

    def unlink(self, file: str) -> None:
        os.unlink(file, dir_fd=self._descriptor)

    def link(self, file: str, name: str) -> None:
        os.link(file, name, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor, follow_symlinks=False)

    def rename(self, file: str, name: str) -> None:
        os.rename(file, name, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)

    def make_private(self, file: str) -> None:
        os.chmod(file, 0o600, dir_fd=self._descriptor)


def _try_lock(descriptor: int, path: Path) -> bool:
    """Try to lock a file. Returns False if it is locked. Raises PlaceError if the file system has no locks."""
    if sys.platform == "win32":
        raise _unsupported()
    import fcntl

    with _explained("lock a file", path):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


class Listener:
    """A listening socket, which replaces an earlier one of the same name."""

    def __init__(self, folder: Folder, name: str, listening: socket.socket, status: os.stat_result) -> None:
        """Take over a socket that does not block, with the status of its file. See `open`."""
        import threading  # clients do not need this module

        self._folder = folder
        self._file = f"{name}.sock"
        self._status = status
        self._listening = listening
        self._waking, self._wake = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for each in (self._listening, self._waking):
            self._selector.register(each, selectors.EVENT_READ)
        self._is_accepting = False
        self._is_closed = False
        self._lock = threading.RLock()  # a signal handler may close the socket at any moment

    @classmethod
    def open(cls, folder: Folder, name: str, *, backlog: int = 128) -> Self:
        """Listen in a folder, which must stay open until the end. Raises PlaceError."""
        temporary = f"{os.urandom(4).hex()}.tmp"
        with contextlib.ExitStack() as undo:
            undo.enter_context(_explained("listen on a socket", folder.path / f"{name}.sock"))
            listening = undo.enter_context(_unix_socket())
            listening.bind(folder.socket_address(temporary))
            undo.callback(folder.unlink, temporary)
            folder.make_private(temporary)  # nobody can connect before `listen`
            listening.listen(backlog)
            listening.setblocking(False)
            status = folder.status(temporary)
            assert status is not None
            listener = cls(folder, name, listening, status)
            undo.callback(listener.close)
            folder.rename(temporary, f"{name}.sock")
            undo.pop_all()
        return listener

    def accept(self) -> socket.socket | None:
        """Wait for a connection. Returns None once `close` has been called. One thread at a time may wait."""
        with self._lock:
            self._is_accepting = True
        try:
            return None if self._is_closed else self._next()
        finally:
            with self._lock:
                self._is_accepting = False
                if self._is_closed:
                    self._release()

    def _next(self) -> socket.socket | None:
        while True:
            self._selector.select()
            if self._is_closed:
                return None
            try:
                connection, _ = self._listening.accept()
            except (BlockingIOError, ConnectionAbortedError):
                continue  # the client has left
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    raise
                time.sleep(_LOOK_S)  # the client waits until a descriptor is free
                continue
            connection.setblocking(True)  # macOS copies the listening socket's mode
            return connection

    def is_ours(self) -> bool:
        """Return whether clients that look for the name find this socket.

        They do not if another engine has taken over the name, or if the socket or its folder has been moved or removed.
        Systems remove the folder at logout.
        """
        try:
            return os.path.samestat((self._folder.path / self._file).lstat(), self._status)
        except OSError:
            return False

    def withdraw(self) -> None:
        """Remove the socket's name from the folder, unless the name belongs to another socket by now.

        `accept` still returns earlier connections. Calling this method again does nothing.
        """
        if not self.is_ours():
            return
        aside = f"{os.urandom(4).hex()}.tmp"
        with contextlib.suppress(OSError, PlaceError):  # the folder was removed
            self._folder.rename(self._file, aside)
            if not self._folder.is_same(aside, self._status):  # another engine took over the name a moment ago
                self._folder.link(aside, self._file)
            self._folder.unlink(aside)

    def close(self) -> None:
        """Withdraw the socket, wake `accept`, and close the socket. Calling this method again does nothing."""
        self.withdraw()
        with self._lock:
            self._is_closed = True
            self._wake.close()  # the selector sees the end of the stream
            if not self._is_accepting:  # otherwise, `accept` could wait on a descriptor that is another file's by then
                self._release()

    def _release(self) -> None:
        for each in (self._selector, self._listening, self._waking):
            each.close()


def connect(folder: Folder, name: str, seconds: float) -> socket.socket | None:
    """Connect to the engine of this name. Returns None if there is no socket, or if nobody listens on the socket.

    The timeout of the connection is `seconds`.

    Raises PlaceError if the file is not a socket of this user, if another user listens on it, or if the connection
    is not accepted within `seconds`.
    """
    file = f"{name}.sock"
    path = folder.path / file
    found = folder.status(file)
    if found is None:
        return None
    if not stat.S_ISSOCK(found.st_mode):
        raise PlaceError(f"cannot use a background engine: {path}: not a socket", hint=f"remove {path}")
    if found.st_uid != _user():
        raise _stranger(path, found.st_uid)
    with contextlib.ExitStack() as undo:
        undo.enter_context(_explained("connect to a background engine", path))
        connection = undo.enter_context(_unix_socket())
        connection.settimeout(seconds)
        if not _connected(connection, folder.socket_address(file), time.monotonic() + seconds):
            return None
        if not peer_is_us(connection):
            raise _stranger(path, _peer(connection)[0])
        undo.pop_all()
    return connection


def _connected(connection: socket.socket, address: str, end: float) -> bool:
    """Connect before this time. Returns False if nobody listens. Raises OSError."""
    while True:
        try:
            connection.connect(address)
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except BlockingIOError:  # too many clients are waiting; Linux returns this error at once
            if time.monotonic() >= end:
                raise TimeoutError(errno.ETIMEDOUT, "too many clients are waiting") from None
            time.sleep(_LOOK_S)
        else:
            return True


def _stranger(path: Path, uid: int | None) -> PlaceError:
    who = "an unknown user" if uid is None else f"user {uid}"
    return PlaceError(f"cannot use a background engine: {path}: it belongs to {who}", hint=f"remove {path}")


def peer_is_us(connection: socket.socket) -> bool:
    """Return whether the process at the other end of a Unix socket has the same effective user as this process."""
    return _peer(connection)[0] == _user()


def peer_pid(connection: socket.socket) -> int | None:
    """Return the id of the process at the other end of a Unix socket, or None if it is unknown."""
    return _peer(connection)[1]


_SOL_LOCAL: Final = 0  # the next four are from sys/un.h and sys/ucred.h of macOS
_LOCAL_PEERCRED: Final = 1
_LOCAL_PEERPID: Final = 2
_XUCRED = struct.Struct("=II68x")  # version, effective user


def _peer(connection: socket.socket) -> tuple[int | None, int | None]:
    """Return the user and the process at the other end, each None if unknown."""
    uid = pid = None
    with contextlib.suppress(OSError):  # the other end has left
        if sys.platform == "linux":
            ucred = struct.Struct("=iII")  # process, user, group
            pid, uid, _ = ucred.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, ucred.size))
        elif sys.platform == "darwin":
            _, uid = _XUCRED.unpack(connection.getsockopt(_SOL_LOCAL, _LOCAL_PEERCRED, _XUCRED.size))
            pid = connection.getsockopt(_SOL_LOCAL, _LOCAL_PEERPID)
    return uid, pid or None


def socket_name(key: str) -> str:
    """Return 16 hexadecimal digits that identify this computer, its current boot and the key."""
    return this_computer() + _digits(key, 16 - _COMPUTER_DIGITS)


def this_computer() -> str:
    """Return the digits with which the names of this computer begin since its current boot."""
    return _digits(f"{boot_id()}\0{socket.gethostname()}", _COMPUTER_DIGITS)


def _digits(text: str, count: int) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:count]  # paths need not be UTF-8
