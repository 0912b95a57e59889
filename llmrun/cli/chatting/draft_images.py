"""The images in the question that the user is writing.

In the text of a draft, one character stands for each image, so the user can move over it or delete it like any other
character. The characters are Unicode noncharacters, which texts never contain. On screen, each is shown as a label.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from llmrun.base.errors import UsageError
from llmrun.cli.arguments.images import COMMAND, GivenImage
from llmrun.cli.chatting.conversation import image_label, joined_words
from llmrun.cli.chatting.events import ImageShown
from llmrun.cli.chatting.image_files import ImageFileError
from llmrun.cli.console.output import out
from llmrun.cli.console.terminal import visible_line
from llmrun.formats.images.header import MOST_IMAGES, ImageHeader

if TYPE_CHECKING:
    from llmrun.cli.chatting.events import QuestionAsked
    from llmrun.model.vision.layout import ImageLayout

_FIRST: Final = 0xFDD0
SIGNS: Final = tuple(chr(_FIRST + number) for number in range(MOST_IMAGES))
_SIGN: Final = re.compile(f"([{SIGNS[0]}-{SIGNS[-1]}])")
_TO_PLAIN: Final = dict.fromkeys(map(ord, SIGNS), "\ufffd")


def without_signs(text: str) -> str:
    """Return a text from outside, in which no character stands for an image."""
    return text if text.isascii() else text.translate(_TO_PLAIN)


@dataclass(slots=True)
class DraftImages:
    """The images of drafts by the character that stands for them.

    measure  returns how the model sees an image, or None if that is unknown
    before   the number of images in the conversation, after which the images of the draft are numbered
    """

    measure: Callable[[ImageHeader], ImageLayout | None] = lambda header: None
    before: int = 0
    _images: dict[str, GivenImage] = field(default_factory=dict)
    _paths: dict[str, str] = field(default_factory=dict)  # by sign, the path as the user gave it

    def add(self, image: GivenImage, path: str = "") -> str:
        """Return the character that stands for an image. Raises UsageError if the draft has too many images.

        path  the text with which the user named the image, or "" if only the name of the file is known
        """
        free = [sign for sign in SIGNS if sign not in self._images]
        if not free:
            raise UsageError(f"{COMMAND}: a question can have at most {MOST_IMAGES} images")
        self._images[free[0]] = image
        self._paths[free[0]] = path or image.name
        return free[0]

    def keep_only(self, text: str) -> None:
        """Forget all images that are not in a text."""
        for sign in [sign for sign in self._images if sign not in text]:
            del self._images[sign], self._paths[sign]

    def is_image(self, sign: str) -> bool:
        return sign in self._images

    def path(self, sign: str) -> str:
        """Return the path of an image as the user gave it."""
        return self._paths[sign]

    def label(self, sign: str, text: str) -> str | None:
        """Return the text to show for an image of a draft, or None for any other character.

        text  the whole draft, in which images are numbered in their order
        """
        image = self._images.get(sign)
        if image is None:
            return None
        order = [each for each in text if each in self._images]
        number = self.before + 1 + order.index(sign)
        layout = self.measure(image.header)
        tokens = "" if layout is None else f", {layout.rows:,} tokens"
        return visible_line(image_label(number, _shown(image, 0), tokens))

    def labelled(self, text: str) -> str:
        """Return a draft as text in which labels stand for images."""
        return "".join(self.label(piece, text) or piece for piece in _SIGN.split(text))

    def from_labels(self, text: str, draft: str) -> str:
        """Return a draft that was edited as a text with labels. `draft` is the draft before that."""
        text = without_signs(text)
        for sign in dict.fromkeys(each for each in draft if each in self._images):
            text = text.replace(self.label(sign, draft) or sign, sign)
        return text

    def parted(self, text: str) -> tuple[str, tuple[ImageShown, ...]]:
        """Return the text of a question and its images."""
        words, shown = "", []
        for piece in _SIGN.split(text):
            image = self._images.get(piece)
            if image is None:
                words += piece
            else:
                shown.append(_shown(image, len(words)))
        return words, tuple(shown)

    def within(self, text: str) -> list[GivenImage]:
        """Return the images in a draft."""
        return [image for sign, image in self._images.items() if sign in text]

    def draft_of(self, asked: QuestionAsked, file_of: Callable[[ImageShown], bytes]) -> str:
        """Return a saved question as a draft, without the images for which `file_of` raises ImageFileError."""
        pieces, start = [], 0
        for image in asked.images:
            pieces.append(without_signs(asked.text[start : image.at]))
            start = image.at
            try:
                data = file_of(image)
            except ImageFileError as error:
                out.note(str(error))
                continue
            header = ImageHeader(image.format, image.width, image.height)
            pieces.append(self.add(GivenImage(image.name, data, image.sha256, header)))
        return joined_words([*pieces, without_signs(asked.text[start:])])

    def leading(self, text: str) -> str:
        """Return the images at the beginning of a draft, with the spaces around them, or "" if there are none."""
        lead = text[: len(text) - len(text.lstrip("".join(SIGNS) + " \n"))]
        return lead if any(each in self._images for each in lead) else ""


def _shown(image: GivenImage, at: int) -> ImageShown:
    header = image.header
    return ImageShown(at, image.sha256, image.name, header.format, header.width, header.height)
