"""Tests of GET /: the headers of the chat page, and who may load it."""

from __future__ import annotations

import hashlib
import re
from base64 import b64encode
from importlib.resources import files

from llmrun.serving.options import ServingOptions
from tests.support.serving.servers import serving

KEY = "a-long-enough-test-key"
HTML = files("llmrun.serving").joinpath("page/chat.html").read_text(encoding="utf-8")


def test_the_page_is_the_file_of_the_package() -> None:
    with serving() as server:
        reply = server.send("GET", "/")
    assert (reply.status, reply.body.decode()) == (200, HTML)
    assert reply.headers["content-type"] == "text/html; charset=utf-8"


def test_the_policy_allows_only_the_pages_own_scripts_and_styles() -> None:
    with serving() as server:
        reply = server.send("GET", "/")
    policy = dict(one.split(" ", 1) for one in reply.headers["content-security-policy"].split("; "))
    for tag in ("script", "style"):
        contents = re.findall(f"<{tag}>(.*?)</{tag}>", HTML, re.DOTALL)
        hashes = [b64encode(hashlib.sha256(content.encode()).digest()).decode() for content in contents]
        assert policy.pop(f"{tag}-src") == " ".join(f"'sha256-{each}'" for each in hashes)
        assert HTML.count(f"<{tag}") == len(contents) > 0
    assert policy == {
        "default-src": "'none'",
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    assert reply.headers["referrer-policy"] == "no-referrer"
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert reply.headers["cross-origin-opener-policy"] == "same-origin"


def test_the_page_needs_nothing_from_elsewhere() -> None:
    named = set(re.findall(r"\w+://[\w.]+", HTML))
    assert named == {"http://www.w3.org"}  # a namespace in the icon
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|\bon\w+=", HTML)


def test_the_page_needs_no_key_but_an_allowed_host() -> None:
    with serving(options=ServingOptions(keys=(KEY,))) as server:
        assert server.send("GET", "/").status == 200
        assert server.send("GET", "/v1/models").status == 401
        assert server.send("GET", "/", headers={"Host": "evil.example"}).status == 403
        assert server.send("GET", "/", headers={"Origin": "https://evil.example"}).status == 403
        assert server.send("GET", "/", headers={"Sec-Fetch-Site": "cross-site"}).status == 403
        assert server.send("POST", "/", {}).status == 405
