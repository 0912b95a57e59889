"""Tests of turning a client's exceptions into our own messages."""

from __future__ import annotations

import httpx2
import pytest

from llmrun.base.errors import NetworkError
from llmrun.hub.remote.network_errors import CHECK_ENDPOINT, translated


@pytest.mark.parametrize(
    ("endpoint", "hint"),
    [
        ("http://127.0.0.1:1/hub", CHECK_ENDPOINT),
        ("http://mirror.invalid", ""),
        ("http://[::1", ""),
        (None, ""),
    ],
)
def test_a_host_that_cannot_be_reached_is_blamed_on_hf_endpoint_only_where_it_names_that_host(
    monkeypatch: pytest.MonkeyPatch, endpoint: str | None, hint: str
) -> None:
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    if endpoint:
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
    with pytest.raises(NetworkError, match=r"^unreachable \(") as caught, translated():
        httpx2.get("http://127.0.0.1:1/m.gguf", trust_env=False)
    assert caught.value.hint == hint
