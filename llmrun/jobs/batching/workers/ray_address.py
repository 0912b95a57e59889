"""The address of a Ray cluster on the command line, and the checks before connecting to the cluster."""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import re
import sys
from pathlib import Path
from typing import Final

from llmrun.base.errors import NetworkError, UsageError

RAY: Final = "ray"
_PREFIX: Final = "ray:"
_HOST_AND_PORT: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
_EXAMPLE: Final = "example: ray:10.0.0.5:6379"
_MOST_BYTES: Final = 4096
_DISTRIBUTION: Final = "llmrun-gguf"


def is_ray(name: str) -> bool:
    """Return whether a worker's name denotes a Ray cluster: `ray`, or `ray:HOST:PORT`."""
    return name == RAY or name.startswith(_PREFIX)


def check_ray(name: str) -> None:
    """Raise UsageError for an invalid address, or if Ray is not installed or not supported on this platform."""
    if name != RAY:
        match = _HOST_AND_PORT.fullmatch(name.removeprefix(_PREFIX))
        if match is None or not 0 < int(match[2]) < 65536:
            raise UsageError(f"--workers: {name!r:.80} is not the address of a Ray cluster", hint=_EXAMPLE)
    if sys.platform == "win32":
        raise UsageError("--workers: Ray clusters do not run on Windows", hint="use servers: --workers http://...")
    if importlib.util.find_spec("ray") is None:
        raise UsageError(
            "--workers: Ray is not installed", hint=f'install it: {sys.executable} -m pip install "{_requirement()}"'
        )


def find_address(name: str) -> str:
    """Return HOST:PORT. The name `ray` denotes the cluster that was started on this machine. Raises NetworkError."""
    if name != RAY:
        return name.removeprefix(_PREFIX)
    found = os.environ.get("RAY_ADDRESS", "") or _started_here()
    if not _HOST_AND_PORT.fullmatch(found):
        raise NetworkError(
            "ray: no cluster was started on this machine",
            hint="start a cluster: `RAY_AUTH_MODE=token ray start --head`, or use --workers ray:HOST:PORT",
        )
    return found


def host_of(address: str) -> str:
    """Return the host of HOST:PORT."""
    return address.rpartition(":")[0].strip("[]")


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_token(host: str) -> None:
    """Raise UsageError if a cluster is on a network and does not require a token.

    Anyone who can connect to a Ray cluster without tokens can run programs on all its nodes.

    host  the head or a node of the cluster
    """
    if is_loopback(host):
        return
    if os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
        raise UsageError(
            f"ray:{host}: clusters on a network must authenticate with a token",
            hint="run `ray get-auth-token --generate`, set RAY_AUTH_MODE=token on all nodes, and restart them",
        )
    token_file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser()
    if not os.environ.get("RAY_AUTH_TOKEN") and not token_file.is_file():
        raise UsageError(
            f"ray:{host}: there is no token: {token_file} does not exist",
            hint="copy the file from the head, or run `ray get-auth-token --generate` if there is none yet",
        )


def _started_here() -> str:
    """Return the address that `ray start` has stored, or "" if no address is stored."""
    linux = os.environ.get("TMPDIR") if sys.platform == "linux" else None
    folder = Path(os.environ.get("RAY_TMPDIR") or linux or "/tmp")
    try:
        with (folder / "ray" / "ray_current_cluster").open("rb") as file:
            return file.read(_MOST_BYTES).decode("utf-8", "replace").strip()
    except OSError:
        return ""


def _requirement() -> str:
    """Return the pip requirement for Ray, read from the metadata of the installed package."""
    from importlib.metadata import PackageNotFoundError, requires

    try:
        lines = requires(_DISTRIBUTION) or ()
    except PackageNotFoundError:
        lines = ()
    for line in lines:
        wanted, _, condition = line.partition(";")
        if "extra == 'ray'" in condition.replace('"', "'"):
            return wanted.strip()
    return "ray"
