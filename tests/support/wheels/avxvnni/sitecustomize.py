"""Makes llmrun believe that this processor has AVX-VNNI instead of AVX-512. vpdpbusd.c emulates the instruction.

Python imports this module when it starts, if this folder is in its path.
"""

from __future__ import annotations

from llmrun.base.compiled import host

_features = host.host_features


def _with_avx_vnni() -> frozenset[str]:
    return frozenset(name for name in _features() if not name.startswith("avx512")) | {"avxvnni"}


host.host_features = _with_avx_vnni
