"""Point the real huggingface_hub in this process at another Hub."""

from __future__ import annotations

import builtins
import time
from typing import Any

import pytest

from tests.support.hub.fake_hub import Asked, FakeHub


def at_hub(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Replace the constants that huggingface_hub derived from HF_ENDPOINT at import, because it may be imported
    already."""
    from huggingface_hub import constants

    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "*")
    template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nowhere/token")


def settled(hub: FakeHub) -> list[Asked]:
    """Return every request so far.

    The Hub records a request after answering it, so this waits until the count stops growing.
    """
    seen = -1
    while seen != len(hub.asked):
        seen = len(hub.asked)
        time.sleep(0.05)
    return list(hub.asked)


def refuse_import(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Make importing the module fail, as huggingface_hub's modules do if HF_ENDPOINT is not a URL."""
    imported = builtins.__import__

    def refusing(module: str, *rest: Any, **others: Any) -> Any:
        if module == name:
            raise ValueError("bad endpoint")
        return imported(module, *rest, **others)

    monkeypatch.setattr(builtins, "__import__", refusing)
