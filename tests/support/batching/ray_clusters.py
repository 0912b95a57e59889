"""Ray clusters on the loopback interface of this machine, in a process of their own, for tests.

The tests themselves do not import Ray. The process reads commands, such as "add", from its stdin, and ends with it.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from msgspec import to_builtins

from llmrun.jobs.batching.workers.ray_cluster import RayProcess
from tests.support.serving.processes import scripted_model

_STORE_BYTES = 80 << 20  # the least that Ray accepts
_LOOPBACK = "127.0.0.1"

# For clusters and for everything that connects to them. Otherwise, Ray replaces 127.0.0.1 by the machine's address.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"


class TestCluster:
    """A running cluster, whose head has no CPUs. `address` is HOST:PORT."""

    __test__ = False

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.address = self._answer()

    def add_node(self, **variables: str) -> None:
        """Add a node with one CPU and these environment variables."""
        self._command("add", variables)

    def remove_node(self, index: int) -> None:
        """Kill all processes of a node."""
        self._command("remove", index)

    def kill_head(self) -> None:
        """Kill the server of the head that all nodes need."""
        self._command("kill-head", None)

    def actors(self) -> list[psutil.Process]:
        """Return the processes of llmrun's workers on all nodes."""
        found = []
        for process in psutil.Process(self._process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if "ray::RayActor" in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def _command(self, name: str, argument: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([name, argument]) + "\n")
        self._process.stdin.flush()
        self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the cluster has ended: exit status {self._process.wait()}")
        return str(json.loads(line))


@contextmanager
def cluster(nodes: int, variables: Mapping[str, str] | None = None) -> Iterator[TestCluster]:
    """Run a cluster with this number of nodes, each with one CPU, while the block runs.

    variables  environment variables for all processes of the cluster
    """
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tests.support.batching.ray_clusters"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **(variables or {})},
        )
        try:
            running = TestCluster(process)
            for _ in range(nodes):
                running.add_node()
            yield running
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(60)


def open_with_token(address: str, folder: Path) -> Mapping[str, Any]:
    """Open a scripted model on the first node of a cluster, as if the cluster were on a network."""

    async def opened(process: RayProcess) -> Mapping[str, Any]:
        await process.attach()
        try:
            card: Mapping[str, Any] = await process.call(
                "open",
                name="worker",
                node=process.nodes[0],
                model=to_builtins(scripted_model(folder)),
                files={},
                needs_token=True,
                start_s=60.0,
            )
            return card
        finally:
            await process.close()

    return asyncio.run(opened(RayProcess.connected(address)))


def main() -> None:
    """Run a cluster and obey commands."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ray prints to stdout
    from ray.cluster_utils import Cluster

    common = {"object_store_memory": _STORE_BYTES, "node_ip_address": _LOOPBACK}
    running = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **common})
    nodes: list[Any] = []
    print(json.dumps(running.address), file=answers, flush=True)
    for line in sys.stdin:
        name, argument = json.loads(line)
        if name == "add":
            nodes.append(running.add_node(num_cpus=1, env_vars=argument, **common))
        elif name == "remove":
            running.remove_node(nodes.pop(argument), allow_graceful=False)
        else:
            running.head_node.kill_gcs_server()
        print(json.dumps("done"), file=answers, flush=True)
    running.shutdown()


if __name__ == "__main__":
    main()
