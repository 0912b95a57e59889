"""Chooses the names by which a model calls tools."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence

NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}", re.ASCII)  # the names that OpenAI's API allows
_LONGEST = 64
_OTHERS = re.compile(r"[^a-zA-Z0-9_-]", re.ASCII)


def exposed_names(tools: Sequence[tuple[str, str]]) -> list[str]:
    """Return a distinct name for each (server, tool), in the same order. Commands have the server "".

    Commands keep their names, which must be valid and distinct. The name of a server's tool does not depend on the
    order of the tools. If several tools would have the same name, it is prefixed with the server's name, as in
    `time_now`. If that does not make it distinct, or makes it too long, it ends with part of a hash.
    """
    taken = {tool for server, tool in tools if not server}
    names = {key: _OTHERS.sub("_", key[1]) or "tool" for key in tools if key[0]}
    shared = Counter(names.values())
    for (server, tool), name in names.items():
        if shared[name] > 1 or name in taken:
            names[server, tool] = f"{_OTHERS.sub('_', server)}_{name}"
    shared = Counter(names.values())
    unusual = sorted(key for key, name in names.items() if shared[name] > 1 or name in taken or len(name) > _LONGEST)
    taken |= {name for key, name in names.items() if key not in set(unusual)}
    for key in unusual:
        names[key] = _distinct(names[key], key, taken)
        taken.add(names[key])
    return [names[key] if key[0] else key[1] for key in tools]


def _distinct(name: str, key: tuple[str, str], taken: set[str]) -> str:
    attempt = 0
    while True:
        digest = hashlib.sha256(json.dumps([*key, attempt]).encode()).hexdigest()[:8]
        distinct = f"{name[: _LONGEST - 9]}_{digest}"
        if distinct not in taken:
            return distinct
        attempt += 1
