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
        self.bos_id, self.eos_id = bos, eos

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> NDArray[np.int32]:
        del parse_special
        before = [] if self.bos_id is None or not add_special else [self.bos_id]
        after = [] if self.eos_id is None or not add_special else [self.eos_id]
        return np.array([*before, *text.encode(), *after], np.int32)
