"""Finds the places of images in rendered chat templates and raw prompts, and turns such prompts into tokens.

Templates write the placeholder of their model family for a part of the type "image". Only placeholders that the
template itself wrote are replaced: those in messages are protected, like control strings. Templates that ignore such
parts, or that need texts as content, get an unguessable mark in the text instead.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import structs

from llmrun.base.amounts import counted
from llmrun.base.errors import TemplateRefused, UsageError
from llmrun.base.types import IMAGE_ROW
from llmrun.engine.image_rows import PromptImage, PromptImages
from llmrun.engine.images import check_count
from llmrun.engine.requests import IMAGE, IMAGE_MARKER, image_parts, is_image
from llmrun.model.tokenizers.vocabulary import MARK
from llmrun.model.vision.layout import Words

if TYPE_CHECKING:
    from llmrun.engine.requests import ChatPrompt, TextPrompt, TokenPrompt
    from llmrun.model.tokenizers.text_tokenizer import Tokenizer
    from llmrun.model.vision.layout import Projector


class ImageMarks:
    """Marks that stand for the images of one conversation in its rendered text."""

    def __init__(self, prompt: ChatPrompt, projector: Projector, tokenizer: Tokenizer) -> None:
        """Raise UsageError if the conversation has too many images, or lacks the file of one."""
        self._prompt, self._projector, self._tokenizer = prompt, projector, tokenizer
        self._parts = list(image_parts(prompt.messages))
        check_count(len(self._parts))
        for number, part in enumerate(self._parts):
            if not prompt.images.get(str(part.get(IMAGE))):
                raise UsageError(f"image {number + 1} is missing: the request has no file with its key")
        self._nonce = f"IMAGE{secrets.token_hex(8)}x"
        self._mark = re.compile(rf"{self._nonce}(\d+)x")
        longest_first = sorted(projector.placeholders, key=len, reverse=True)
        self._placeholder = re.compile("|".join(map(re.escape, longest_first)))

    def protect(self, text: str) -> str:
        """Protect a text of the conversation, so that neither control strings nor placeholders count in it."""
        protected = self._tokenizer.protect(text)
        return self._placeholder.sub(lambda found: found[0][0] + MARK + found[0][1:], protected)

    @property
    def may_be_parts(self) -> bool:
        """False if texts of a message form a control string or placeholder when a template joins them."""
        texts = [[*map(_text_of, _parts_of(message))] for message in self._prompt.messages]
        return all(self.protect("".join(own)) == "".join(map(self.protect, own)) for own in texts)

    @property
    def as_parts(self) -> ChatPrompt:
        """The conversation for templates that write placeholders."""
        return self._with_contents(
            lambda parts: [{"type": IMAGE} if is_image(part) else part for part in parts],
        )

    @property
    def as_texts(self) -> ChatPrompt:
        """The conversation with marks in its texts."""
        marks = (f"{self._nonce}{number}x" for number in range(len(self._parts)))
        return self._with_contents(
            lambda parts: "".join(next(marks) if is_image(part) else _text_of(part) for part in parts)
        )

    def _with_contents(self, convert: Any) -> ChatPrompt:
        messages = [
            {**message, "content": convert(content)}
            if isinstance(content := message.get("content"), list | tuple)
            else message
            for message in self._prompt.messages
        ]
        return structs.replace(self._prompt, messages=messages)

    def replaced(self, rendered: str) -> str | None:
        """Replace the placeholders in a rendered template by marks. Returns None if their number is wrong."""
        numbers = iter(range(len(self._parts)))
        if len(self._placeholder.findall(rendered)) != len(self._parts):
            return None
        return self._placeholder.sub(lambda found: f"{self._nonce}{next(numbers)}x", rendered)

    def check(self, rendered: str, template: str) -> None:
        """Raise TemplateRefused if the text lacks a mark, unless the template left out the whole message."""
        found = self._mark.findall(rendered)
        if unknown := set(found) - set(map(str, range(len(self._parts)))):
            raise TemplateRefused(f"chat template leaves out images: {template}: it changes {len(unknown)} of them")
        written, number = [*map(int, found)], 0
        for message in self._prompt.messages:
            parts = _parts_of(message)
            own = [*range(number, number + sum(map(is_image, parts)))]
            number += len(own)
            texts = [text for part in parts if not is_image(part) and (text := self.protect(_text_of(part)).strip())]
            is_left_out = not any(each in written for each in own) and texts and not any(t in rendered for t in texts)
            if [each for each in written if each in own] != own and not is_left_out:
                raise TemplateRefused(f"chat template leaves out images: {template}")

    def tokens(self, rendered: str) -> tuple[list[int], PromptImages]:
        """Turn a rendered text with marks into tokens. Raises UsageError for an image that cannot be read."""
        pieces = self._mark.split(rendered)  # texts alternate with the numbers of images
        images = []
        for number in map(int, pieces[1::2]):
            part = self._parts[number]
            data, detail = self._prompt.images[part[IMAGE]], str(part.get("detail", "auto"))
            images.append(PromptImage.of(f"image {number + 1}", data, detail, self._projector))
        return _encoded(pieces[::2], images, self._projector, self._tokenizer)

    def shown(self, rendered: str) -> str:
        """Return a text with marks as the template would write it."""
        return self._mark.sub(self._projector.placeholders[0], rendered)


def _parts_of(message: Mapping[str, Any]) -> Sequence[Any]:
    """Return the parts of a message's content, or () if the content is text."""
    content = message.get("content")
    return content if isinstance(content, list | tuple) else ()


def _text_of(part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) else part
    return text if isinstance(text, str) else ""


def raw_tokens(prompt: TextPrompt, projector: Projector, tokenizer: Tokenizer) -> tuple[list[int], PromptImages]:
    """Turn a raw prompt with images into tokens. Raises UsageError for images without a marker, and vice versa."""
    texts = prompt.text.split(IMAGE_MARKER)
    check_count(len(prompt.images))
    if len(texts) != len(prompt.images) + 1:
        raise UsageError(
            f"{counted(len(prompt.images), 'image')} for a raw prompt with {counted(len(texts) - 1, 'marker')}",
            hint=f"write {IMAGE_MARKER} once for each image, where the image belongs",
        )
    texts = [text.replace(MARK, 2 * MARK) for text in texts]
    return _encoded(texts, _without_detail(prompt.images, projector), projector, tokenizer)


def images_in_tokens(prompt: TokenPrompt, projector: Projector) -> PromptImages:
    """Find the images of a prompt of tokens. Raises UsageError if the images do not fit the tokens."""
    check_count(len(prompt.images))
    return PromptImages(prompt.tokens, _without_detail(prompt.images, projector), projector)


def _without_detail(files: Sequence[bytes], projector: Projector) -> list[PromptImage]:
    return [PromptImage.of(f"image {number}", data, "auto", projector) for number, data in enumerate(files, start=1)]


def _encoded(
    texts: Sequence[str], images: Sequence[PromptImage], projector: Projector, tokenizer: Tokenizer
) -> tuple[list[int], PromptImages]:
    """Turn texts with an image between every two of them into tokens."""
    parts: list[str | int] = [texts[0]]
    for image, text in zip(images, texts[1:], strict=True):
        for piece in (*image.layout.pieces, Words(text)):
            if not isinstance(piece, Words):
                parts += [IMAGE_ROW] * piece.count
            elif isinstance(parts[-1], str):
                parts[-1] += piece.text  # one text, because tokens may span both
            else:
                parts.append(piece.text)
    tokens: list[int] = tokenizer.encode_rendered(parts).tolist()
    return tokens, PromptImages(tokens, images, projector)
