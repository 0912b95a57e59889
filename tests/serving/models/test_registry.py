"""Tests of loading, keeping and unloading models."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from llmrun.base.errors import DoesNotFit, ModelFileError, ModelNotFound, Overloaded, Unavailable
from llmrun.serving.models import registry
from llmrun.serving.models.known import KnownModel, KnownModels
from llmrun.serving.models.registry import ModelLimits, Models
from llmrun.serving.processes.served_model import State
from tests.support.serving.fake_model import FACTS, FakeModel

GB = 10**9


class House:
    """Models a, b and c, each of 4 GB, in memory for two of them. Only `a` is given at start."""

    def __init__(self, limits: ModelLimits | None = None, *, given: int = 1, kind: type[FakeModel] = FakeModel) -> None:
        self.kind = kind
        names = ("a", "b", "c")
        self.all = [KnownModel(name, Path(name), name if at >= given else "", 4 * GB) for at, name in enumerate(names)]
        self.notes: list[str] = []
        self.opened: list[str] = []
        self.processes: dict[str, FakeModel] = {}
        self.slow: asyncio.Event | None = None
        self.broken: Exception | None = None
        self.needs = dict.fromkeys(names, 4 * GB)
        limits = limits or ModelLimits(memory=9 * GB)
        self.models = Models(_Known(self.all, given), self.open, limits, created=1, note=self.notes.append)

    async def open(self, known: KnownModel, room: int | None) -> FakeModel:
        process = self.kind()
        if self.slow is not None:
            process.openable = self.slow
        if room is not None and room < self.needs[known.name]:
            process.broken = DoesNotFit("too large")
        elif self.broken is not None:
            process.broken = self.broken  # type: ignore[assignment]
        process.facts = structs.replace(FACTS, name=known.name, memory_bytes=self.needs[known.name])
        self.opened.append(known.name)
        self.processes[known.name] = process
        return process

    @property
    def loaded(self) -> list[str]:
        return sorted(managed.known.name for managed in self.models.loaded())

    async def use(
        self, name: str, seconds: float = 0.0, keep_s: float | None = None, *, process: str | None = None
    ) -> str:
        async with self.models.lease(name, keep_s) as lease:
            ready = await lease.ready()
            await asyncio.sleep(seconds)
            assert ready.model.state is State.READY
            assert self.processes[process or name].counted("closed") == 0
            return ready.facts.name


class _Known(KnownModels):
    def __init__(self, models: list[KnownModel], given: int) -> None:
        super().__init__(models[:given])
        self._all = KnownModels(models)

    async def find(self, name: str) -> KnownModel:
        return await self._all.find(name)


def run(test: Callable[[House], Awaitable[None]], house: Callable[[], House] = House) -> None:
    async def started() -> None:
        built = house()
        await built.models.start()
        try:
            async with asyncio.timeout(30):
                await test(built)
        finally:
            await built.models.close()
        assert all(process.counted("closed") for process in built.processes.values())

    asyncio.run(started())


def test_models_are_loaded_when_they_are_named() -> None:
    async def test(house: House) -> None:
        assert house.loaded == ["a"]
        assert await house.use("b") == "b"
        assert house.loaded == ["a", "b"]
        async with house.models.lease(None) as lease:
            assert (await lease.ready()).facts.name == "a"
        with pytest.raises(ModelNotFound, match="no such model: 'd'"):
            await house.use("d")

    run(test)


def test_a_model_is_loaded_once_for_many_requests() -> None:
    async def test(house: House) -> None:
        await asyncio.gather(*(house.use("b") for _ in range(20)))
        assert house.opened == ["a", "b"]

    run(test)


def test_the_least_recently_used_model_makes_room() -> None:
    async def test(house: House) -> None:
        await house.use("b")
        await house.use("a")
        await house.use("c")
        assert house.loaded == ["a", "c"]
        assert house.notes == ["unloading b to make room for c"]

    run(test)


def test_a_model_is_never_unloaded_while_it_answers() -> None:
    async def test(house: House) -> None:
        async with house.models.lease("a") as a, house.models.lease("b") as b:
            await a.ready()
            await b.ready()
            third = asyncio.create_task(house.use("c"))
            await asyncio.sleep(0.05)
            assert house.loaded == ["a", "b"]
            later = asyncio.create_task(house.use("a"))  # waits, so that `c` gets its turn
            await asyncio.sleep(0.02)
            assert not later.done()
        await asyncio.gather(third, later)

    run(test)


def test_the_model_that_becomes_idle_first_makes_room() -> None:
    async def test(house: House) -> None:
        async with house.models.lease("a") as a:
            await a.ready()  # the least recently used one, but it answers for longer
            other = asyncio.create_task(house.use("b", 0.05))
            await asyncio.sleep(0.02)
            assert await house.use("c") == "c"
            assert house.loaded == ["a", "c"]
            await other
            assert await house.use("a") == "a"

    run(test)


def test_random_swaps_fail_no_request_and_keep_the_limit() -> None:
    async def test(house: House) -> None:
        chance = random.Random(1)

        async def client() -> None:
            for _ in range(40):
                name = chance.choice("abc")
                assert await house.use(name, chance.choice((0, 0.001, 0.003))) == name
                assert len(house.loaded) <= 2

        await asyncio.gather(*(client() for _ in range(12)))
        assert len(house.opened) > 20

    run(test)


def test_a_large_model_can_replace_several() -> None:
    async def test(house: House) -> None:
        house.needs["c"] = 8 * GB  # its file is smaller, so this is known only after the first try
        await house.use("b")
        await house.use("c")
        assert house.loaded == ["c"]
        await house.use("a")
        assert house.loaded == ["a"]

    run(test)


def test_a_model_that_did_not_fit_is_tried_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program may have taken the memory."""
    monkeypatch.setattr(registry, "TRY_AGAIN_S", 0.01)

    async def test(house: House) -> None:
        house.needs["c"] = 10 * GB
        with pytest.raises(DoesNotFit):
            await house.use("c")
        house.needs["c"] = 4 * GB
        await asyncio.sleep(0.02)
        assert await house.use("c") == "c"

    run(test)


def test_a_model_that_never_fits_fails_only_its_requests() -> None:
    async def test(house: House) -> None:
        house.needs["c"] = 10 * GB
        with pytest.raises(DoesNotFit):
            await house.use("c")
        assert await house.use("a") == "a"
        await house.use("b")
        with pytest.raises(DoesNotFit):
            await house.use("c")
        assert house.loaded == ["a", "b"]  # the second time, nothing is unloaded for it

    run(test)


def test_broken_models_fail_only_their_requests() -> None:
    async def test(house: House) -> None:
        house.broken = ModelFileError("broken")
        found = await asyncio.gather(*(house.use("b") for _ in range(3)), return_exceptions=True)
        assert [type(error) for error in found] == [ModelFileError] * 3
        house.broken = None
        assert await house.use("b") == "b"

    run(test)


def test_idle_models_are_unloaded_after_a_while() -> None:
    async def test(house: House) -> None:
        await house.use("b")
        await asyncio.sleep(0.02)
        await house.use("b")
        assert house.opened == ["a", "b"]
        while house.loaded != ["a"]:  # the given model stays
            await asyncio.sleep(0.01)

    run(test, lambda: House(ModelLimits(keep_s=0.1)))


def test_a_request_decides_how_long_its_model_stays() -> None:
    async def test(house: House) -> None:
        await house.use("b", keep_s=math.inf)
        await house.use("a", keep_s=0)
        while house.loaded != ["b"]:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert house.loaded == ["b"]

    run(test, lambda: House(ModelLimits(keep_s=0.02)))


def test_clients_that_leave_do_not_cause_loading() -> None:
    async def test(house: House) -> None:
        house.slow = asyncio.Event()
        first = asyncio.create_task(house.use("b"))
        second = asyncio.create_task(house.use("c"))
        await asyncio.sleep(0.02)
        second.cancel()
        await asyncio.sleep(0)
        house.slow.set()
        assert await first == "b"
        await asyncio.sleep(0.02)
        assert house.opened == ["a", "b"]

    run(test)


def test_only_so_many_requests_wait_for_models() -> None:
    async def test(house: House) -> None:
        house.slow = asyncio.Event()
        waiting = [asyncio.create_task(house.use("b")) for _ in range(3)]
        await asyncio.sleep(0.02)
        with pytest.raises(Overloaded):
            await house.use("c")
        house.slow.set()
        assert await asyncio.gather(*waiting) == ["b"] * 3

    run(test, lambda: House(ModelLimits(most_waiting=3)))


def test_failed_processes_are_replaced() -> None:
    async def test(house: House) -> None:
        house.processes["a"].state = State.FAILED
        assert await house.use("a") == "a"
        assert house.opened == ["a", "a"]

    run(test)


def test_given_models_that_do_not_fit_wait_for_requests() -> None:
    async def test(house: House) -> None:
        assert house.loaded == ["a", "b"]
        assert house.notes == ["c does not fit beside the other models; it will be loaded when a request names it"]
        assert await house.use("c") == "c"

    run(test, lambda: House(given=3))


def test_the_default_model_must_fit() -> None:
    with pytest.raises(DoesNotFit):
        run(lambda house: asyncio.sleep(0), lambda: House(ModelLimits(memory=GB)))


def test_requests_are_refused_before_the_start_and_after_the_end() -> None:
    async def test(house: House) -> None:
        house.slow = asyncio.Event()
        waiting = asyncio.create_task(house.use("b"))
        await asyncio.sleep(0.02)
        await house.models.drain(0.0)
        with pytest.raises(Unavailable):
            await waiting
        with pytest.raises(Unavailable) as caught:
            await house.use("a")
        assert (caught.value.state, house.models.state(10)) == ("draining", "draining")

    run(test)
    early = House()

    async def use() -> None:
        with pytest.raises(Unavailable) as caught:
            await early.use("a")
        assert (caught.value.state, early.models.state(10)) == ("loading", "loading")

    asyncio.run(use())


def test_a_model_is_unloaded_on_request_when_it_is_idle() -> None:
    async def test(house: House) -> None:
        using = asyncio.create_task(house.use("b", 0.05))
        await asyncio.sleep(0.01)
        assert (await house.models.unload("b")).name == "b"
        await asyncio.sleep(0)
        assert house.loaded == ["a", "b"]
        assert await using == "b"
        while house.loaded != ["a"]:
            await asyncio.sleep(0.001)
        await house.models.unload("c")  # not loaded
        assert house.opened == ["a", "b"]

    run(test)


def test_the_time_until_unloading_is_known() -> None:
    async def test(house: House) -> None:
        await house.use("b", keep_s=100.0)
        expires = {managed.known.name: house.models.expires_in(managed) for managed in house.models.loaded()}
        assert expires["a"] == math.inf
        assert 90 < expires["b"] <= 100

    run(test)


def test_presets_of_one_model_open_it_once() -> None:
    async def test(house: House) -> None:
        assert house.opened == ["a"]
        assert await house.use("preset", process="a") == "preset"

    def built() -> House:
        house = House(given=2)
        house.all[1] = replace(house.all[0], name="preset")
        house.models.known = _Known(house.all, 2)
        return house

    run(test, built)


def test_models_whose_clients_left_are_unloaded() -> None:
    async def test(house: House) -> None:
        house.slow = asyncio.Event()
        using = asyncio.create_task(house.use("b"))
        while house.opened != ["a", "b"]:
            await asyncio.sleep(0)
        using.cancel()
        house.slow.set()
        while house.loaded != ["a", "b"]:
            await asyncio.sleep(0)
        while house.loaded != ["a"]:
            await asyncio.sleep(0.001)

    run(test, lambda: House(ModelLimits(keep_s=0.02)))


def test_given_models_are_unloaded_even_if_they_are_never_used() -> None:
    async def test(house: House) -> None:
        while house.loaded:
            await asyncio.sleep(0.001)

    run(test, lambda: House(ModelLimits(keep_given_s=0.02)))


def test_unexpected_errors_do_not_hold_up_other_models() -> None:
    async def test(house: House) -> None:
        house.broken = OSError("no more processes")
        house.slow = asyncio.Event()
        first, second = (asyncio.create_task(house.use(name)) for name in "bc")
        while house.opened != ["a", "b"]:
            await asyncio.sleep(0)
        house.broken = None
        house.slow.set()
        with pytest.raises(Unavailable) as caught:
            await first
        assert caught.value.state == "failed"
        assert await second == "c"
        assert house.notes == ["b could not be loaded: OSError('no more processes')"]

    run(test, lambda: House(ModelLimits()))


class _SlowToEnd(FakeModel):
    async def close(self) -> None:
        self.count("closing")
        await asyncio.sleep(0.02)
        await super().close()


@pytest.mark.parametrize("leaves", ["for another", "when idle", "because it failed to open"])
def test_stopping_waits_for_models_that_are_being_unloaded(leaves: str) -> None:
    """Otherwise, their processes would survive. `run` checks that all are closed."""

    async def test(house: House) -> None:
        asked = []
        if leaves == "when idle":
            await house.models.unload("a")
        else:
            house.broken = ModelFileError("broken") if leaves == "because it failed to open" else None
            asked = [asyncio.create_task(house.use("b"))]
        while not any(process.counted("closing") for process in house.processes.values()):
            await asyncio.sleep(0)
        await house.models.close()
        await asyncio.gather(*asked, return_exceptions=True)

    limits = ModelLimits(memory=5 * GB) if leaves == "for another" else ModelLimits()
    run(test, lambda: House(limits, kind=_SlowToEnd))


def test_a_request_keeps_a_model_that_was_about_to_leave() -> None:
    async def test(house: House) -> None:
        await house.use("b", keep_s=math.inf)
        house.slow = asyncio.Event()
        loading = asyncio.create_task(house.use("c"))
        await asyncio.sleep(0)
        await house.models.unload("b")  # which must wait until `c` is loaded
        await asyncio.sleep(0)
        await house.use("b", keep_s=math.inf)
        house.slow.set()
        await loading
        await asyncio.sleep(0.02)
        assert house.loaded == ["a", "b", "c"]

    run(test, lambda: House(ModelLimits()))


def test_servers_without_models_have_no_default() -> None:
    async def use() -> None:
        with pytest.raises(ModelNotFound, match="no default model"):
            await House(given=0).use("")

    asyncio.run(use())
