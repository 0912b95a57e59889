"""A check that a request is refused with the name of its field."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from llmrun.protocol.errors import InvalidField
from llmrun.protocol.openai.requests import Parsed


def refused(parse: Callable[..., Parsed], param: str, code: str | None = None, /, **fields: Any) -> str:
    """Assert that a request with these fields is refused because of `param`, and return the message."""
    with pytest.raises(InvalidField) as caught:
        parse(**fields)
    assert caught.value.param == param, str(caught.value)
    assert code is None or caught.value.code == code
    return str(caught.value)
