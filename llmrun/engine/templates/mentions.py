"""Finds the names and texts related to thinking in a template's syntax tree, without running the template."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from jinja2 import nodes

from llmrun.engine.templates.jinja import parse

Constant = str | int | bool
_ABOUT_THINKING = re.compile(r"think|thought|reason", re.IGNORECASE)
_KEY = re.compile(r"[A-Za-z_]\w{0,40}")
_MOST = 12  # the maximum number of variables, of keys, and of constants per variable; real templates have fewer


@dataclass(frozen=True, slots=True)
class Mentions:
    """The parts of a template's source that may concern thinking, in source order.

    variables  variables that the template reads, each with the constants that it is compared with or set to
    keys       message keys that the template may look up, such as "reasoning_content"
    texts      text that the template may write: its literal text and the string constants in its expressions

    `variables` and `keys` contain only names related to thinking.
    """

    variables: dict[str, list[Constant]]
    keys: list[str]
    texts: list[str]


def mentions(source: str) -> Mentions:
    """Parse a template and return its mentions of thinking.

    Raises TemplateFailed for invalid source, MemoryError and RecursionError.
    """
    variables: dict[str, list[Constant]] = {}
    keys: dict[str, None] = {}
    texts: list[str] = []
    for node in _walk(parse(source)):
        if isinstance(node, nodes.Name) and node.ctx == "load" and _ABOUT_THINKING.search(node.name):
            variables.setdefault(node.name, [])
        elif isinstance(node, nodes.Compare | nodes.Assign):
            for name in _names(node):
                variables.setdefault(name, []).extend(_constants(node))
        elif isinstance(node, nodes.Getattr):
            keys.update(dict.fromkeys(_keys(node.attr)))
        elif isinstance(node, nodes.Const) and isinstance(node.value, str):
            keys.update(dict.fromkeys(_keys(node.value)))
            texts.append(node.value)
        elif isinstance(node, nodes.TemplateData):
            texts.append(node.data)
    chosen = [*variables.items()][:_MOST]
    return Mentions({name: [*dict.fromkeys(found)][:_MOST] for name, found in chosen}, [*keys][:_MOST], texts)


def _walk(tree: nodes.Node) -> Iterator[nodes.Node]:
    """Yield every node in source order, without recursion because the tree may be deep."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        waiting.extend(reversed([*node.iter_child_nodes()]))


def _names(node: nodes.Compare | nodes.Assign) -> list[str]:
    """Return the variables related to thinking that a comparison reads or an assignment sets."""
    if isinstance(node, nodes.Assign):
        named = [node.target.name] if isinstance(node.target, nodes.Name) else []
    else:
        named = [found.name for found in _walk(node.expr) if isinstance(found, nodes.Name)]
    return [name for name in named if _ABOUT_THINKING.search(name)]


def _constants(node: nodes.Compare | nodes.Assign) -> list[Constant]:
    found: list[Constant] = []
    for each in _walk(node):
        negated = isinstance(each, nodes.Neg) and isinstance(each.node, nodes.Const)
        value = each.node.value if negated else each.value if isinstance(each, nodes.Const) else None  # type: ignore[attr-defined]
        if isinstance(value, str | int):
            found.append(-value if negated and not isinstance(value, str) else value)
    return found


def _keys(text: str) -> list[str]:
    return [text] if _KEY.fullmatch(text) and _ABOUT_THINKING.search(text) else []
