"""10 changes of a file. The model writes each change as a block with the text to find and its replacement."""

from __future__ import annotations

import re
from functools import partial

from tests.real.answers import Choice, text_of
from tests.real.groups import Task

_TOKENS = 400
_ORDER = """\
You change files. Answer only with blocks of this form:

<<<<<<< SEARCH
lines of the file, copied exactly
=======
the lines that replace them
>>>>>>> REPLACE

Copy only the lines that change, and a few lines around them."""
_EXAMPLE = [
    {"role": "user", "content": "The file:\n```python\nLIMIT = 10\nSTEP = 2\n```\n\nChange the limit to 20."},
    {"role": "assistant", "content": "<<<<<<< SEARCH\nLIMIT = 10\n=======\nLIMIT = 20\n>>>>>>> REPLACE"},
]
_BLOCK = re.compile(r"<<<<<<< SEARCH\n(.*?)\n?=======\n(.*?)\n?>>>>>>> REPLACE", re.DOTALL)


def tasks() -> list[Task]:
    return [_task(name, source, change, tests) for name, source, change, tests in _FILES]


def _task(name: str, source: str, change: str, tests: str) -> Task:
    messages = [
        {"role": "system", "content": _ORDER},
        *_EXAMPLE,
        {"role": "user", "content": f"The file:\n```python\n{source}```\n\n{change}"},
    ]
    body = {"messages": messages, "max_tokens": _TOKENS}
    return Task(name, body, partial(_fits, source), partial(_program, source, tests))


def _fits(source: str, choice: Choice) -> bool:
    return edited(source, text_of(choice)) is not None


def edited(source: str, answer: str) -> str | None:
    """Return the source after all edits in an answer.

    Returns None if the answer contains no edits, or if the text of an edit does not occur exactly once.
    """
    edits = _BLOCK.findall(answer)
    for old, new in edits:
        if not old or source.count(old) != 1:
            return None
        source = source.replace(old, new)
    return source if edits else None


def _program(source: str, tests: str, choice: Choice) -> str:
    return f"{edited(source, text_of(choice))}\n{tests}\n"


_FILES = [
    (
        "a wrong operator",
        '''\
def area(width, height):
    """Return the area of a rectangle."""
    return width + height


def perimeter(width, height):
    """Return the perimeter of a rectangle."""
    return 2 * (width + height)
''',
        "The function area is wrong: it adds, but it must multiply. Correct it.",
        "assert area(3, 4) == 12 and perimeter(3, 4) == 14",
    ),
    (
        "an off-by-one error",
        '''\
def last_items(items, count):
    """Return the last `count` items of a list."""
    start = len(items) - count - 1
    return items[start:]


def first_items(items, count):
    """Return the first `count` items of a list."""
    return items[:count]
''',
        "last_items returns one item too many. Correct it.",
        "assert last_items([1, 2, 3, 4], 2) == [3, 4] and first_items([1, 2, 3], 2) == [1, 2]",
    ),
    (
        "a new parameter",
        '''\
GREETING = "Hello"


def greet(name):
    """Return a greeting."""
    return f"{GREETING}, {name}!"
''',
        "Add a second parameter `greeting` to greet, with GREETING as its default, and use it in the result.",
        "assert greet('Ann') == 'Hello, Ann!' and greet('Ann', 'Bye') == 'Bye, Ann!'",
    ),
    (
        "a new constant",
        """\
import math


def circle_area(radius):
    return 3.14 * radius * radius


def circle_length(radius):
    return 2 * math.pi * radius
""",
        "circle_area uses an inexact value of pi. Use math.pi.",
        "assert circle_area(1) == math.pi and circle_length(1) == 2 * math.pi",
    ),
    (
        "a missing check",
        '''\
def mean(numbers):
    """Return the arithmetic mean."""
    return sum(numbers) / len(numbers)


def span(numbers):
    """Return the difference between the largest and the smallest number."""
    return max(numbers) - min(numbers)
''',
        "mean fails for an empty list. It must return 0.0 for an empty list.",
        "assert mean([]) == 0.0 and mean([1, 2]) == 1.5 and span([1, 5]) == 4",
    ),
    (
        "a new method",
        """\
class Account:
    def __init__(self, balance=0):
        self.balance = balance

    def deposit(self, amount):
        self.balance += amount
""",
        "Add a method withdraw(amount) to Account, which subtracts the amount from the balance. It must raise "
        "ValueError if the amount is larger than the balance.",
        """
account = Account(10)
account.deposit(5)
account.withdraw(12)
assert account.balance == 3
try:
    account.withdraw(4)
except ValueError:
    assert account.balance == 3
else:
    raise AssertionError
""",
    ),
    (
        "a renamed function",
        """\
def calc(a, b):
    return a * b


def total(prices, quantities):
    result = 0
    for price, quantity in zip(prices, quantities):
        result += calc(price, quantity)
    return result
""",
        "Rename the function calc to cost, in its definition and where it is called.",
        "assert cost(2, 3) == 6 and total([1, 2], [3, 4]) == 11 and 'calc' not in globals()",
    ),
    (
        "a changed setting",
        """\
SETTINGS = {
    "host": "localhost",
    "port": 8000,
    "debug": True,
    "workers": 2,
}


def address():
    return f"{SETTINGS['host']}:{SETTINGS['port']}"
""",
        "Change the port to 9090, and turn debug off.",
        "assert address() == 'localhost:9090' and SETTINGS['debug'] is False and SETTINGS['workers'] == 2",
    ),
    (
        "a case that is ignored",
        '''\
def count_word(text, word):
    """Count how often a word occurs in a text."""
    count = 0
    for part in text.split():
        if part == word:
            count += 1
    return count
''',
        "The comparison must ignore upper and lower case.",
        "assert count_word('The cat and the dog', 'the') == 2 and count_word('a b', 'C') == 0",
    ),
    (
        "a default that is shared",
        '''\
def add_tag(tag, tags=[]):
    """Return the tags with one more tag."""
    tags.append(tag)
    return tags


def has_tag(tag, tags):
    return tag in tags
''',
        "The default of tags is shared by all calls. Use None as the default and make a new list in the function.",
        "assert add_tag('a') == ['a'] and add_tag('b') == ['b'] and add_tag('c', ['d']) == ['d', 'c']",
    ),
]
