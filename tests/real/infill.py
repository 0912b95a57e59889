"""15 functions with a gap. After the model has filled the gap, each function must pass its tests."""

from __future__ import annotations

from functools import partial

from tests.real.answers import Choice, text_of
from tests.real.groups import TEXT, Task

_TOKENS = 96
_GAP = "@@@"


def tasks() -> list[Task]:
    return [_task(name, source, tests) for name, source, tests in _FUNCTIONS]


def _task(name: str, source: str, tests: str) -> Task:
    prefix, suffix = source.split(_GAP)
    body = {"prompt": prefix, "suffix": suffix, "max_tokens": _TOKENS, "stop": _stops(suffix)}
    return Task(name, body, program=partial(_program, prefix, suffix, tests), path=TEXT)


def _stops(suffix: str) -> list[str]:
    """Return the stop strings for a gap, as editors send them, because chat models often do not stop by themselves."""
    rest, *lines = suffix.splitlines()
    if rest:
        return ["\n"]
    following = [line for line in lines if line.strip()]
    return ["\n\n", *(f"\n{line}" for line in following[:1])]


def _program(prefix: str, suffix: str, tests: str, choice: Choice) -> str:
    return f"{prefix}{text_of(choice)}{suffix}\n{tests}"


_FUNCTIONS = [
    (
        "an expression",
        '''\
def celsius_to_fahrenheit(celsius):
    """Convert degrees Celsius to degrees Fahrenheit."""
    return @@@
''',
        "assert celsius_to_fahrenheit(100) == 212 and celsius_to_fahrenheit(-40) == -40",
    ),
    (
        "a condition",
        '''\
def is_leap_year(year):
    """Return whether a year of the Gregorian calendar has 366 days."""
    if @@@:
        return True
    return False
''',
        "assert [y for y in (1900, 1996, 2000, 2023, 2024, 2100) if is_leap_year(y)] == [1996, 2000, 2024]",
    ),
    (
        "the end of a loop",
        '''\
def running_maximum(numbers):
    """Return, for each position, the largest number so far."""
    result = []
    largest = None
    for number in numbers:
        @@@
    return result
''',
        "assert running_maximum([3, 1, 4, 1, 5]) == [3, 3, 4, 4, 5] and running_maximum([]) == []",
    ),
    (
        "a base case",
        '''\
def power(base, exponent):
    """Return base ** exponent for an exponent of at least 0, with few multiplications."""
    @@@
    half = power(base, exponent // 2)
    if exponent % 2 == 0:
        return half * half
    return half * half * base
''',
        "assert power(2, 10) == 1024 and power(3, 0) == 1 and power(5, 3) == 125",
    ),
    (
        "the name of a called function",
        """\
def _double(value):
    return 2 * value


def _square(value):
    return value * value


def square_all(values):
    return [@@@(value) for value in values]


def double_all(values):
    return [_double(value) for value in values]
""",
        "assert square_all([1, 2, 3]) == [1, 4, 9]",
    ),
    (
        "a method",
        '''\
class Stack:
    def __init__(self):
        self._items = []

    def push(self, item):
        self._items.append(item)

    def pop(self):
        """Remove the newest item and return it. Raises IndexError if the stack is empty."""
        @@@

    def __len__(self):
        return len(self._items)
''',
        """
stack = Stack()
stack.push(1); stack.push(2)
assert stack.pop() == 2 and len(stack) == 1 and stack.pop() == 1
try:
    stack.pop()
except IndexError:
    pass
else:
    raise AssertionError
""",
    ),
    (
        "an import",
        '''\
@@@


def word_counts(text):
    """Return a Counter of the words of a text."""
    return Counter(text.lower().split())
''',
        "assert word_counts('a b A') == {'a': 2, 'b': 1}",
    ),
    (
        "the middle of binary search",
        '''\
def find(numbers, wanted):
    """Return the index of a number in a sorted list, or -1."""
    low, high = 0, len(numbers) - 1
    while low <= high:
        middle = (low + high) // 2
        if numbers[middle] == wanted:
            return middle
        @@@
    return -1
''',
        "assert [find([1, 3, 5, 7, 9], n) for n in (1, 9, 5, 4, 10, 0)] == [0, 4, 2, -1, -1, -1]",
    ),
    (
        "the arguments of sorted",
        '''\
def by_length(words):
    """Return the words, shortest first; words of equal length are in alphabetical order."""
    return sorted(@@@)
''',
        "assert by_length(['pear', 'fig', 'kiwi', 'plum', 'apple']) == ['fig', 'kiwi', 'pear', 'plum', 'apple']",
    ),
    (
        "a regular expression",
        '''\
import re


def dates_in(text):
    """Return all dates in the form YYYY-MM-DD, such as 2024-02-29, as strings."""
    return re.findall(@@@, text)
''',
        "assert dates_in('from 2024-02-29 to 2025-01-01.') == ['2024-02-29', '2025-01-01'] and dates_in('12-3') == []",
    ),
    (
        "the handling of an error",
        '''\
def to_int(text, default=0):
    """Return the integer that a text contains, or the default if it contains none."""
    try:
        return int(text)
    @@@
''',
        "assert to_int('12') == 12 and to_int('x') == 0 and to_int('', 7) == 7",
    ),
    (
        "the step of an algorithm",
        '''\
def gcd(a, b):
    """Return the greatest common divisor of two positive integers by Euclid's algorithm."""
    while b:
        @@@
    return a
''',
        "assert gcd(12, 18) == 6 and gcd(7, 13) == 1 and gcd(100, 10) == 10",
    ),
    (
        "a docstring's function",
        '''\
def compress(text):
    """Replace each run of equal characters by the character and the length: 'aaab' becomes 'a3b1'."""
    if not text:
        return ""
    parts = []
    current, count = text[0], 1
    for character in text[1:]:
        if character == current:
            count += 1
        else:
            @@@
    parts.append(f"{current}{count}")
    return "".join(parts)
''',
        "assert compress('aaab') == 'a3b1' and compress('') == '' and compress('abc') == 'a1b1c1'",
    ),
    (
        "the values of a dictionary",
        """\
ROMAN = {"I": 1, "V": 5, @@@, "D": 500, "M": 1000}


def roman_to_int(numeral):
    total = 0
    for left, right in zip(numeral, numeral[1:] + " "):
        value = ROMAN[left]
        total += -value if ROMAN.get(right, 0) > value else value
    return total
""",
        "assert roman_to_int('MCMXCIV') == 1994 and roman_to_int('XLII') == 42",
    ),
    (
        "a nested comprehension",
        '''\
def transpose(rows):
    """Swap rows and columns: [[1, 2], [3, 4], [5, 6]] becomes [[1, 3, 5], [2, 4, 6]]."""
    if not rows:
        return []
    return [@@@ for column in range(len(rows[0]))]
''',
        "assert transpose([[1, 2], [3, 4], [5, 6]]) == [[1, 3, 5], [2, 4, 6]] and transpose([]) == []",
    ),
]
