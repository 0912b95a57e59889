"""Disturbs servers while clients send requests. Every answer must equal that of an undisturbed server."""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress

import psutil

from tests.soak.driver import Broken, Case, Soak
from tests.soak.serving.clients import Asked, Clients, context_size, random_requests, settled_metrics
from tests.support.batching.batch_runs import CHAT
from tests.support.serving.http_client import post
from tests.support.serving.restartable import Restartable
from tests.support.serving.served import Served, serve
from tests.support.tool_calls.formats import FOLDER

_REQUESTS = 24
_SAME = 48
_AT_ONCE = 16
_WAIT = ("--max-wait", "600")

# --- the same answers alone, beside other requests and after preemption


def same(soak: Soak) -> Iterator[Case]:
    """Send 48 requests one by one, all at once, with cached prefixes, and with a KV cache that is too small for all."""
    context = context_size(soak)
    template = FOLDER / "Qwen-Qwen2.5-7B-Instruct.jinja"  # ChatML with tools, for models that have none
    arguments = [*soak.model_arguments(0.001), "--ctx-size", str(context), "--chat-template", str(template), *_WAIT]
    small = ("--kv-tokens", str(context), "--parallel", str(_AT_ONCE))

    def ask(clients: Clients, chance: random.Random, rounds: int, *more: str) -> list[Mapping[str, float]]:
        """Send all requests to a new server in several rounds. Returns the metrics after each round."""
        metrics = []
        with serve(*arguments, *more, log=soak.folder / "company.log") as server:
            for _ in range(rounds):
                numbers = chance.sample(range(_SAME), _SAME)
                asyncio.run(clients.ask_all(server.port, numbers, 2 * _AT_ONCE))
                metrics.append(settled_metrics(server))
        return metrics

    def case(number: int) -> str:
        clients, chance = Clients(random_requests(soak.seed_of(number), _SAME, with_tools=True)), soak.random(number)
        with serve(*arguments, log=soak.folder / "alone.log") as server:
            asyncio.run(clients.learn(server.port))
        first, second = (int(metrics["cached_tokens_total"]) for metrics in ask(clients, chance, 2))
        if second - first <= first:
            raise Broken(f"the prefixes were not cached: {first} tokens in the first round, {second} after the second")
        [careful] = ask(clients, chance, 1, *small)
        if careful["preemptions_total"] or careful["engine_restarts_total"]:
            raise Broken(f"{careful['preemptions_total']} preemptions, {careful['engine_restarts_total']} restarts")
        [eager] = ask(clients, chance, 1, *small, "--overcommit")
        soak.counts["preemptions with --overcommit"] += int(eager["preemptions_total"])
        return "sets of requests"

    yield case
    if not soak.counts["preemptions with --overcommit"]:
        raise Broken("no request was preempted, so the cache was not too small")


# --- killed engines

_KILLS_PER_SERVER = 5  # the pauses before restarts grow up to 30 s
_TWICE_SHARE = 0.2  # share of the cases that kill the engine again as soon as it is ready


def kill(soak: Soak) -> Iterator[Case]:
    """Kill the engine while all requests run or wait. Requests that saw two kills may fail."""
    clients = Clients(random_requests(soak.seed, _REQUESTS))
    sizes = ["--parallel", str(_AT_ONCE), "--ctx-size", str(context_size(soak))]
    with closing(Restartable([*soak.model_arguments(0.001), *sizes, *_WAIT], soak.folder / "killed.log")) as killed:
        asyncio.run(clients.learn(killed.port))
        kills = 0

        def case(number: int) -> str:
            nonlocal kills
            if kills >= _KILLS_PER_SERVER:
                killed.restart()
                kills = 0
            kills += asyncio.run(killed_wave(killed.server, clients, soak.random(number), soak.counts))
            return "waves of requests"

        yield case


async def killed_wave(server: Served, clients: Clients, chance: random.Random, counts: Counter[str]) -> int:
    """Send all requests at once and kill the engine before they are done. Returns the number of kills."""
    await asyncio.to_thread(server.wait_until_ready)
    tasks = [asyncio.create_task(clients.ask(server.port, number)) for number in range(len(clients.asked))]
    while not all(task.done() for task in tasks) and not (await asyncio.to_thread(server.metrics))["requests_running"]:
        await asyncio.sleep(0.001)
    done, moments = chance.randrange(len(tasks) // 2), []
    while sum(task.done() for task in tasks) < done:
        await asyncio.sleep(0.001)
    for _ in range(2 if chance.random() < _TWICE_SHARE else 1):
        await asyncio.to_thread(server.wait_until_ready)
        moment = time.perf_counter()
        if server.kill_engine():
            moments.append(moment)
            while (await asyncio.to_thread(server.get, "/health"))[0] == 200:
                await asyncio.sleep(0.005)
    for number, exchange in enumerate(await asyncio.gather(*tasks)):
        hits = sum(exchange.sent <= moment <= exchange.ended for moment in moments)
        counts[f"requests that saw {hits} kills"] += 1
        counts["of them given up"] += not clients.is_complete(number, exchange, may_fail=hits > 1)
    return len(moments)


# --- killed upstreams

_UPSTREAMS = 2
_PAUSE_S = 1.0  # the longest time from the first request to a kill
_GENTLE_SHARE = 0.25  # share of the upstreams that are stopped with SIGTERM instead of SIGKILL
_EVENT_ID = re.compile(rb"^id: (\S+)-(\d+)$", re.MULTILINE)


def upstreams(soak: Soak) -> Iterator[Case]:
    """End one of two upstreams under load. Streams without IDs may end with an error after their first token."""
    arguments = [*soak.model_arguments(0.02), "--ctx-size", str(context_size(soak)), *_WAIT]
    with ExitStack() as stack:
        servers = [Restartable(arguments, soak.folder / f"upstream-{number}.log") for number in range(_UPSTREAMS)]
        for server in servers:
            stack.callback(server.close)
        flags = [word for server in servers for word in ("--upstream", server.url)]
        front = stack.enter_context(serve(*flags, log=soak.folder / "front.log"))
        name = json.loads(servers[0].server.get("/v1/models")[1])["data"][0]["id"]
        asked = random_requests(soak.seed, _REQUESTS)
        clients = Clients([one._replace(body={**one.body, "model": name}) for one in asked])
        asyncio.run(clients.learn(servers[0].port))

        def case(number: int) -> str:
            chance = soak.random(number)
            victim = chance.choice(servers)
            end = victim.stop if chance.random() < _GENTLE_SHARE else victim.kill
            try:
                asyncio.run(_upstream_wave(front, end, clients, chance.uniform(0.0, _PAUSE_S), soak.counts))
            finally:
                victim.restart()
            return "ended upstreams"

        yield case
        for metric in ("moved", "resumed"):
            soak.counts[f"requests {metric}"] = _total(front, metric)


async def _upstream_wave(
    front: Served, end: Callable[[], None], clients: Clients, pause_s: float, counts: Counter[str]
) -> None:
    """Send all requests at once, and end an upstream after a pause."""
    while await asyncio.to_thread(_total, front, "up") < _UPSTREAMS:
        await asyncio.sleep(0.02)
    tasks = [asyncio.create_task(post(front.port, one.path, one.body)) for one in clients.asked]
    await asyncio.sleep(pause_s)
    await asyncio.to_thread(end)
    for number, exchange in enumerate(await asyncio.gather(*tasks)):
        # Once a stream without IDs has begun, another upstream cannot continue it.
        has_begun = b'"finish_reason"' in exchange.body and not _EVENT_ID.search(exchange.body)
        may_fail = has_begun and bool(clients.asked[number].body.get("stream"))
        counts["streams cut"] += not clients.is_complete(number, exchange, may_fail=may_fail)
        ids = _EVENT_ID.findall(exchange.body)
        if [int(event) for _, event in ids] != [*range(1, len(ids) + 1)] or len({prefix for prefix, _ in ids}) > 1:
            raise Broken(f"the IDs of a stream are not 1, 2, 3 and so on: {exchange.body[-2000:].decode()}")


def _total(front: Served, name: str) -> int:
    """Return the sum of a metric over all upstreams."""
    metrics = front.get("/metrics")[1].decode()
    found = re.findall(rf"^llmrun_upstream_{name}(?:_total)?\{{.*\}} (\d+)$", metrics, re.MULTILINE)
    return sum(map(int, found))


# --- models that make room for each other

_NAMES = ("first", "second", "third")
_SWAP_CLIENTS = 6
_SWAP_REQUESTS = 18
_QUESTIONS = 5
_FILES_IN_MEMORY = 7.6  # memory for all models in multiples of the file's size, which is enough for two models


def swap(soak: Soak) -> Iterator[Case]:
    """Serve three copies of a model, two of which fit in memory. This needs a real model of about 100 MB."""
    copies = [soak.folder / f"{name}.gguf" for name in _NAMES]
    for copy in copies:
        copy.symlink_to(soak.path())
    limit = _FILES_IN_MEMORY * soak.path().stat().st_size
    arguments = ["--parallel", "4", "--ctx-size", "2048", "--max-memory", str(limit / 1e9)]
    clients = Clients([_question(name, number) for name in _NAMES for number in range(_QUESTIONS)])
    with serve(*map(str, copies), *arguments, log=soak.folder / "swapped.log") as server:
        asyncio.run(clients.learn(server.port))

        def case(number: int) -> str:
            numbers = soak.random(number).choices(range(len(clients.asked)), k=_SWAP_REQUESTS)
            peak = asyncio.run(_swapped_wave(server, clients, numbers))
            if peak > limit:
                raise Broken(f"{peak / 1e9:.2f} GB are in use, and the limit is {limit / 1e9:.2f} GB")
            return "waves of requests"

        yield case
        soak.counts["swaps"] = server.log.read_text().count("to make room for")
    if not soak.counts["swaps"]:
        raise Broken("no model had to make room")


def _question(name: str, number: int) -> Asked:
    message = {"role": "user", "content": f"Count to {number + 5}."}
    return Asked(CHAT, {"model": name, "messages": [message], "max_tokens": 4 + 4 * number, "seed": 1})


async def _swapped_wave(server: Served, clients: Clients, numbers: Sequence[int]) -> int:
    """Send requests to several models. Returns the most memory that the server's processes used together, in bytes."""
    asking, peak = asyncio.create_task(clients.ask_all(server.port, numbers, _SWAP_CLIENTS)), 0
    while not asking.done():
        peak = max(peak, await asyncio.to_thread(_memory, server))
        await asyncio.sleep(0.1)
    await asking
    return peak


def _memory(server: Served) -> int:
    """Return the memory of a server's processes in bytes. Pages that several processes share count once."""
    if sys.platform != "linux":
        raise NotImplementedError("other systems do not count shared pages once")
    total, front = 0, psutil.Process(server.process.pid)
    for process in (front, *front.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            total += process.memory_full_info().pss
    return total
