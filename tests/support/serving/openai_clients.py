"""Creates clients of OpenAI's package. They are `Any`, because tests also send what its types do not allow."""

from __future__ import annotations

from typing import Any

import openai

from tests.support.serving.serve_process import Served

_OPTIONS = {"api_key": "none", "max_retries": 0}


def client_of(server: Served, **options: Any) -> Any:
    return openai.OpenAI(base_url=server.url, **{**_OPTIONS, **options})


def async_client_of(server: Served, **options: Any) -> Any:
    return openai.AsyncOpenAI(base_url=server.url, **{**_OPTIONS, **options})
