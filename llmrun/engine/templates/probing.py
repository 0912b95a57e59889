"""Probes a chat template to find its thinking tags, its thinking switch and its tool calls, without a list of models.

The template renders small conversations made of marker words. The output shows how the template writes past thinking,
and how each template variable changes the end of the prompt, where the answer begins. The source is parsed only to find
names and texts to try. The template process runs the whole search in one request.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from jinja2 import nodes

from llmrun.engine.templates.jinja import Tries, parse
from llmrun.engine.templates.tool_format import TemplateAbilities, ThinkingTags
from llmrun.engine.templates.tool_probing import tool_abilities

Constant = str | int | bool
_ABOUT_THINKING = re.compile(r"think|thought|reason", re.IGNORECASE)
_KEY = re.compile(r"[A-Za-z_]\w{0,40}")
_MOST = 12  # the maximum number of variables, of keys, and of constants per variable; real templates have fewer


@dataclass(frozen=True, slots=True)
class Mentions:
    """The parts of a template's source that may concern thinking, in source order.

    variables  maps each variable that the template reads to the constants that the variable is compared with or set to
    keys       message keys that the template may look up, such as "reasoning_content"
    texts      text that the template may write: literal text and the string constants in expressions

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
    """Yield every node in source order. The function does not recurse, because the tree may be deep."""
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


# CPU time limit for all renderings together; afterwards, probing uses the results so far. Rendering takes up to 0.25 s
# with real templates on a slow server, and several times as long on a small computer.
_LIMIT_S = 3.0
_ASKED, _THOUGHT, _SAID, _TOOL, _WORD = "Qzask", "Qzthought", "Qzsaid", "qztool", "qzword"
_USER = {"role": "user", "content": _ASKED}
_CALL = {"id": "callabcde", "type": "function", "function": {"name": _TOOL, "arguments": {"a": "b"}}}
_MARKUP = r"(?:<[^<>\s]{1,60}>|\[/?[A-Z_]{2,40}\])"
_LAST_TAG = re.compile(rf"{_MARKUP}(?:\w{{1,20}}{_MARKUP}|\w{{1,20}})?\Z")  # "<think>", "<|open|>think<|sep|>"
_FIRST_TAG = re.compile(rf"{_MARKUP}(?:\w{{1,20}}{_MARKUP})?")
_WRITTEN_TAG = re.compile(r"</([\w:|]{0,20}think\w{0,20})>", re.IGNORECASE)
_REPEATED = re.compile(r"['\"]type['\"]: *['\"]th")  # matches a list of parts that the template prints verbatim
_LONGEST_TAG = 200  # characters
_OFF_WORD = "/no_think"  # Nemotron Nano 2
_CLOSED, _FREE, _OPENED = range(3)  # the prompt ends with a closed thinking block, without a block, or inside a block


def probe(source: str, limit_s: float = _LIMIT_S) -> TemplateAbilities:
    """Find a template's abilities. Raises TemplateFailed for invalid source, MemoryError and RecursionError."""
    tries = Tries(source, limit_s)
    named = mentions(source)
    tags = _tags(tries, named.keys, named.variables) or _written_tags(named.texts)
    switch = _switch(tries, named.variables, tags)
    tools = tool_abilities(source, tries, tags)
    if switch is None:
        return TemplateAbilities(off_word=_off_word(tries, tags), thinking_tags=tags, tools=tools)
    plain = tries.text([_USER])
    is_off_by_default = plain is not None and tries.text([_USER], **switch.off) == plain
    return TemplateAbilities(switch.on, switch.off, is_off_by_default, thinking_tags=tags, tools=tools)


# --- the tags around past thinking


def _tags(tries: Tries, keys: Sequence[str], variables: Mapping[str, Sequence[Constant]]) -> ThinkingTags | None:
    """Find the tags by rendering an answer with thinking, first alone and then with a tool call.

    Some templates write past thinking only next to a tool call.
    """
    switched_on = dict.fromkeys(variables, True)
    for given in ({}, switched_on) if switched_on else ({},):
        prompt = tries.text([_USER], **given)
        plain = tries.text([_USER, {"role": "assistant", "content": _SAID}], **_past(given))
        for message in _answers(keys):
            text = tries.text([_USER, message], **_past(given))
            if text is not None and _THOUGHT in text and prompt is not None and not _REPEATED.search(text):
                return _extract_tags(text, prompt, plain or "")
    return None


def _past(variables: Mapping[str, object]) -> dict[str, Any]:
    return {**variables, "add_generation_prompt": False}


def _answers(keys: Sequence[str]) -> list[dict[str, Any]]:
    """Return test answers with thinking under each key, starting with the key that most clients send."""
    found: list[dict[str, Any]] = []
    ordered = sorted(keys, key=lambda key: key != "reasoning_content")
    for calls in ({}, {"tool_calls": [_CALL]}):
        content = "" if calls else _SAID  # next to a tool call, gpt-oss accepts content or thinking but not both
        found += [{"role": "assistant", "content": content, key: _THOUGHT, **calls} for key in ordered]
    parts = [{"type": "thinking", "thinking": _THOUGHT}, {"type": "text", "text": _SAID}]
    blocks = [{"type": "thoughts", "text": _THOUGHT}, {"type": "response", "text": _SAID}]
    return [*found, {"role": "assistant", "content": parts}, {"role": "assistant", "content": {"blocks": blocks}}]


def _extract_tags(text: str, prompt: str, plain: str) -> ThinkingTags | None:
    """Extract the tags from a rendered conversation whose last message contains thinking.

    prompt  the rendered prompt for the question in that conversation
    plain   the same conversation, rendered without the thinking
    """
    before, _, after = text.partition(_THOUGHT)
    same = takewhile(lambda pair: pair[0] == pair[1], zip(before, prompt, strict=False))
    shared = sum(1 for _ in same)
    written, offered = before[shared:].strip(), prompt[shared:].strip()
    header = plain.partition(_SAID)[0].rstrip()
    last = _LAST_TAG.search(before.rstrip())
    if written and not offered and _SAID not in written:  # the model writes the opening tag itself
        opening = written
    elif last and not header.endswith(last[0]):
        opening = last[0]
    else:  # the prompt already contains the opening tag
        opening = offered
    between, said, end = after.partition(_SAID)
    between = between.strip()
    if not 0 < len(opening) <= _LONGEST_TAG:
        return None
    closing = _closing(opening, between)
    if not closing:
        return None
    answer_opening = between.removeprefix(closing).strip() if said else ""
    if not answer_opening:
        answer_opening = _tag_of_plain_answers(header, prompt, (opening, closing))
        end = plain.partition(_SAID)[2]
    answer_closing = _answer_closing(end) if answer_opening else ""
    if max(len(closing), len(answer_opening), len(answer_closing)) > _LONGEST_TAG:
        return None
    return ThinkingTags(opening, closing, answer_opening, answer_closing)


def _closing(opening: str, between: str) -> str:
    """Find the closing tag in the text after the thinking.

    If `opening` contains a word between two tags, a closing tag with this word between two tags is preferred.
    Otherwise, the closing tag is the first tag or, if there is none, the rest of the line.
    """
    word = re.search(r">(\w{1,40})<", opening)
    named = re.match(rf"{_MARKUP}{word[1]}{_MARKUP}", between) if word else None
    first = named or re.match(_MARKUP, between)
    return first[0] if first else between.partition("\n")[0].strip()


def _tag_of_plain_answers(header: str, prompt: str, known: tuple[str, str]) -> str:
    """Return the tag right before an answer without thinking, or "" if the prompt or the thinking uses it too."""
    last = _LAST_TAG.search(header)
    return "" if last is None or last[0] in known or last[0] in prompt else last[0]


def _answer_closing(end: str) -> str:
    """Return the tag after an answer, or "" if nothing follows the tag, because that tag ends the turn."""
    first = _FIRST_TAG.match(end.strip())
    return first[0] if first and first[0] != end.strip() else ""


def _written_tags(texts: Sequence[str]) -> ThinkingTags | None:
    """Find tags in the template's source, where they may serve only to strip past thinking or to instruct the model."""
    for text in texts:
        found = _WRITTEN_TAG.search(text)
        if found:
            answer = "response>" if "</response>" in text else ""
            opened, closed = (f"<{answer}", f"</{answer}") if answer else ("", "")
            return ThinkingTags(f"<{found[1]}>", found[0], opened, closed)
    return None


# --- the thinking switch


@dataclass(frozen=True, slots=True)
class _Switch:
    """A way to switch thinking on and off with template variables. Among several switches, the highest rank wins."""

    on: Mapping[str, object]
    off: Mapping[str, object]
    rank: tuple[int, bool]  # (distance between the prompt endings, True for a boolean variable)


def _switch(tries: Tries, variables: Mapping[str, Sequence[Constant]], tags: ThinkingTags | None) -> _Switch | None:
    """Find the variable that changes the end of the prompt most.

    A variable that does not change the end of the prompt is accepted only if it is a boolean that changes other parts.
    """
    switches = [_tried(tries, name, constants, tags) for name, constants in variables.items()]
    return max((switch for switch in switches if switch), key=lambda switch: switch.rank, default=None)


def _tried(tries: Tries, name: str, constants: Sequence[Constant], tags: ThinkingTags | None) -> _Switch | None:
    others = [value for value in constants if not isinstance(value, bool)]
    values: list[Constant] = [True, False] if len(others) < len(constants) or not others else []
    prompts = [({name: value}, tries.text([_USER], **{name: value})) for value in [*values, *others]]
    prompts = [(variable, text) for variable, text in prompts if text is not None]
    if not prompts:
        return None
    plain = tries.text([_USER])
    off, off_text = min(prompts, key=lambda each: _ending(each[1], tags))
    # On a tie, prefer the template's default behavior, then variables that are set.
    on, on_text = max(
        [*prompts, ({}, plain)], key=lambda each: (_ending(each[1], tags), each[1] == plain, bool(each[0]))
    )
    contrast = _ending(on_text, tags) - _ending(off_text, tags)
    if contrast:
        return _Switch(on, off, (contrast, bool(values)))
    printed = _WORD in (tries.text([_USER], **{name: _WORD}) or "")  # for example, in "Reasoning effort: high"
    if values and not printed and tries.text([_USER], **{name: True}) != tries.text([_USER], **{name: False}):
        return _Switch({name: True}, {name: False}, (0, True))
    return None


def _off_word(tries: Tries, tags: ThinkingTags | None) -> str:
    """Return _OFF_WORD if this word in a question makes the prompt end with a closed thinking block, else ""."""
    asked = {"role": "user", "content": f"{_ASKED} {_OFF_WORD}"}
    closes = tags is not None and _ending(tries.text([asked]), tags) == _CLOSED
    return _OFF_WORD if closes and _ending(tries.text([_USER]), tags) != _CLOSED else ""


def _ending(text: str | None, tags: ThinkingTags | None) -> int:
    """Classify the end of a prompt as _CLOSED, _FREE or _OPENED."""
    end = (text or "").rpartition(_ASKED)[2].rstrip()
    if tags is None or not end:
        return _FREE
    if end.endswith(tags.opening):
        return _OPENED
    emptied = any(after.lstrip().startswith(tags.closing) for after in end.split(tags.opening)[1:])
    return _CLOSED if emptied or end.endswith(tags.closing) else _FREE
