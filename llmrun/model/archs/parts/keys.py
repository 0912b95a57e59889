"""Access to the metadata keys of an architecture, such as `llama.block_count`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from llmrun.base.errors import BadGGUF, UnsupportedModel, shown

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile

# These limits, far above the values in real models, prevent malicious headers from causing too much work or
# overflowing float32.
MOST_LAYERS: Final = 1024
VECTOR: Final = 16  # number of features that kernels process together
_LARGEST_SCALE = 1e9
_LARGEST_NUMBER = 1e30


class Keys:
    """Getters for the metadata of one file. Key names omit the prefix, which is the architecture by default.

    A default of None makes a key required. All getters raise BadGGUF if the key is missing, has the wrong type or is
    out of range.
    """

    def __init__(self, file: GGUFFile, prefix: str = "") -> None:
        self.file = file
        self._prefix = prefix or file.string("general.architecture")

    def name(self, key: str) -> str:
        return f"{self._prefix}.{key}"

    def has(self, key: str) -> bool:
        return self.file.has(self.name(key))

    def integer(self, key: str, default: int | None = None, *, minimum: int, maximum: int) -> int:
        name = self.name(key)
        if default is None:
            return self.file.integer(name, minimum=minimum, maximum=maximum)
        return self.file.integer(name, default, minimum=minimum, maximum=maximum)

    def features(self, key: str, default: int | None = None, *, minimum: int, maximum: int) -> int:
        """Return a number of features. Raises UnsupportedModel if the number is not a whole number of vectors."""
        count = self.integer(key, default, minimum=minimum, maximum=maximum)
        if count % VECTOR:
            raise self.unsupported(f"{self.name(key)} must be a multiple of {VECTOR}, not {count}")
        return count

    def number(self, key: str, default: float | None = None) -> float:
        name = self.name(key)
        value = self.file.number(name) if default is None else self.file.number(name, default)
        if abs(value) > _LARGEST_NUMBER:
            raise self.bad(key, f"must be at most {_LARGEST_NUMBER:g}, not {value:g}")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.number(key, default)
        if value <= 0:
            raise self.bad(key, f"must be above 0, not {value}")
        if value < 1 / _LARGEST_NUMBER:
            raise self.bad(key, f"must be at least {1 / _LARGEST_NUMBER:g}, not {value:g}")
        return value

    def factor(self, key: str, default: float | None = None) -> float:
        """Return a factor. Unlike `scale`, this method returns a stored 0 unchanged."""
        value = self.number(key, default)
        if abs(value) > _LARGEST_SCALE:
            raise self.bad(key, f"must be {-_LARGEST_SCALE:g} to {_LARGEST_SCALE:g}, not {value:g}")
        return value

    def scale(self, key: str, default: float | None = None) -> float:
        """Return a scale. A stored 0 means that there is no scale, so 1.0 is returned."""
        value = self.number(key, default) or 1.0
        if not 1 / _LARGEST_SCALE <= abs(value) <= _LARGEST_SCALE:
            raise self.bad(key, f"must be {1 / _LARGEST_SCALE:g} to {_LARGEST_SCALE:g}, not {value:g}")
        return value

    def factors(self, key: str, layers: int) -> list[float]:
        """Return a factor per layer. The file may contain an array or a single value for all layers."""
        if not self.is_array(key):
            return [self.factor(key)] * layers
        values = self.file.metadata[self.name(key)]
        assert isinstance(values, np.ndarray)
        if values.dtype.kind != "f" or len(values) != layers:
            raise self.bad(key, f"must have {layers} floating-point values, one for each layer")
        if not (np.abs(values) <= _LARGEST_SCALE).all():  # False for NaN
            raise self.bad(key, f"all values must be {-_LARGEST_SCALE:g} to {_LARGEST_SCALE:g}")
        return [float(value) for value in values]

    def string(self, key: str, default: str) -> str:
        return self.file.string(self.name(key), default)

    def flag(self, key: str, *, default: bool) -> bool:
        return self.file.boolean(self.name(key), default)

    def of_all_layers(self, key: str, default: int | None = None, *, minimum: int, maximum: int) -> int:
        """Return an integer, or the common value of an array with one integer per layer.

        Raises UnsupportedModel if the layers have different values.
        """
        if not isinstance(self.file.metadata.get(self.name(key)), np.ndarray):
            return self.integer(key, default, minimum=minimum, maximum=maximum)
        layers = self.integer("block_count", minimum=1, maximum=MOST_LAYERS)
        values = set(self.of_each_layer(key, layers))
        if len(values) != 1:
            raise self.unsupported(f"different values of {self.name(key)} in different layers")
        value = values.pop()
        if not minimum <= value <= maximum:
            raise self.bad(key, f"must be {minimum} to {maximum}, not {value}")
        return value

    def of_each_layer(self, key: str, layers: int) -> list[int]:
        """Return an array of integers or booleans with one value per layer."""
        values = self._integers(key)
        if len(values) != layers:
            raise self.bad(key, f"must have {layers} values, one for each layer, not {len(values)}")
        return values

    def several(self, key: str, count: int, *, minimum: int, maximum: int) -> tuple[int, ...]:
        """Return an array of `count` integers. The file may contain a single value for all integers."""
        if not self.is_array(key):
            return (self.integer(key, minimum=minimum, maximum=maximum),) * count
        values = self._integers(key)
        if len(values) != count:
            raise self.bad(key, f"must have {count} values, not {len(values)}")
        self._check_all(key, values, minimum, maximum)
        return tuple(values)

    def in_each_layer(
        self, key: str, layers: int, default: int | None = None, *, minimum: int, maximum: int
    ) -> tuple[int, ...]:
        """Return an integer per layer. The file may contain an array or a single value for all layers."""
        if not self.is_array(key):
            return (self.integer(key, default, minimum=minimum, maximum=maximum),) * layers
        values = self.of_each_layer(key, layers)
        self._check_all(key, values, minimum, maximum)
        return tuple(values)

    def refuse(self, *keys: str) -> None:
        """Raise UnsupportedModel if the file contains any of the given keys."""
        for key in keys:
            if self.has(key):
                raise self.unsupported(f"the key {self.name(key)}")

    def is_array(self, key: str) -> bool:
        return isinstance(self.file.metadata.get(self.name(key)), np.ndarray)

    def _integers(self, key: str) -> list[int]:
        values = self.file.metadata[self.name(key)]
        if not isinstance(values, np.ndarray) or values.dtype.kind not in "iub":
            raise self.bad(key, "must be an array of integers or booleans")
        return [int(value) for value in values]

    def _check_all(self, key: str, values: list[int], minimum: int, maximum: int) -> None:
        for value in values:
            if not minimum <= value <= maximum:
                raise self.bad(key, f"must be {minimum} to {maximum}, not {value}")

    def bad(self, key: str, seen: str) -> BadGGUF:
        return self.file.bad(self.name(key), seen)

    def unsupported(self, what: str) -> UnsupportedModel:
        """Return the error for a model that would be computed incorrectly."""
        return UnsupportedModel(
            f"model not supported: {shown(str(self.file.path), 300)}: {what}",
            hint="This model may run with --backend llama.",
        )
