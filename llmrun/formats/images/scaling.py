"""Describes what a model sees of an image: the image in one or more sizes, from each of which boxes are cut."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from msgspec import Struct

IMAGE: Final = -1  # the source of a `Scaled` that is made from the image itself


class Filter(StrEnum):
    """A filter of Pillow's `resize`, which widens the filter when it shrinks an image."""

    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    LANCZOS = "lanczos"


class Box(Struct, frozen=True):
    """A part of an image, in pixels. `right` and `bottom` are excluded."""

    left: int
    top: int
    right: int
    bottom: int


class Scaled(Struct, frozen=True):
    """An image stretched to a size, and the boxes of it that the model sees, each as a tile of its own.

    boxes   () if the size is only the source of another one
    source  IMAGE, or the index of an earlier `Scaled` in the same list, which is stretched again
    """

    width: int
    height: int
    filter: Filter
    boxes: tuple[Box, ...]
    source: int = IMAGE
