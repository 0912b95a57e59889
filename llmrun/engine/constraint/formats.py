"""Dates and times, with leap years and leap seconds.

llguidance enforces ten formats with regular expressions while the answer is generated. In the JSON Schema test suite,
they accept invalid strings in three of the ten: 29 February in common years, and leap seconds at the wrong time of day
(RFC 3339, sections 5.6 and 5.7). Only these three are checked here, so that a verdict does not depend on which
optional libraries of jsonschema are installed.
"""

from __future__ import annotations

import re
from calendar import monthrange

_DATE = re.compile(r"(\d{4})-(\d\d)-(\d\d)", re.ASCII)
_TIME = re.compile(r"(\d\d):(\d\d):(\d\d)(?:\.\d+)?(?:[Zz]|([+-])(\d\d):(\d\d))", re.ASCII)


def is_date(text: object) -> bool:
    """Return whether the text is a full-date of RFC 3339. Values that are not text pass, as in JSON Schema."""
    if not isinstance(text, str):
        return True
    found = _DATE.fullmatch(text)
    if found is None:
        return False
    year, month, day = map(int, found.groups())
    # The calendar repeats every 400 years, and Python's begins with year 1.
    return 1 <= month <= 12 and 1 <= day <= monthrange(2000 + year % 400, month)[1]


def is_time(text: object) -> bool:
    """Return whether the text is a full-time of RFC 3339."""
    if not isinstance(text, str):
        return True
    found = _TIME.fullmatch(text)
    if found is None:
        return False
    hour, minute, second = (int(found[group]) for group in (1, 2, 3))
    ahead, behind = (int(found[group] or 0) for group in (5, 6))
    offset = (ahead * 60 + behind) * (-1 if found[4] == "-" else 1)
    if hour > 23 or minute > 59 or ahead > 23 or behind > 59:
        return False
    return second < 60 or (second == 60 and (hour * 60 + minute - offset) % 1440 == 1439)


def is_date_time(text: object) -> bool:
    """Return whether the text is a date-time of RFC 3339."""
    return not isinstance(text, str) or (is_date(text[:10]) and text[10:11] in ("T", "t") and is_time(text[11:]))
