"""20 functions to write from a description. Each must pass its tests."""

from __future__ import annotations

from functools import partial

from tests.real.answers import Choice, code_of
from tests.real.groups import Task

_TOKENS = 400
_END = "\n```\n"  # the end of the code block; the explanation after the block is not needed


def tasks() -> list[Task]:
    return [_task(*row) for row in _FUNCTIONS]


def _task(name: str, description: str, tests: str) -> Task:
    question = f"Write a Python function `{name}`. {description} Answer with one code block."
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": _TOKENS, "stop": [_END]}
    return Task(name, body, program=partial(_program, tests))


def _program(tests: str, choice: Choice) -> str:
    return f"{code_of(choice)}\n{tests}\n"


_FUNCTIONS = [
    (
        "swap_case_of_words(text)",
        "It changes every second word of a text to upper case, beginning with the first word, and returns the words "
        "joined by single spaces.",
        "assert swap_case_of_words('one two  three four') == 'ONE two THREE four'; assert swap_case_of_words('') == ''",
    ),
    (
        "digits_sum(number)",
        "It returns the sum of the decimal digits of an integer, without regard to its sign.",
        "assert digits_sum(1234) == 10; assert digits_sum(-99) == 18; assert digits_sum(0) == 0",
    ),
    (
        "moving_average(values, size)",
        "It returns the list of the means of all windows of `size` consecutive values. The list is empty if there are "
        "fewer values than `size`.",
        "assert moving_average([1, 2, 3, 4], 2) == [1.5, 2.5, 3.5]; assert moving_average([1], 2) == []",
    ),
    (
        "merge_sorted(a, b)",
        "It merges two sorted lists into one sorted list.",
        "assert merge_sorted([1, 4], [2, 3, 9]) == [1, 2, 3, 4, 9]; assert merge_sorted([], []) == []",
    ),
    (
        "is_balanced(text)",
        "It returns True if all round, square and curly brackets of a text are closed in the right order. Other "
        "characters are ignored.",
        "assert is_balanced('(a[b]{c})') and is_balanced(''); assert not is_balanced('(]') and not is_balanced('((')",
    ),
    (
        "parse_query(query)",
        "It turns a query string such as 'a=1&b=2' into a dictionary of strings. An empty string gives an empty "
        "dictionary, and a part without '=' has the value ''.",
        "assert parse_query('a=1&b=2') == {'a': '1', 'b': '2'}; assert parse_query('') == {}; "
        "assert parse_query('x&y=3') == {'x': '', 'y': '3'}",
    ),
    (
        "format_seconds(seconds)",
        "It formats a number of seconds as H:MM:SS, such as 3725 as '1:02:05'.",
        "assert format_seconds(3725) == '1:02:05'; assert format_seconds(0) == '0:00:00'; "
        "assert format_seconds(36000) == '10:00:00'",
    ),
    (
        "flatten(nested)",
        "It flattens a list that contains lists of any depth into one list.",
        "assert flatten([1, [2, [3, []], 4]]) == [1, 2, 3, 4]; assert flatten([]) == []",
    ),
    (
        "second_largest(numbers)",
        "It returns the second largest distinct number, or None if there are fewer than two distinct numbers.",
        "assert second_largest([5, 1, 5, 3]) == 3; assert second_largest([2, 2]) is second_largest([]) is None",
    ),
    (
        "caesar(text, shift)",
        "It shifts each letter from a to z and from A to Z by `shift` places, wraps around the alphabet, keeps the "
        "case of letters, and does not change other characters.",
        "assert caesar('Hello, xyz!', 3) == 'Khoor, abc!'; assert caesar(caesar('Abc', 5), -5) == 'Abc'",
    ),
    (
        "primes_below(limit)",
        "It returns the list of all primes below a limit.",
        "assert primes_below(20) == [2, 3, 5, 7, 11, 13, 17, 19]; assert primes_below(2) == []",
    ),
    (
        "group_by_first_letter(words)",
        "It returns a dictionary from the first letter of words to the list of words with this letter, in their order.",
        "assert group_by_first_letter(['apple', 'bean', 'ant']) == {'a': ['apple', 'ant'], 'b': ['bean']}",
    ),
    (
        "longest_run(values)",
        "It returns the length of the longest run of equal consecutive values, and 0 for an empty list.",
        "assert longest_run([1, 1, 2, 2, 2, 1]) == 3; assert longest_run([]) == 0; assert longest_run([7]) == 1",
    ),
    (
        "rotate(items, count)",
        "It returns a list in which all items are moved to the right by `count` places, where items that leave the end "
        "return at the start. `count` may be larger than the length, and the list may be empty.",
        "assert rotate([1, 2, 3, 4], 1) == [4, 1, 2, 3]; assert rotate([1, 2, 3], 4) == [3, 1, 2]; "
        "assert rotate([], 3) == []",
    ),
    (
        "to_snake_case(name)",
        "It converts a name such as 'maxLineLength' to 'max_line_length'.",
        "assert to_snake_case('maxLineLength') == 'max_line_length'; assert to_snake_case('name') == 'name'",
    ),
    (
        "matrix_multiply(a, b)",
        "It multiplies two matrices, which are lists of rows, without libraries.",
        "assert matrix_multiply([[1, 2], [3, 4]], [[5, 6], [7, 8]]) == [[19, 22], [43, 50]]; "
        "assert matrix_multiply([[1, 2, 3]], [[1], [1], [1]]) == [[6]]",
    ),
    (
        "common_prefix(words)",
        "It returns the longest prefix that all words have in common. For an empty list, it returns ''.",
        "assert common_prefix(['flow', 'flower', 'flight']) == 'fl'; assert common_prefix([]) == ''; "
        "assert common_prefix(['a', 'b']) == ''",
    ),
    (
        "binary(number)",
        "It returns the binary digits of an integer of at least 0 as a string, without the functions bin and format.",
        "assert binary(10) == '1010'; assert binary(0) == '0'; assert binary(255) == '11111111'",
    ),
    (
        "intersect_intervals(a, b)",
        "Both arguments are tuples (start, end). It returns the tuple of the range that both have in common, or None "
        "if they do not overlap. Intervals that only touch do not overlap.",
        "assert intersect_intervals((1, 5), (3, 9)) == (3, 5); assert intersect_intervals((1, 2), (2, 3)) is None; "
        "assert intersect_intervals((1, 9), (4, 5)) == (4, 5)",
    ),
    (
        "change(amount, coins)",
        "It returns the smallest number of coins that add up to an amount, or -1 if that is impossible. There are "
        "enough coins of each value.",
        "assert change(11, [1, 2, 5]) == 3; assert change(3, [2]) == -1; assert change(0, [1]) == 0; "
        "assert change(6, [1, 3, 4]) == 2",
    ),
]
