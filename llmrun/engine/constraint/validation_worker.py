r"""The program of the isolated process that validates answers with jsonschema and compiles grammars as a trial.

A request is {"text", "schema"}, {"grammar"} or {"grammar", "schema"}. An answer is [kind, value]:

"verdict"  [kind, reason] for a text
"problem"  the reason why a grammar or its schema is refused; empty if there is no problem
"""

from __future__ import annotations

from typing import Any

from llmrun.base.processes.worker import serve_limited


def main() -> None:
    """Answer requests until stdin closes."""
    serve_limited(_answer)


def _answer(request: dict[str, Any]) -> tuple[str, Any]:
    from llmrun.engine.constraint.keywords import modernize

    if isinstance(request.get("schema"), dict):
        modernize(request["schema"])
    return ("verdict", _verdict(request)) if "text" in request else ("problem", _problem(request))


def _verdict(request: dict[str, Any]) -> tuple[str, str]:
    from llmrun.engine.constraint.answer_checks import verdict_of

    try:
        return verdict_of(request["text"], request["schema"])
    except (MemoryError, RecursionError):
        raise
    except Exception as error:  # noqa: BLE001 - the schema is untrusted, and jsonschema expects a well-formed one
        return "not validated", f"the validator failed: {type(error).__name__}: {error}"


def _problem(request: dict[str, Any]) -> str:
    from llmrun.engine.constraint.parser import grammar_problem

    if found := grammar_problem(request["grammar"]):
        return found
    if "schema" not in request:
        return ""
    from llmrun.engine.constraint.answer_checks import schema_problem

    try:
        return schema_problem(request["schema"])
    except (MemoryError, RecursionError):
        raise
    except Exception as error:  # noqa: BLE001 - the schema is untrusted, and jsonschema expects a well-formed schema
        return f"the schema is invalid: {type(error).__name__}: {error}"
