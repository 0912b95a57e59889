"""Patterns for the formats of JSON Schema that llguidance enforces inexactly or not at all.

llguidance enforces "format" with patterns that accept 29 February in every year, and a leap second at any time of day
(RFC 3339, sections 5.6 and 5.7). The patterns here handle leap years, and leave out leap seconds, which
generated text does not need. Everything that matches these patterns also passes the final validation, which uses the
original schema (see validation_worker.py). llguidance enforces "format" in the same way in all drafts.
"""

from __future__ import annotations

from typing import Any, Final

_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DAY = "(0[1-9]|1[0-9]|2[0-8])"  # a day that exists in every month
_MONTH_AND_DAY = f"((0[1-9]|1[0-2])-{_DAY}|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)"
_DATE = f"([0-9]{{4}}-{_MONTH_AND_DAY}|{_LEAP_YEAR}-02-29)"
_HOURS_AND_MINUTES = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOURS_AND_MINUTES}:[0-5][0-9](\.[0-9]+)?([Zz]|[+-]{_HOURS_AND_MINUTES})"

_POINTER = "(/([^/~]|~[01])*)*"  # RFC 6901

PATTERNS: Final = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}[Tt]{_TIME}$",
    "json-pointer": f"^{_POINTER}$",
    "relative-json-pointer": f"^(0|[1-9][0-9]*)(#|{_POINTER})$",
}
# Formats of JSON Schema that neither llguidance nor a pattern here enforces
_NOT_ENFORCED = ("idn-email", "idn-hostname", "iri", "iri-reference", "regex", "uri-reference", "uri-template")
_ENFORCED = ("duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")


def replace_format(found: dict[str, Any]) -> None:
    """Replace the "format" of a schema with an exact pattern, unless the schema has a pattern of its own.

    Formats that JSON Schema does not define, such as OpenAPI's int32 and password, are annotations without an effect.
    """
    name = found.get("format")
    if not isinstance(name, str):
        return
    if name in PATTERNS and "pattern" not in found:
        del found["format"]
        found["pattern"] = PATTERNS[name]
    elif name not in (*PATTERNS, *_ENFORCED, *_NOT_ENFORCED):
        del found["format"]
