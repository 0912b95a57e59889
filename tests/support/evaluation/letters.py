"""A tokenizer whose tokens are bytes, with an optional BOS and EOS."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from llmrun.backends.scripted import ScriptedTokenizer

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Letters(ScriptedTokenizer):
    """Adds `bos` and `eos` around a text, if they are given."""

    def __init__(self, bos: int | None = None, eos: int | None = None) -> None:
        super().__init__()
        self._bos, self._eos = bos, eos

    @property
    def bos_id(self) -> int | None:
        return self._bos

    @property
    def eos_id(self) -> int | None:
        return self._eos

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> NDArray[np.int32]:
        del parse_special
        before = [] if self._bos is None or not add_special else [self._bos]
        after = [] if self._eos is None or not add_special else [self._eos]
        return np.array([*before, *text.encode(), *after], np.int32)
