"""JSON Schemas in the idioms of several schema generators, including some that llmrun refuses."""

from __future__ import annotations

from typing import Any

DRAFT_4 = "http://json-schema.org/draft-04/schema#"
DRAFT_7 = "http://json-schema.org/draft-07/schema#"
DRAFT_2019 = "https://json-schema.org/draft/2019-09/schema"
DRAFT_2020 = "https://json-schema.org/draft/2020-12/schema"
TEXT = {"type": "string", "maxLength": 4}
NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}


def shape(kind: str, **properties: Any) -> dict[str, Any]:
    """Return an object with a discriminating constant, as pydantic writes it."""
    return {
        "title": kind.title(),
        "type": "object",
        "properties": {"kind": {"const": kind, "default": kind, "title": "Kind", "type": "string"}, **properties},
        "required": ["kind", *properties],
    }


def record(**properties: Any) -> dict[str, Any]:
    """Return a closed object whose properties are all required, as OpenAI's strict mode demands."""
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


ZOD_UUID = (
    "^([0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[1-8][0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12}"
    "|00000000-0000-0000-0000-000000000000|ffffffff-ffff-ffff-ffff-ffffffffffff)$"
)
SHAPES = {"Circle": shape("circle", radius=NUMBER), "Square": shape("square", side=NUMBER)}

SCHEMAS: dict[str, dict[str, Any]] = {
    # --- pydantic 2
    "pydantic: a model": {
        "properties": {
            "name": {"title": "Name", **TEXT},
            "age": {"anyOf": [NUMBER, {"type": "null"}], "default": None, "title": "Age"},
            "tags": {"items": TEXT, "maxItems": 2, "title": "Tags", "type": "array"},
        },
        "required": ["name"],
        "title": "Person",
        "type": "object",
    },
    "pydantic: a tagged union": {
        "$defs": SHAPES,
        "discriminator": {
            "mapping": {"circle": "#/$defs/Circle", "square": "#/$defs/Square"},
            "propertyName": "kind",
        },
        "oneOf": [{"$ref": "#/$defs/Circle"}, {"$ref": "#/$defs/Square"}],
    },
    "pydantic: nested tagged unions": {
        "$defs": {
            **SHAPES,
            "Line": shape("line"),
            "Shape": {"oneOf": [{"$ref": "#/$defs/Circle"}, {"$ref": "#/$defs/Square"}]},
        },
        "oneOf": [{"$ref": "#/$defs/Shape"}, {"$ref": "#/$defs/Line"}],
    },
    "pydantic: dict[Literal, int]": {
        "additionalProperties": NUMBER,
        "propertyNames": {"enum": ["x", "y"]},
        "type": "object",
    },
    "pydantic: dict[Color, int]": {
        "$defs": {"Color": {"enum": ["red", "green"], "title": "Color", "type": "string"}},
        "additionalProperties": NUMBER,
        "propertyNames": {"$ref": "#/$defs/Color"},
        "type": "object",
    },
    "pydantic: dict[date, int]": {
        "additionalProperties": NUMBER,
        "propertyNames": {"format": "date"},
        "type": "object",
    },
    "pydantic: dict[constr(pattern), int]": {"patternProperties": {"^[a-z]{2,3}$": NUMBER}, "type": "object"},
    "pydantic: tuple[int, str]": {
        "maxItems": 2,
        "minItems": 2,
        "prefixItems": [NUMBER, TEXT],
        "type": "array",
    },
    "pydantic: a recursive model": {
        "$defs": {
            "Node": {
                "properties": {
                    "value": NUMBER,
                    "next": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}], "default": None},
                },
                "required": ["value"],
                "title": "Node",
                "type": "object",
            }
        },
        "$ref": "#/$defs/Node",
    },
    "pydantic: extra='forbid', formats": {
        "additionalProperties": False,
        "properties": {
            "when": {"format": "date-time", "type": "string"},
            "day": {"format": "date", "type": "string"},
            "span": {"format": "duration", "type": "string"},
            "id": {"format": "uuid4", "type": "string", "maxLength": 4},
            "path": {"format": "file-path", "type": "string", "maxLength": 4},
            "secret": {"format": "password", "type": "string", "writeOnly": True, "maxLength": 4},
            "data": {"format": "binary", "type": "string", "maxLength": 4},
            "network": {"format": "ipv4network", "type": "string", "maxLength": 4},
        },
        "type": "object",
    },
    "pydantic: Decimal": {
        "anyOf": [{"type": "number"}, {"pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$", "type": "string"}]
    },
    "pydantic: set[int]": {"items": NUMBER, "type": "array", "uniqueItems": True},
    "pydantic: an empty model": {"properties": {}, "title": "Empty", "type": "object"},
    # --- zod 4, and zod-to-json-schema
    "zod: z.record(z.string(), z.number())": {
        "$schema": DRAFT_2020,
        "type": "object",
        "propertyNames": {"type": "string"},
        "additionalProperties": {"type": "number"},
    },
    "zod: z.record(z.enum())": {
        "$schema": DRAFT_2020,
        "type": "object",
        "propertyNames": {"type": "string", "enum": ["low", "high"]},
        "additionalProperties": TEXT,
        "required": ["low", "high"],
    },
    "zod: z.discriminatedUnion()": {
        "$schema": DRAFT_2020,
        "oneOf": [
            record(type={"type": "string", "const": "ok"}, data=TEXT),
            record(type={"type": "string", "const": "failed"}, error=TEXT),
        ],
    },
    "zod: z.int()": {
        "$schema": DRAFT_2020,
        "type": "integer",
        "minimum": -9007199254740991,
        "maximum": 9007199254740991,
    },
    "zod: z.uuid()": {"$schema": DRAFT_2020, "type": "string", "format": "uuid", "pattern": ZOD_UUID},
    "zod: z.email()": {
        "$schema": DRAFT_2020,
        "type": "string",
        "format": "email",
        "pattern": r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
    },
    "zod: z.never() in a union": {"anyOf": [{"not": {}}, TEXT]},
    "zod-to-json-schema: a tuple": {
        "$schema": DRAFT_7,
        "type": "array",
        "minItems": 2,
        "maxItems": 2,
        "items": [TEXT, {"type": "number"}],
    },
    "zod-to-json-schema: root references": {
        "$schema": DRAFT_7,
        "type": "object",
        "properties": {
            "a": {"oneOf": [{"type": "null"}, record(x=NUMBER)]},
            "b": {"$ref": "#/properties/a/oneOf/1"},
        },
        "required": ["a", "b"],
        "additionalProperties": False,
    },
    "zod-to-json-schema: nullable": {
        "$schema": DRAFT_7,
        "type": ["string", "null"],
        "maxLength": 3,
        "default": None,
        "description": "may be missing",
    },
    # --- .NET
    "JsonSchemaExporter: a nullable property": {
        "type": ["object", "null"],
        "properties": {"Name": {"type": ["string", "null"], "maxLength": 3}, "Age": NUMBER},
        "required": ["Name", "Age"],
    },
    "JsonSchemaExporter: derived types": {
        "type": "object",
        "required": ["$type"],
        "anyOf": [
            {"properties": {"$type": {"const": "dog"}, "Barks": {"type": "boolean"}}},
            {"properties": {"$type": {"const": "cat"}, "Lives": NUMBER}},
        ],
    },
    "NJsonSchema: nullable references": {
        "$schema": DRAFT_4,
        "title": "Order",
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "Id": {"type": "string", "format": "guid", "maxLength": 4},
            "Total": {"type": "number", "format": "decimal"},
            "Count": {"type": "integer", "format": "int32"},
            "Ship": {"oneOf": [{"type": "null"}, {"$ref": "#/definitions/Address"}]},
        },
        "definitions": {
            "Address": {
                "type": "object",
                "additionalProperties": False,
                "properties": {"City": {"type": ["null", "string"], "maxLength": 3}},
            }
        },
    },
    "NJsonSchema: inheritance": {
        "$schema": DRAFT_4,
        "allOf": [
            {"$ref": "#/definitions/Animal"},
            {"type": "object", "properties": {"Lives": NUMBER}, "required": ["Lives"]},
        ],
        "definitions": {
            "Animal": {"type": "object", "properties": {"Name": TEXT}, "required": ["Name"]},
        },
    },
    "NJsonSchema: generic names": {
        "$schema": DRAFT_4,
        "oneOf": [{"type": "null"}, {"$ref": "#/definitions/Page%3CItem%3E"}],
        "definitions": {"Page<Item>": record(total=NUMBER)},
    },
    ".NET: options with different required properties": {
        "$defs": {
            "Ok": record(value=NUMBER),
            "Failed": record(error=TEXT),
        },
        "oneOf": [{"$ref": "#/$defs/Ok"}, {"$ref": "#/$defs/Failed"}],
    },
    ".NET: options with enums": {
        "$defs": {
            "A": {**record(t={"enum": ["a", "b"]}, x=NUMBER)},
            "B": {**record(t={"enum": ["c"]}, y=NUMBER)},
        },
        "type": "array",
        "maxItems": 2,
        "items": {"oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}, {"type": "null"}]},
    },
    "Newtonsoft: integers of 64 bits": {
        "type": "integer",
        "minimum": -9223372036854775808,
        "maximum": 9223372036854775807,
    },
    "Newtonsoft: doubles": {
        "type": "number",
        "minimum": -1.7976931348623157e308,
        "maximum": 1.7976931348623157e308,
    },
    # --- Go, Rust, Java
    "invopop/jsonschema: a struct": {
        "$schema": DRAFT_2020,
        "$id": "https://example.com/schemas/user",
        "$ref": "#/$defs/User",
        "$defs": {
            "User": {
                "properties": {
                    "id": NUMBER,
                    "meta": {"type": "object", "maxProperties": 2},
                    "tags": {"items": TEXT, "type": "array", "maxItems": 2},
                },
                "additionalProperties": False,
                "type": "object",
                "required": ["id"],
            }
        },
    },
    "invopop/jsonschema: map[string]int": {"type": "object", "additionalProperties": NUMBER, "minProperties": 2},
    "invopop/jsonschema: map[int]string": {
        "patternProperties": {"^[0-9]+$": TEXT},
        "type": "object",
        "additionalProperties": False,
    },
    "schemars: an enum with data": {
        "$schema": DRAFT_7,
        "title": "Event",
        "oneOf": [
            {"type": "string", "enum": ["Started", "Ended"]},
            {**record(Moved=NUMBER)},
            {**record(Said=TEXT)},
        ],
    },
    "schemars: documented variants": {
        "oneOf": [
            {"description": "the first", "type": "string", "const": "a"},
            {"description": "the second", "type": "string", "const": "b"},
        ]
    },
    "schemars: u8 and Option": {
        "$schema": DRAFT_7,
        "type": "object",
        "required": ["level"],
        "properties": {
            "level": {"type": "integer", "format": "uint8", "minimum": 0.0, "maximum": 255.0},
            "names": {"type": ["array", "null"], "items": TEXT, "maxItems": 2.0, "minItems": 1.0},
        },
    },
    "victools: a class": {
        "$schema": DRAFT_2019,
        "type": "object",
        "properties": {
            "count": {"type": "integer", "format": "int64"},
            "price": {"type": "number", "format": "double"},
            "kind": {"type": "string", "enum": ["A", "B"], "readOnly": True},
            "nested": {"allOf": [{"$ref": "#/$defs/Nested"}, {"description": "with a description"}]},
        },
        "$defs": {"Nested": {"type": "object", "properties": {"x": NUMBER}, "additionalProperties": False}},
        "required": ["count", "nested"],
        "additionalProperties": False,
    },
    "victools: a nullable reference": {
        "$schema": DRAFT_2019,
        "anyOf": [{"type": "null"}, {"$ref": "#/$defs/Nested"}],
        "$defs": {"Nested": {**record(x=NUMBER)}},
    },
    # --- TypeBox
    "TypeBox: Type.Record(Type.String(), ...)": {
        "type": "object",
        "patternProperties": {"^(.*)$": NUMBER},
    },
    "TypeBox: Type.Record of literals": {
        "type": "object",
        "patternProperties": {"^(answer)$": NUMBER},
        "additionalProperties": False,
    },
    "TypeBox: Type.Intersect": {
        "type": "object",
        "allOf": [
            {"type": "object", "required": ["a"], "properties": {"a": NUMBER}},
            {"type": "object", "required": ["b"], "properties": {"b": TEXT}},
        ],
        "unevaluatedProperties": False,
    },
    "TypeBox: Type.Tuple": {
        "type": "array",
        "items": [NUMBER, TEXT],
        "additionalItems": False,
        "minItems": 2,
        "maxItems": 2,
    },
    "TypeBox: Type.Union of literals": {"anyOf": [{"const": "a", "type": "string"}, {"const": 1, "type": "number"}]},
    "TypeBox: Type.Recursive": {
        "$id": "T0",
        "type": "object",
        "properties": {"id": NUMBER, "nodes": {"type": "array", "items": {"$ref": "T0"}, "maxItems": 2}},
        "required": ["id", "nodes"],
    },
    # --- OpenAPI, MCP, GraphQL and by hand
    "OpenAPI 3.0: exclusive limits": {
        "type": "number",
        "minimum": 0,
        "exclusiveMinimum": True,
        "maximum": 10,
        "exclusiveMaximum": True,
        "nullable": True,
    },
    "OpenAPI 3.0: a discriminator": {
        "oneOf": [{"$ref": "#/components/schemas/Circle"}, {"$ref": "#/components/schemas/Square"}],
        "discriminator": {"propertyName": "kind"},
        "components": {"schemas": SHAPES},
    },
    "OpenAPI 3.1: a dialect": {
        "$schema": "https://spec.openapis.org/oas/3.1/dialect/base",
        "type": "object",
        "properties": {"a": {**TEXT, "example": "x", "xml": {"name": "a"}, "externalDocs": {"url": "http://x"}}},
        "required": ["a"],
    },
    "by hand: keywords without an effect": {
        "$comment": "x",
        "type": "object",
        "properties": {
            "list": {"type": "array", "items": TEXT, "uniqueItems": False, "minItems": 1.0, "maxItems": 2},
            "one": {"type": "array", "items": TEXT, "uniqueItems": True, "maxItems": 1},
            "text": {"type": "string", "minLength": 0, "maxLength": 3, "uniqueItems": True, "examples": ["a"]},
            "map": {"type": "object", "propertyNames": {}, "dependentRequired": {}, "maxProperties": 2},
            "pair": {"type": "array", "prefixItems": [NUMBER], "additionalItems": False, "maxItems": 1},
        },
        "required": ["list", "one", "text", "map", "pair"],
        "maxProperties": 9,
        "minProperties": 1,
        "additionalProperties": False,
        "unevaluatedProperties": True,
        "deprecated": False,
    },
    "by hand: one key for a pattern": {
        "type": "object",
        "properties": {"answer": {"type": "integer"}},
        "patternProperties": {"^answer$": {"minimum": 1, "maximum": 9}},
        "required": ["answer"],
        "additionalProperties": False,
    },
    "by hand: a map with declared keys": {
        "type": "object",
        "properties": {"a": NUMBER},
        "patternProperties": {"^x-": TEXT},
        "additionalProperties": {"type": "boolean"},
    },
    "by hand: constants of all types": {"enum": [1, 1.5, "a", None, True, [1, {"a": 2}], {"b": []}]},
    "by hand: a long text": {"type": "string", "maxLength": 100_000, "minLength": 1},
    "by hand: a Unicode pattern": {"type": "string", "pattern": "^[\u4e00-\u9fa5é]{1,3}$"},
    "by hand: a password": {"type": "string", "pattern": r"^(?=.*[A-Z])(?=.*\d)[A-Za-z\d]{8,}$"},
    "by hand: exactly one of two properties": {
        "type": "object",
        "properties": {"a": NUMBER, "b": NUMBER},
        "additionalProperties": False,
        "oneOf": [{"required": ["a"]}, {"required": ["b"]}],
    },
    "by hand: a condition": {
        "type": "object",
        "properties": {"kind": {"enum": ["a", "b"]}, "x": NUMBER},
        "if": {"properties": {"kind": {"const": "a"}}},
        "then": {"required": ["x"]},
    },
    "by hand: overlapping options": {"oneOf": [{"type": "number"}, {"type": "integer"}]},
    "by hand: ranges that exclude each other": {
        "oneOf": [{"type": "integer", "maximum": 0}, {"type": "integer", "minimum": 10, "maximum": 20}]
    },
    "by hand: sibling keywords of a reference": {
        "$ref": "#/$defs/Base",
        "properties": {"extra": NUMBER},
        "required": ["extra"],
        "unevaluatedProperties": False,
        "$defs": {"Base": {"type": "object", "properties": {"id": NUMBER}, "required": ["id"]}},
    },
    "by hand: a contradiction": {"type": "object", "required": ["a"], "additionalProperties": False},
}
# The schemas that cannot be enforced, and the beginning of the refusal
REFUSED: dict[str, str] = {
    "pydantic: Decimal": "regex parse error",
    "pydantic: set[int]": '/uniqueItems: "uniqueItems" is not supported',
    "zod: z.email()": "regex parse error",
    "by hand: a password": "regex parse error",
    "by hand: exactly one of two properties": '"oneOf" is supported only if',
    "by hand: a condition": '/if: "if" is not supported',
    "by hand: overlapping options": '"oneOf" is supported only if',
    "by hand: a contradiction": "no text can match it",
}
