"""Prompts of about 5,000 tokens with facts at several depths.

All questions about a text begin with this text, so each text is processed only once. The base model cannot answer
questions. Instead, it continues the beginning of a sentence that the text already contains.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from tests.real.answers import Choice, text_of
from tests.real.groups import CHAT, TEXT, Task

_CODER_LINES = 280
_BASE_LINES = 270
_TOKENS = 40
_SUBJECTS = ["gardener", "teacher", "baker", "sailor", "painter", "doctor", "farmer", "pilot", "weaver", "miller"]
_VERBS = ["counted", "carried", "painted", "washed", "repaired", "borrowed", "collected", "measured", "sorted", "sold"]
_OBJECTS = ["lanterns", "baskets", "windows", "bottles", "wheels", "chairs", "letters", "stones", "ropes", "carpets"]
_PLACES = ["harbor", "market", "library", "bridge", "station", "garden", "castle", "mill", "tower", "school"]


class Fact(NamedTuple):
    """A sentence with a start and an end, and a question about the sentence.

    depth  the sentence's place in the text, from 0 to 1
    end    the end of the sentence, which is the answer to the question
    """

    depth: float
    start: str
    end: str
    question: str


_FACTS = [
    Fact(0.02, "The code of the blue safe is", "7391", "What is the code of the blue safe?"),
    Fact(0.35, "The name of the captain's parrot is", "Biscuit", "What is the name of the captain's parrot?"),
    Fact(0.65, "The ferry to the island leaves at", "16:45", "When does the ferry to the island leave?"),
    Fact(0.95, "The old map is hidden behind the kitchen", "clock", "Where is the old map hidden?"),
]


def coder_tasks() -> list[Task]:
    text = _story(_CODER_LINES)
    module = _module()
    return [
        *(_question(f"story {fact.depth:.0%}", text, fact.question, fact.end) for fact in _FACTS),
        *(_question(f"code {name}", module, question, answer) for name, question, answer in _CODE_QUESTIONS),
    ]


def base_tasks() -> list[Task]:
    """Return tasks for a base model: texts that end with the beginning of one of their sentences."""
    text = _story(_BASE_LINES)
    return [_continuation(text, fact) for fact in _FACTS]


def _continuation(text: str, fact: Fact) -> Task:
    body = {"prompt": f"{text}\n{fact.start}", "max_tokens": 8}
    return Task(f"story {fact.depth:.0%}", body, partial(_contains, fact.end), path=TEXT)


def _question(name: str, text: str, question: str, answer: str) -> Task:
    content = f"{text}\n\n{question} Answer in a few words."
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": _TOKENS}
    return Task(name, body, partial(_contains, answer), path=CHAT)


def _contains(answer: str, choice: Choice) -> bool:
    return answer.casefold() in text_of(choice).casefold()


def _story(lines: int) -> str:
    """Return random sentences, with the facts inserted at their depths."""
    draw = random.Random(5).choice
    sentences = []
    for day in range(1, lines + 1):
        what = f"{draw(_VERBS)} {day * 7 % 90 + 3} {draw(_OBJECTS)}"
        sentences.append(f"On day {day}, the {draw(_SUBJECTS)} {what} near the {draw(_PLACES)}.")
    for fact in reversed(_FACTS):
        sentences.insert(round(fact.depth * lines), f"{fact.start} {fact.end}.")
    return "\n".join(sentences)


_CODE_QUESTIONS = [
    ("default", "What is the default of the parameter `limit` of the function sort_letters?", "137"),
    ("raises", "Which exception does the function paint_stones raise?", "LookupError"),
    ("calls", "Which function does the function carry_wheels call? Name only the function.", "wash_ropes"),
    ("constant", "What is the value of the constant MOST_RETRIES?", "23"),
]


def _module() -> str:
    """Return a Python module of many small functions, some of which differ from the others."""
    special: dict[tuple[str, str], Callable[[str], str]] = {
        ("sort", "letters"): lambda text: text.replace("limit=10", "limit=137"),
        ("paint", "stones"): lambda text: text.replace("ValueError", "LookupError"),
        ("carry", "wheels"): lambda text: text.replace("return len(names)", "return wash_ropes(names)"),
    }
    verbs = [
        "count",
        "carry",
        "paint",
        "wash",
        "repair",
        "borrow",
        "collect",
        "measure",
        "sort",
        "sell",
        "lend",
        "find",
    ]
    functions = []
    for verb in verbs:
        for thing in _OBJECTS:
            function = (
                f"def {verb}_{thing}(names, limit=10):\n"
                f'    """{verb.capitalize()} the {thing} with these names."""\n'
                f"    if len(names) > limit:\n"
                f'        raise ValueError("too many {thing}")\n'
                f"    return len(names)\n"
            )
            functions.append(special.get((verb, thing), str)(function))
    functions.insert(len(functions) // 2, "MOST_RETRIES = 23\n")
    return "```python\n" + "\n\n".join(functions) + "```"
