"""Resizes pictures with the filters of Pillow's `resize`, byte for byte, on every machine.

The models' preprocessing is defined with Pillow. Compilers may fuse Pillow's multiplications and additions, and Pillow
uses the sine of the system, so its pixels can differ between machines. Here, each coefficient is computed with single
operations in float64 and a sine of our own, and is then rounded to 22 bits. The sums of pixels times coefficients are
integers below 2**53, which float64 represents exactly, so BLAS can multiply the matrices in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from math import ceil, pi
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from llmrun.formats.images.scaling import IMAGE, Filter, Scaled

Picture = NDArray[np.uint8]  # uint8[height, width, 3]
_Floats = NDArray[np.float64]

VERSION: Final = 1  # increases whenever a change of this file changes pixels

_SCALE: Final = 1 << 22  # the factor of the integer coefficients
_BLOCK: Final = 16  # columns or rows of the result per matrix product; larger blocks multiply more zeros
_BAND_BYTES: Final = 4 << 20  # float64 pixels per matrix product; smaller bands need too many calls of NumPy


def tiles(picture: Picture, scaled: Sequence[Scaled]) -> list[Picture]:
    """Return the boxes of all `scaled`, in their order."""
    pictures: list[Picture] = []
    for one in scaled:
        source = picture if one.source == IMAGE else pictures[one.source]
        pictures.append(resized(source, one.width, one.height, one.filter))
    return [
        done[box.top : box.bottom, box.left : box.right]
        for done, one in zip(pictures, scaled, strict=True)
        for box in one.boxes
    ]


def resized(picture: Picture, width: int, height: int, name: Filter) -> Picture:
    """Return a picture stretched to a size.

    The order of the directions matters, because the pixels are rounded in between. Pillow 13 uses the same order, while
    Pillow 12 always begins with the columns.
    """
    rows, columns = len(picture) - height, picture.shape[1] - width  # how much smaller the result is
    if rows > max(0, 2 * columns):
        return _resized_columns(_resized_rows(picture, height, name), width, name)
    return _resized_rows(_resized_columns(picture, width, name), height, name)


def _resized_columns(picture: Picture, width: int, name: Filter) -> Picture:
    if width == picture.shape[1]:
        return picture
    blocks = list(_blocks(picture.shape[1], width, name))
    result = np.empty((picture.shape[0], width, 3), np.uint8)
    for top, bottom in _bands(picture.shape[0], 3 * picture.shape[1]):
        pixels = picture[top:bottom].transpose(2, 0, 1).astype(np.float64, order="C")
        sums = np.empty((3, bottom - top, width))
        for begin, first, matrix in blocks:
            taps = pixels[:, :, first : first + matrix.shape[1]]
            np.matmul(taps, matrix.T, out=sums[:, :, begin : begin + len(matrix)])
        result[top:bottom] = _rounded(sums).transpose(1, 2, 0)
    return result


def _resized_rows(picture: Picture, height: int, name: Filter) -> Picture:
    if height == len(picture):
        return picture
    rows = picture.reshape(len(picture), -1)
    result = np.empty((height, rows.shape[1]), np.uint8)
    for begin, first, matrix in _blocks(len(rows), height, name):
        taps = matrix.shape[1]
        for left, right in _bands(rows.shape[1], taps):
            pixels = rows[first : first + taps, left:right].astype(np.float64)
            result[begin : begin + len(matrix), left:right] = _rounded(matrix @ pixels)
    return result.reshape(height, -1, 3)


def _bands(count: int, each: int) -> Iterator[tuple[int, int]]:
    """Yield the borders of bands of items, each of which has `each` numbers."""
    step = max(1, _BAND_BYTES // (8 * each))
    return pairwise([*range(0, count, step), count])


def _rounded(sums: _Floats) -> Picture:
    """Divide the sums by the factor of the coefficients, and round and clip the results to bytes."""
    sums *= 1 / _SCALE
    sums += 0.5
    np.floor(sums, out=sums)
    return np.clip(sums, 0, 255, out=sums).astype(np.uint8)


# --- coefficients -----------------------------------------------------------------------------------------------------


def _blocks(size: int, new_size: int, name: Filter) -> Iterator[tuple[int, int, _Floats]]:
    """Yield the coefficients in blocks of results: the first result, the first pixel, and float64[results, pixels]."""
    first, coefficients = _coefficients(size, new_size, name)
    pixels = first[:, None] + np.arange(coefficients.shape[1])
    for begin in range(0, new_size, _BLOCK):
        block = slice(begin, begin + _BLOCK)
        start, width = int(first[begin]), min(size, int(pixels[block].max()) + 1) - int(first[begin])
        matrix = np.zeros((len(first[block]), width))
        inside = pixels[block] < size  # the coefficients beyond the last pixel are 0
        matrix[np.nonzero(inside)[0], pixels[block][inside] - start] = coefficients[block][inside]
        yield begin, start, matrix


def _coefficients(size: int, new_size: int, name: Filter) -> tuple[NDArray[np.int64], _Floats]:
    """Return the first pixel of each result, and the coefficients of this pixel and the next ones as whole numbers.

    A filter that shrinks a picture is widened by the scale, so that each pixel of the picture counts.
    """
    function, support = _FILTERS[name]
    scale = size / new_size
    widened = max(scale, 1.0)
    reach = support * widened
    centers = (np.arange(new_size) + 0.5) * scale
    first = np.maximum((centers - reach + 0.5).astype(np.int64), 0)
    counts = np.minimum((centers + reach + 0.5).astype(np.int64), size) - first
    taps = np.arange(min(size, ceil(reach) * 2 + 1))
    values = function(((taps + first[:, None]) - centers[:, None] + 0.5) * (1 / widened))
    values[taps >= counts[:, None]] = 0
    values /= np.add.accumulate(values, axis=1)[:, -1:]  # adds in order, as Pillow does; `sum` would add in pairs
    return first, np.trunc(values * _SCALE + np.copysign(0.5, values))


def _bilinear(at: _Floats) -> _Floats:
    return np.maximum(1.0 - np.abs(at), 0.0)


def _bicubic(at: _Floats) -> _Floats:
    at = np.abs(at)
    near = (1.5 * at - 2.5) * at * at + 1
    far = (((at - 5) * at + 8) * at - 4) * -0.5
    return np.where(at < 1.0, near, np.where(at < 2.0, far, 0.0))


def _lanczos(at: _Floats) -> _Floats:
    return np.where((at >= -3.0) & (at < 3.0), _sinc(at) * _sinc(at / 3), 0.0)


def _sinc(at: _Floats) -> _Floats:
    """Return sin(pi * at) / (pi * at). The Taylor series of the sine has an error below 1e-17 up to pi / 2."""
    turns = np.rint(at)
    angle = (at - turns) * pi
    square = angle * angle
    series = np.ones_like(angle)
    for power in range(20, 0, -2):
        series = 1.0 - series * square / (power * (power + 1))
    sine = series * angle * (1.0 - 2.0 * (turns % 2))
    return np.divide(sine, at * pi, out=np.ones_like(at), where=at != 0)


_FILTERS: dict[Filter, tuple[Callable[[_Floats], Any], float]] = {
    Filter.BILINEAR: (_bilinear, 1.0),
    Filter.BICUBIC: (_bicubic, 2.0),
    Filter.LANCZOS: (_lanczos, 3.0),
}
