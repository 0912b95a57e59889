"""Checks that requests are accepted, or refused with a clear error that names the field."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import event

from llmrun.base.errors import LlmrunError
from llmrun.serving.protocol.errors import InvalidField, api_error, openai_body
from llmrun.serving.protocol.parsed import Parsed


def refused(parse: Callable[..., Parsed], param: str, code: str | None = None, /, **fields: Any) -> str:
    """Assert that a request with these fields is refused because of `param`, and return the message."""
    with pytest.raises(InvalidField) as caught:
        parse(**fields)
    assert caught.value.param == param, str(caught.value)
    assert code is None or caught.value.code == code
    return str(caught.value)


def accepted(parse: Callable[[], object]) -> bool:
    """Return whether a random request is valid. Otherwise, check the error that its client gets."""
    error = _refusal(parse)
    if error is None:
        event("accepted")
        return True
    event("refused")
    found = api_error(error)
    assert found.status in (400, 404)
    assert found.message.isprintable()
    assert len(json.dumps(openai_body(found))) < 2000
    return False


def _refusal(parse: Callable[[], object]) -> LlmrunError | None:
    try:
        parse()
    except LlmrunError as error:
        return error
    return None
