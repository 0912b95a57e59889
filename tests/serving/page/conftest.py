"""Fixtures of the tests of the chat page: one Chromium for all tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.browser.live_page import Browser, browser


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("chromium")) as running:
        yield running
