"""Exact patterns for dates and times. They replace llguidance's own in the schema that becomes a grammar.

llguidance enforces "format" with patterns that accept 29 February in every year, and a leap second at any time of day
(RFC 3339, sections 5.6 and 5.7). The patterns here handle leap years, and they leave out leap seconds, which
generated text does not need. So the final validation, which uses the original schema, accepts everything that matches
them (see formats.py). llguidance enforces "format" in the same way in all drafts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from llmrun.engine.constraint.keywords import subschemas

_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DAY = "(0[1-9]|1[0-9]|2[0-8])"  # of every month
_MONTH_AND_DAY = f"((0[1-9]|1[0-2])-{_DAY}|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)"
_DATE = f"([0-9]{{4}}-{_MONTH_AND_DAY}|{_LEAP_YEAR}-02-29)"
_HOURS_AND_MINUTES = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOURS_AND_MINUTES}:[0-5][0-9](\.[0-9]+)?([Zz]|[+-]{_HOURS_AND_MINUTES})"

PATTERNS: Final = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}[Tt]{_TIME}$"}


def with_exact_formats(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a JSON Schema that has an exact pattern in place of each "format" for dates or times.

    Subschemas that have a "pattern" of their own keep their format. Raises ValueError, TypeError or RecursionError if
    the schema is not JSON.
    """
    text = json.dumps(dict(schema))
    if '"format"' not in text:  # a copy of 2 MB takes 0.15 s
        return dict(schema)
    copied: dict[str, Any] = json.loads(text)
    for _, found in subschemas(copied):
        name = found.get("format")
        if isinstance(name, str) and name in PATTERNS and "pattern" not in found:
            del found["format"]
            found["pattern"] = PATTERNS[name]
    return copied
