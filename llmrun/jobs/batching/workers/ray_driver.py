"""The process that talks to a Ray cluster. Only this module and ray_node.py import Ray.

Ray has a process of its own, because it prints to stdout and stderr, replaces signal handlers, waits for minutes
without a limit, and ends its process a minute after the head of the cluster has gone. The process that runs the batch
must survive all that (see ray_process.py). The two exchange frames of JSON over a pair of sockets:

    to this process:    {"address"}; after CONNECTED, [id, method, arguments] in any order
    from this process:  [0, CONNECTED, nodes] or [0, FAILED, error]; then for each id, [id, OK, value],
                        [id, FAILED, error] or [id, LOST, reason]; [0, NEWS, [name, kind, ...]] and [0, GONE, reason]
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Mapping
from typing import Any, Final

import ray
from ray.exceptions import AuthenticationError, RayError

from llmrun.base.errors import LlmrunError, NetworkError
from llmrun.engine.child.codec import error_to_json
from llmrun.engine.isolation.frames import HEADER_BYTES, decoded, encoded, frame_length, framed, read_frame
from llmrun.jobs.batching.workers.base import WorkerLost
from llmrun.jobs.batching.workers.ray_address import host_of
from llmrun.jobs.batching.workers.ray_messages import CONNECTED, FAILED, GONE, LOST, NEWS, OK
from llmrun.jobs.batching.workers.ray_node import RayNode

_BUFFER_BYTES: Final = 1 << 20
_EXIT_S: Final = 5.0
_PROBE_EACH_S: Final = 2.0
_PROBE_S: Final = 5.0
_GONE_S: Final = 20.0  # Ray ends this process after 60 s, and a head with a database may be restarted before
_MOST_WORDS: Final = 300


class RayDriver:
    """Handles the messages of the process that runs the batch."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: str) -> None:
        self._reader = reader
        self._writer = writer
        self._address = address
        self._nodes: dict[str, RayNode] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Handle messages until the other process has gone."""
        self._start(self._watch_head())
        try:
            while True:
                header = await self._reader.readexactly(HEADER_BYTES)
                message = decoded(await self._reader.readexactly(frame_length(header)))
                self._start(self._handle(*message))
        except (asyncio.IncompleteReadError, OSError):
            return

    def _start(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _handle(self, call: int, method: str, arguments: Mapping[str, Any]) -> None:
        try:
            self._send(call, OK, await self._result(method, **arguments))
        except WorkerLost as error:
            self._send(call, LOST, str(error))
        except LlmrunError as error:
            self._send(call, FAILED, error_to_json(error))
        except Exception as error:  # noqa: BLE001  (Ray raises many kinds of errors, and none may end this process)
            self._send(call, LOST, one_line(error))

    async def _result(self, method: str, name: str = "", **arguments: Any) -> Any:
        match method:
            case "nodes":
                return await asyncio.to_thread(alive_nodes)
            case "open":
                await self._close(name)
                node = self._nodes[name] = RayNode(name, lambda *news: self._send(0, NEWS, [name, *news]))
                return await node.open(**arguments)
            case "answer":
                if name not in self._nodes:
                    raise WorkerLost(f"{name}: closed")
                return await self._nodes[name].answer(**arguments)
            case "close":
                return await self._close(name)
        return None  # for "ping", which asks only whether this process answers

    async def _close(self, name: str) -> None:
        node = self._nodes.pop(name, None)
        if node is not None:
            await node.close()

    def _send(self, call: int, kind: str, value: Any) -> None:
        if not self._writer.is_closing():
            self._writer.write(framed(encoded([call, kind, value])))

    async def _watch_head(self) -> None:
        """Tell the other process when the head of the cluster has gone."""
        host, port = host_of(self._address), int(self._address.rpartition(":")[2])
        loop = asyncio.get_running_loop()
        seen = loop.time()
        while loop.time() - seen < _GONE_S:
            await asyncio.sleep(_PROBE_EACH_S)
            try:
                async with asyncio.timeout(_PROBE_S):
                    _, writer = await asyncio.open_connection(host, port)
                writer.close()
                seen = loop.time()
            except OSError:
                continue
        self._send(0, GONE, f"ray:{self._address}: the head of the cluster cannot be reached")


def alive_nodes() -> list[dict[str, Any]]:
    """Return the nodes of the cluster that have CPUs."""
    return [
        {
            "id": node["NodeID"],
            "host": node["NodeManagerAddress"],
            "cpus": node["Resources"]["CPU"],
            "gpus": node["Resources"].get("GPU", 0),
        }
        for node in ray.nodes()
        if node["Alive"] and node["Resources"].get("CPU", 0) >= 1
    ]


def one_line(error: BaseException) -> str:
    """Return an error's message on one line of a sensible length."""
    return " ".join(str(error).split())[:_MOST_WORDS] or type(error).__name__


def _connect(address: str) -> None:
    """Connect to a cluster. Raises NetworkError."""
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.CRITICAL)
    except AuthenticationError as error:
        raise NetworkError(f"ray:{address}: no token: {one_line(error).partition('.')[0]}") from error
    except (RayError, OSError, RuntimeError, ValueError) as error:
        hint = "the versions of Ray and Python must be the same everywhere" if "ersion" in str(error) else ""
        raise NetworkError(f"ray:{address}: {one_line(error)}", hint=hint) from error


async def _run(connection: socket.socket, address: str) -> None:
    reader, writer = await asyncio.open_connection(sock=connection, limit=_BUFFER_BYTES)
    await RayDriver(reader, writer, address).run()


def main() -> None:
    """Connect to the cluster that the first message names, and handle messages."""
    connection = socket.socket(fileno=os.dup(0))
    with connection.makefile("rb") as stream:
        first = read_frame(stream)
    if first is None:
        return
    address = decoded(first)["address"]
    try:
        _connect(address)
        connection.sendall(framed(encoded([0, CONNECTED, alive_nodes()])))
    except LlmrunError as error:
        connection.sendall(framed(encoded([0, FAILED, error_to_json(error)])))
        return
    asyncio.run(_run(connection, address))
    threading.Timer(_EXIT_S, os._exit, (0,)).start()  # Ray may wait for a head that has gone
    ray.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main()
