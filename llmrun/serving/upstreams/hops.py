"""Detects loops between servers that are each other's upstreams.

Every server with upstreams has a random name. It adds the name to the header `Via` (RFC 9110, 7.6.3) of the requests
that it sends, and to the models that it lists for other servers. It refuses requests that it has
sent before, and ignores listed models that lead back to it.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import Any, Final

from starlette.datastructures import Headers

from llmrun.serving.refusals import SERVER, Refused

MOST_HOPS: Final = 8
_OURS: Final = re.compile(r"\bllmrun-[0-9a-f]{16}\b")
_FIELD: Final = "via"  # the field of a model with the names of all servers on the way to it


class Hops:
    """The name of this server among the servers on a request's way."""

    def __init__(self) -> None:
        self.name = f"llmrun-{secrets.token_hex(8)}"

    def via(self, headers: Headers) -> str:
        """Return the header for a request that is forwarded. Raises Refused if it would go in circles."""
        passed = _OURS.findall(",".join(headers.getlist(_FIELD)))
        if self.name in passed:
            words = "the request came back to this server, because its upstreams forward to it"
            raise Refused(508, f"{words}; remove one --upstream", kind=SERVER, code="loop_detected")
        if len(passed) >= MOST_HOPS:
            words = f"the request has passed {len(passed)} servers, the limit is {MOST_HOPS}"
            raise Refused(508, f"{words}; remove one --upstream", kind=SERVER, code="loop_detected")
        return ", ".join(f"1.1 {name}" for name in (*passed, self.name))

    def first_via(self) -> str:
        """Return the header for a request of this server itself."""
        return f"1.1 {self.name}"

    def leads_back(self, model: Mapping[str, Any]) -> bool:
        """Return whether a model that an upstream lists is reached through this server, or is too far away."""
        names = _names(model)
        return self.name in names or len(names) >= MOST_HOPS

    def shown_to(self, headers: Headers, model: Mapping[str, Any]) -> dict[str, Any]:
        """Return a model as this server lists it. Only other servers get the names on the way to it."""
        shown = {name: value for name, value in model.items() if name != _FIELD}
        if _OURS.search(",".join(headers.getlist(_FIELD))):
            shown[_FIELD] = [self.name, *_names(model)]
        return shown


def _names(model: Mapping[str, Any]) -> list[str]:
    names = model.get(_FIELD)
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
