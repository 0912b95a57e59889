"""Tests of the page docs/api-fields.md, which scripts/api_fields generates from the declarations of the APIs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from llmrun.serving.protocol.openapi import ROUTES

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "api-fields.md"


def test_the_page_is_current() -> None:
    made = subprocess.run([sys.executable, "scripts/api_fields"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert PAGE.read_text(encoding="utf-8") == made.stdout, "type: scripts/api_fields > docs/api-fields.md"


def test_it_has_every_request_and_no_empty_table() -> None:
    text = PAGE.read_text(encoding="utf-8")
    titles = re.findall("^## (.*)$", text, re.MULTILINE)
    assert [route.path for route in ROUTES if route.request is not None and f"POST {route.path}" not in titles] == []
    assert len(titles) == len({*titles})
    assert all("\n| `" in section or "\nFields: " in section for section in text.split("\n## ")[1:])
