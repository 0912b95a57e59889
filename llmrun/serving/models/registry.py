"""The models of a server: loaded on demand, and unloaded when idle or when another model needs the memory."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

from msgspec import structs

from llmrun.base.errors import DoesNotFit, LlmrunError, ModelNotFound, Overloaded, Unavailable
from llmrun.engine.requests import ChatPrompt, ModelFacts, Request
from llmrun.hub.local.safe_writes import in_use
from llmrun.options.presets import Preset
from llmrun.serving.models.known import KnownModel, KnownModels
from llmrun.serving.processes.served_model import ServedModel, State


@dataclass(slots=True, eq=False)
class ManagedModel:
    """A model of the server, loaded or unloaded.

    process   the process that runs the model, or None while the model is unloaded
    memory    the most bytes that the loaded model may use; until the model is first loaded, the size of its file
    users     the number of requests that use the model
    waiting   the requests that wait until the model is loaded
    leaving   True while the model makes room for another model; new requests wait until the model is loaded again
    used      when a request last ended, in seconds of the loop's clock
    keep_s    the seconds without requests after which the model is unloaded
    held      resources that are freed when the model is unloaded, such as the lock that protects the model's file
    too_large the error of a model that did not fit even with no other model loaded, valid until `too_large_until`
    idle      an event that is set while no request uses the model
    """

    known: KnownModel
    keep_s: float
    process: ServedModel | None = None
    memory: int = 0
    users: int = 0
    waiting: list[asyncio.Future[None]] = field(default_factory=list)
    leaving: bool = False
    too_large: DoesNotFit | None = None
    too_large_until: float = -math.inf
    used: float = -math.inf
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    timer: asyncio.TimerHandle | None = None
    held: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self.memory = self.known.size
        self.idle.set()

    @property
    def is_wanted(self) -> bool:
        """True if a request is waiting for the model."""
        return any(not future.done() for future in self.waiting)

    def acquire(self) -> None:
        """Count one more request that uses the model."""
        self.users += 1
        self.idle.clear()
        self.stop_timer()

    def stop_timer(self) -> None:
        """Cancel the timer that would unload the model."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def release(self, now: float) -> None:
        """Count one fewer request that uses the model. `now` is the time of the loop's clock."""
        self.users -= 1
        self.used = now
        if not self.users:
            self.idle.set()

    def admit(self) -> None:
        """Let all waiting requests use the model."""
        waiting, self.waiting = self.waiting, []
        for future in waiting:
            if not future.done():
                self.acquire()
                future.set_result(None)

    def refuse(self, error: LlmrunError) -> None:
        """End all waiting requests with an error."""
        waiting, self.waiting = self.waiting, []
        for future in waiting:
            if not future.done():
                future.set_exception(error)


RETRY_S: Final = 5.0  # seconds after which clients should retry while a model is loading
_SYSTEM: Final = "system"
_NO_LIMIT: Final = -1


@dataclass(frozen=True, slots=True)
class Ready:
    """A loaded model with the settings for one call.

    facts     the facts about the model, with the name and the sampling defaults of the preset, if there is one
    preset    the preset that the client named, or None
    adapters  the default scales of LoRA adapters, by name; None for the scales of --lora
    """

    model: ServedModel
    facts: ModelFacts
    preset: Preset | None = None
    adapters: Mapping[str, float] | None = None

    @classmethod
    def under(cls, known: KnownModel, model: ServedModel) -> Self:
        """Return a model with the settings for one of its names. Raises Unavailable if the model is not open."""
        facts = structs.replace(facts_of(model), name=known.name)
        if known.preset is not None:
            facts = structs.replace(facts, default_sampling=replace(facts.default_sampling, **known.preset.sampling))
        return cls(model, facts, known.preset, known.adapters)

    @property
    def signature(self) -> str:
        """A string that changes whenever the same request could produce another answer."""
        facts = self.facts
        own = f"{facts.default_sampling} {self.preset} {self.adapters}"
        return f"{facts.name} {facts.fingerprint} {facts.info.context_size} {own}"

    def seed(self, otherwise: int) -> int:
        """Return the default seed: the preset's seed, or `otherwise` if the preset sets no seed."""
        return int(self._values.get("seed", otherwise))

    def completed(self, request: Request) -> Request:
        """Return a request with all unset values filled in from the preset and the default adapters."""
        if request.adapters is None and self.adapters is not None:
            request = structs.replace(request, adapters=self.adapters)
        if self.preset is None:
            return request
        limit = self._values.get("max_tokens", _NO_LIMIT)
        if request.max_tokens is None and limit != _NO_LIMIT:
            request = structs.replace(request, max_tokens=limit)
        prompt = request.prompt
        if not isinstance(prompt, ChatPrompt):
            return request
        if request.think is None and request.think_budget is None and self.facts.thinks:
            think, budget = self._values.get("think"), self._values.get("think_budget")
            request = structs.replace(request, think=think, think_budget=budget)
        return structs.replace(request, prompt=_completed(prompt, self.preset))

    @property
    def _values(self) -> Mapping[str, Any]:
        return {} if self.preset is None else self.preset.values


def facts_of(model: ServedModel) -> ModelFacts:
    """Return the facts about a model. Raises Unavailable if the model is not open or the server is shutting down."""
    facts = model.facts
    if facts is None or model.state is State.DRAINING:
        raise Unavailable(f"the model is not available: {model.state}", state=model.state.value, retry_after=RETRY_S)
    return facts


def _completed(prompt: ChatPrompt, preset: Preset) -> ChatPrompt:
    messages = prompt.messages
    if preset.system and all(message.get("role") != _SYSTEM for message in messages):
        messages = ({"role": _SYSTEM, "content": preset.system}, *messages)
    return structs.replace(prompt, messages=messages, template_kwargs={**preset.variables, **prompt.template_kwargs})


FOREVER: Final = math.inf
STUCK: Final = "stuck"
TRY_AGAIN_S: Final = 60.0  # seconds for which a model that did not fit is refused; other programs may free memory

# Returns an unopened model, given the known model and the bytes that the model may use, or None for no limit.
Opener = Callable[[KnownModel, int | None], Awaitable[ServedModel]]


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """The limits of a server's models.

    memory        the bytes that all loaded models together may use, or None for no limit
    keep_s        the seconds without requests after which a model from the store is unloaded
    keep_given_s  the seconds without requests after which a model given at startup is unloaded
    most_waiting  the maximum number of requests that wait for models to be loaded
    """

    memory: int | None = None
    keep_s: float = FOREVER
    keep_given_s: float = FOREVER
    most_waiting: int = 256


class Lease:
    """A claim of one call on a model. The model is not unloaded before the claim ends."""

    def __init__(self, models: Models, managed: ManagedModel, known: KnownModel) -> None:
        self._models, self._managed, self._known = models, managed, known
        self._holds = False

    async def ready(self) -> Ready:
        """Wait until the model is loaded.

        If the model cannot be loaded, its error is raised. Raises Overloaded if too many requests are waiting, and
        Unavailable if the server is starting or shutting down.
        """
        if not self._holds:
            await self._models.claim(self._managed)
            self._holds = True
        assert self._managed.process is not None
        return Ready.under(self._known, self._managed.process)

    def end(self) -> None:
        if self._holds:
            self._models.give_back(self._managed)


class Models:
    """All models of a server. All methods must be called on the same event loop."""

    def __init__(
        self,
        known: KnownModels,
        opener: Opener,
        limits: ModelLimits,
        *,
        created: int,
        note: Callable[[str], None],
    ) -> None:
        """Create the registry without loading any model.

        created  the start time of the server, in seconds since 1970
        note     called with messages for the log, such as the unloading of a model
        """
        self.known, self.created = known, created
        self._opener, self._limits, self._note = opener, limits, note
        self._managed: dict[str, ManagedModel] = {}  # maps the paths of model files to models
        self._wanted: list[ManagedModel] = []  # models that requests wait for, in order
        self._working: asyncio.Task[None] | None = None
        self._changing = asyncio.Lock()  # locked while a model is being loaded or unloaded
        self._tasks: set[asyncio.Task[None]] = set()
        self._state = State.LOADING

    @asynccontextmanager
    async def lease(self, name: object, keep_s: float | None = None) -> AsyncIterator[Lease]:
        """Claim the model that a request names in the field `model`, until the block ends. Raises ModelNotFound.

        name    the value of the field; a missing or empty name selects the default model
        keep_s  the seconds that the model stays loaded after this request, or None for the server's own setting
        """
        known = await self.find(name)
        managed = self._managed_of(known)
        managed.keep_s = self._keep_s(managed.known) if keep_s is None else keep_s
        lease = Lease(self, managed, known)
        try:
            yield lease
        finally:
            lease.end()

    async def find(self, name: object) -> KnownModel:
        """Return the model that a request names. Raises ModelNotFound."""
        if name and isinstance(name, str):
            return await self.known.find(name)
        if not self.known.given:
            raise ModelNotFound("this server has no default model", hint="name a model listed in /v1/models")
        return self.known.given[0]  # parsing the request refuses names of other types

    def loaded(self) -> list[ManagedModel]:
        """Return the models in memory, the most recently used model first."""
        found = [managed for managed in self._managed.values() if managed.process is not None]
        return sorted(found, key=lambda managed: (managed.users == 0, -managed.used))

    def process_of(self, known: KnownModel) -> ServedModel | None:
        """Return the process that runs a model, or None if the model is not loaded."""
        managed = self._managed.get(str(known.path))
        return None if managed is None else managed.process

    def state(self, stale_s: float) -> str:
        """Return "ready" if requests can be answered, and otherwise the state of the server or its model.

        stale_s  the seconds without progress after which a model counts as stuck
        """
        if self._state is not State.READY:
            return self._state
        states = [_state_of(managed.process, stale_s) for managed in self.loaded() if managed.process is not None]
        return State.READY if State.READY in states or not states else states[0]

    @property
    def open_requests(self) -> int:
        """The number of running and waiting requests."""
        loads = [managed.process.load for managed in self.loaded() if managed.process is not None]
        waiting = sum(len(managed.waiting) for managed in self._managed.values())
        return waiting + sum(load.running + load.waiting for load in loads)

    async def start(self) -> None:
        """Load the models given at startup that fit in memory. Raises the error of a model that cannot be opened."""
        for number, known in enumerate(self.known.given):
            managed = self._managed_of(known)
            try:
                async with self._changing:
                    if managed.process is None:  # several presets can have the same model
                        await self._open(managed)
                        self._unload_later(managed)
            except DoesNotFit:
                if number == 0:
                    raise
                self._note(
                    f"{known.name} does not fit beside the other models; it will be loaded when a request names it"
                )
        self._state = State.READY

    async def drain(self, seconds: float) -> None:
        """Refuse new and waiting requests, let running requests finish, and end the rest after `seconds`."""
        self._state = State.DRAINING
        error = Unavailable("the server is shutting down", state=State.DRAINING.value)
        for managed in self._managed.values():
            managed.refuse(error)
        await asyncio.gather(*(managed.process.drain(seconds) for managed in self.loaded() if managed.process))

    async def close(self) -> None:
        """End all requests with an error, and free all resources. Idempotent."""
        self._state = State.DRAINING
        error = Unavailable("the server is shutting down", state=State.DRAINING.value)
        for managed in self._managed.values():
            managed.refuse(error)
        if self._working is not None:
            self._working.cancel()
            await asyncio.wait({self._working})
        while self._tasks:  # if these tasks were cancelled, the processes would keep running
            await asyncio.wait(self._tasks)
        await asyncio.gather(*(managed.process.close() for managed in self.loaded() if managed.process))

    async def claim(self, managed: ManagedModel) -> None:
        """Wait until a model is loaded, and count one more request that uses the model."""
        if self._state is not State.READY:
            raise Unavailable("the server has no models yet", state=self._state.value, retry_after=RETRY_S)
        process = managed.process
        if process is not None and process.state is not State.FAILED and not managed.leaving:
            managed.acquire()
            return
        waiting = sum(len(each.waiting) for each in self._managed.values())
        if waiting >= self._limits.most_waiting:
            raise Overloaded(f"{waiting} requests wait for models to be loaded", retry_after=RETRY_S)
        turn = asyncio.get_running_loop().create_future()
        managed.waiting.append(turn)
        self._want(managed)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.give_back(managed)
            raise
        finally:
            if turn in managed.waiting:
                managed.waiting.remove(turn)

    def give_back(self, managed: ManagedModel) -> None:
        """Count one fewer request that uses the model, and unload the model later if it stays idle."""
        managed.release(asyncio.get_running_loop().time())
        self._unload_later(managed)

    def expires_in(self, managed: ManagedModel) -> float:
        """Return the seconds until a loaded model is unloaded if no more requests arrive."""
        if managed.timer is None:
            return managed.keep_s
        return max(0.0, managed.timer.when() - asyncio.get_running_loop().time())

    async def unload(self, name: object) -> KnownModel:
        """Unload the named model once no request uses it, and return the model immediately. Raises ModelNotFound."""
        known = await self.find(name)
        managed = self._managed_of(known)
        managed.keep_s = 0.0
        self._expire(managed)
        return known

    def _unload_later(self, managed: ManagedModel) -> None:
        """Unload a model later if it stays idle."""
        if not managed.users and math.isfinite(managed.keep_s) and self._state is not State.DRAINING:
            managed.stop_timer()
            managed.timer = asyncio.get_running_loop().call_later(managed.keep_s, self._expire, managed)

    def _expire(self, managed: ManagedModel) -> None:
        managed.stop_timer()
        self._start(self._unload_if_idle(managed))

    async def _unload_if_idle(self, managed: ManagedModel) -> None:
        async with self._changing:
            # Requests that arrived in the meantime may keep the model loaded for longer.
            is_due = managed.timer is None and math.isfinite(managed.keep_s)
            if is_due and not managed.users and not managed.is_wanted:
                await self._close(managed)

    def _managed_of(self, known: KnownModel) -> ManagedModel:
        key = str(known.path)
        if key not in self._managed:
            self._managed[key] = ManagedModel(known, self._keep_s(known))
        return self._managed[key]

    def _keep_s(self, known: KnownModel) -> float:
        return self._limits.keep_given_s if known.is_given else self._limits.keep_s

    def _want(self, managed: ManagedModel) -> None:
        if managed not in self._wanted:
            self._wanted.append(managed)
        if self._working is None or self._working.done():
            self._working = asyncio.create_task(self._work())

    async def _work(self) -> None:
        """Load the models that requests wait for, one after another."""
        while self._wanted:
            managed = self._wanted[0]
            try:
                async with self._changing:
                    await self._load(managed)
            except LlmrunError as error:
                self._note(f"{managed.known.name} could not be loaded: {error}")
                managed.refuse(error)
            except Exception as error:  # noqa: BLE001  no error may keep the next models waiting forever
                self._note(f"{managed.known.name} could not be loaded: {error!r}")
                managed.refuse(Unavailable("the model could not be loaded", state=State.FAILED.value))
            finally:
                self._wanted.remove(managed)

    async def _load(self, managed: ManagedModel) -> None:
        """Load a model, making room first if necessary, and admit the requests that wait for the model.

        Raises DoesNotFit before unloading any model if a recent attempt failed with no other model loaded.
        """
        now = asyncio.get_running_loop().time()
        if managed.too_large is not None and now < managed.too_large_until:
            raise managed.too_large.with_traceback(None)
        if managed.process is not None and managed.process.state is State.FAILED:
            await self._close(managed)
        while managed.is_wanted and managed.process is None:
            victim = self._least_recently_used()
            if victim is not None and self._room() < managed.memory:
                await self._make_room(victim, managed)
                continue
            try:
                await self._open(managed)
            except DoesNotFit as error:
                if victim is None:
                    managed.too_large, managed.too_large_until = error, now + TRY_AGAIN_S
                    raise
                await self._make_room(victim, managed)
        if managed.process is not None:
            managed.leaving = False
            managed.admit()
            self._unload_later(managed)  # all waiting clients may have left in the meantime

    async def _open(self, managed: ManagedModel) -> None:
        room = self._room()
        process = await self._opener(managed.known, None if room == math.inf else int(room))
        held = ExitStack()
        held.enter_context(in_use(managed.known.path))
        try:
            await process.start()
        except BaseException:
            await self._end(process, held)
            raise
        managed.held = held
        managed.process = process
        managed.used = asyncio.get_running_loop().time()
        managed.memory = facts_of(process).memory_bytes

    async def _make_room(self, victim: ManagedModel, wanted: ManagedModel) -> None:
        """Unload a model when its answers are complete. New requests for the model wait in the meantime.

        If another model becomes idle first, that model is unloaded instead.
        """
        victim.leaving = True
        idle = await _first_idle(self.loaded()[::-1])
        if wanted.is_wanted:
            self._note(f"unloading {idle.known.name} to make room for {wanted.known.name}")
            await self._close(idle)
        victim.leaving = False
        if victim.process is not None:
            victim.admit()

    async def _close(self, managed: ManagedModel) -> None:
        process, managed.process = managed.process, None
        if process is not None:
            managed.stop_timer()
            await self._end(process, managed.held)

    async def _end(self, process: ServedModel, held: ExitStack) -> None:
        """Close a process and then free the resources in `held`, even if this coroutine is cancelled."""

        async def end() -> None:
            with held:
                await process.close()

        await asyncio.shield(self._start(end()))

    def _least_recently_used(self) -> ManagedModel | None:
        """Return the model to unload next, preferably an idle model."""
        return next(reversed(self.loaded()), None)

    def _room(self) -> float:
        """Return the number of bytes that another model may use."""
        if self._limits.memory is None:
            return math.inf
        return self._limits.memory - sum(managed.memory for managed in self.loaded())

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _first_idle(models: Sequence[ManagedModel]) -> ManagedModel:
    """Wait until at least one of the models is idle, and return the first idle model."""
    while not (idle := [managed for managed in models if not managed.users]):
        waits = [asyncio.ensure_future(managed.idle.wait()) for managed in models]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
    return idle[0]


def _state_of(model: ServedModel, stale_s: float) -> str:
    if model.state is State.READY and model.load.beat_age_s > stale_s:
        return STUCK
    return model.state
