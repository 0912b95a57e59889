"""The base classes of drafters, which predict the next tokens of an answer.

A step runs a draft together with the last token of the answer, and returns logits for all of these rows. The engine
then draws one token after another, as it does without a draft. A draft token is right if it equals the token drawn at
its position, so the answer is the same with any draft, at any temperature. Only the speed depends on drafts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from llmrun.backends.base import ROWS_PER_ANSWER

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llmrun.engine.requests import Request

LONGEST_DRAFT: Final = ROWS_PER_ANSWER - 1  # tokens

# Draft tokens of the same kind are accepted about equally often: (drafter, evidence).
Kind = tuple[str, int]
ANY: Final = -1  # evidence that stands for all tokens of a drafter

# Returns whether one more token, after tokens of the given kinds, is worth a drafter's time.
Worth = Callable[[Sequence[Kind]], bool]


class Draft(Struct, frozen=True):
    """Predicted tokens, each with the kind under which its acceptance is counted.

    seconds  how long the prediction took, without the prefill of the prompt
    """

    tokens: tuple[int, ...] = ()
    kinds: tuple[Kind, ...] = ()
    seconds: float = 0.0

    def first(self, n: int) -> Draft:
        """Return the draft's first n tokens."""
        return self if n >= len(self.tokens) else Draft(self.tokens[:n], self.kinds[:n], self.seconds)


NO_DRAFT = Draft()


class Drafter(ABC):
    """Predicts the tokens of one answer.

    name           the first part of its tokens' kinds
    token_seconds  the time to draft a token, or 0 if it is negligible
    takes_hidden   True while the drafter needs the model's hidden states
    image_rows     the number of rows of images in the prompt, which the drafter does not see: its tokens and positions
                   are those of the conversation without images
    """

    name: str
    takes_hidden = False
    image_rows = 0

    @property
    def token_seconds(self) -> float:
        return 0.0

    @abstractmethod
    def draft(self, tokens: Sequence[int], most: int, worth: Worth) -> Draft:
        """Predict at most `most` tokens that follow `tokens`: the prompt without its images, and the answer so far.

        The tokens of each call begin with those of the previous call. Drafters whose tokens take time call `worth`
        before each token. This method never raises an error.
        """

    def observe_hidden(self, tokens: Sequence[int], first: int, hidden: NDArray[np.float32]) -> None:  # noqa: B027  (optional)
        """Receive the hidden states of a step, float32[rows, hidden size], at the positions from `first` on.

        `tokens` are those of `draft` before the step. Later rows belong to draft tokens, which may be wrong.
        This method never raises an error.
        """

    def release(self) -> None:  # noqa: B027  (optional)
        """Free the drafter's resources. This method may be called at any time, even before further calls of `draft`."""


class DraftSource(ABC):
    """Creates drafters, and may store finished answers for later drafts.

    expected  for each kind, the acceptance rate to assume until it has been measured
    error     why the source no longer drafts anything, or an empty string
    """

    expected: Mapping[Kind, float]
    error = ""

    @abstractmethod
    def drafter(self, request: Request) -> Drafter:
        """Return a drafter for a request's answer."""

    def learn(self, tokens: Sequence[int]) -> None:  # noqa: B027  (optional)
        """Remember the tokens of a finished answer."""

    def forget(self) -> None:  # noqa: B027  (optional)
        """Forget all finished answers."""

    def cancel(self) -> None:  # noqa: B027  (optional)
        """Stop the current draft, or else the next one, like `Backend.cancel`. Signal handlers may call this method."""

    def close(self) -> None:  # noqa: B027  (optional)
        """Free all resources."""
