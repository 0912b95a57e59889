"""Parts of the JSON schemas of all APIs, for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Final

Schema = dict[str, Any]

TEXT: Final[Schema] = {"type": "string"}
OPTIONAL_TEXT: Final[Schema] = {"type": ["string", "null"]}
COUNT: Final[Schema] = {"type": "integer", "minimum": 0}
NUMBER: Final[Schema] = {"type": "number"}
BOOLEAN: Final[Schema] = {"type": "boolean"}
FINGERPRINT: Final = "Identifies everything that can change the bytes of an answer."
NO_EFFECT: Final = "Accepted for compatibility. It has no effect on the answer."


def fixed_object(**properties: Schema) -> Schema:
    """Return the schema of an object that always has these properties."""
    return {"type": "object", "required": [*properties], "properties": properties}


def ref(name: str) -> Schema:
    """Return a reference to a schema of the document."""
    return {"$ref": f"#/components/schemas/{name}"}


def boolean(description: str) -> Schema:
    """Return the schema of a field that is true or false."""
    return {"type": "boolean", "description": description}


def integer(description: str, minimum: int, maximum: int) -> Schema:
    """Return the schema of an integer within these limits, which are inclusive."""
    return {"type": "integer", "minimum": minimum, "maximum": maximum, "description": description}
