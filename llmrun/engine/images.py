"""The errors for images in prompts.

Importing this module is fast, because the server and the command line use the same errors.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmrun.base.amounts import counted
from llmrun.base.errors import ContextExceeded, UsageError
from llmrun.formats.images.header import MOST_IMAGES


def text_only(model: str) -> UsageError:
    """Return the error for an image that was sent to a model that reads only text."""
    return UsageError(
        f"images cannot be read: {model} is a text-only model",
        hint="use a model that reads images, such as gemma3:4b",
    )


def without_projector(model: str) -> UsageError:
    """Return the error for an image that was sent to a model without an open projector."""
    return UsageError(
        f"images cannot be read: {model} was opened without a projector",
        hint="use a model that reads images, and open it with its projector (--mmproj FILE)",
    )


def misplaced(where: str) -> UsageError:
    """Return the error for an image in a prompt that cannot have one. `where` is such as "raw completions"."""
    return UsageError(f"images are not supported in {where}", hint="send images in the messages of a conversation")


def check_count(n: int) -> None:
    """Raise UsageError if a request has too many images."""
    if n > MOST_IMAGES:
        raise UsageError(f"too many images: {n}; the limit is {MOST_IMAGES} per request", hint="send fewer images")


def too_long(tokens: int, limit: int, images: Sequence[int], fewest: int) -> ContextExceeded:
    """Return the error for a prompt with images that does not fit in the context.

    images  the tokens of each image
    fewest  the tokens of the smallest image
    """
    if len(images) == 1:
        taken = f"the image takes {counted(images[0], 'token')}"
    elif len(set(images)) == 1:
        taken = f"the {len(images)} images take {counted(images[0], 'token')} each"
    else:
        counts = [f"{n:,}" for n in images]
        taken = f"the {len(images)} images take {', '.join(counts[:-1])} and {counts[-1]} tokens"
    if max(images) > fewest:
        fewer = "a smaller image" if len(images) == 1 else "fewer or smaller images"
        ways = f"send {fewer}, lower --image-max-tokens, or "
    else:
        ways = "send fewer images, or " if len(images) > 1 else ""
    return ContextExceeded.by_prompt(tokens, limit, hint=f"{taken}: {ways}raise --ctx-size")
