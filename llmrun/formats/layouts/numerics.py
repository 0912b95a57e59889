"""The version of the CPU engine's numerics: two engines with equal versions compute equal bits from equal inputs.

It is in this room so that kernels, plans, saved states and recordings can all import it.
"""

from __future__ import annotations

from typing import Final

NUMERICS: Final = 1  # raise it on purpose, in the commit that changes a bit of any result
