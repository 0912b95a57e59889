"""Information about the machine that several checks share. It is looked up on first use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmrun.base.machine.gpus import Gpu


@dataclass
class Machine:
    """The machine to examine. If `offline` is true, no check uses the network."""

    offline: bool = False

    @cached_property
    def system(self) -> dict[str, Any]:
        from llmrun.base.machine.system import system_facts

        return system_facts()

    @cached_property
    def gpus(self) -> Sequence[Gpu]:
        from llmrun.base.machine.gpus import gpus

        return gpus()
