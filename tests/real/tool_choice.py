"""60 questions with 1 to 20 tools: one call, several calls, or none. The model chooses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from tests.real.answers import Choice, calls_of
from tests.real.groups import Task
from tests.real.tools import EVERY_TOOL, tools

Expected = Sequence[tuple[str, Mapping[str, Any]]]  # names and arguments, in any order; a function judges a value
_TOKENS = 200


def tasks() -> list[Task]:
    found = []
    for label, names, questions in _QUESTIONS:
        for number, (question, expected) in enumerate(questions, 1):
            body = {
                "messages": [{"role": "user", "content": question}],
                "tools": tools(names),
                "tool_choice": "auto",
                "max_tokens": _TOKENS,
            }
            found.append(Task(f"{label}-{number}", body, partial(_is_right, expected)))
    return found


def _is_right(expected: Expected, choice: Choice) -> bool:
    """Return whether an answer has exactly these calls, in any order. Text before or after the calls is ignored."""
    calls = calls_of(choice)
    if len(calls) != len(expected):
        return False
    for name, arguments in expected:
        found = [call for call in calls if call[0] == name and _agree(arguments, call[1])]
        if not found:
            return False
        calls.remove(found[0])
    return True


def _agree(expected: Mapping[str, Any], arguments: object) -> bool:
    return isinstance(arguments, dict) and all(_equal(value, arguments.get(key)) for key, value in expected.items())


def _equal(expected: Any, value: Any) -> bool:
    if callable(expected):
        return bool(expected(value))
    if isinstance(expected, list):
        return isinstance(value, list) and len(value) == len(expected) and all(map(_equal, expected, value))
    if isinstance(expected, str):
        return isinstance(value, str) and value.strip().casefold() == expected.casefold()
    return bool(value == expected)


def _has(*words: str) -> Callable[[Any], bool]:
    """Return a function that tests whether a text contains all of these words."""
    return lambda value: isinstance(value, str) and all(word.casefold() in value.casefold() for word in words)


def _path(name: str) -> Callable[[Any], bool]:
    """Return a function that tests for a path, which may begin with ./ or / and may end with a slash."""
    return lambda value: isinstance(value, str) and value.removeprefix(".").strip("/") == name


_NONE: Expected = ()
_QUESTIONS: list[tuple[str, str, list[tuple[str, Expected]]]] = [
    (
        "one-tool",
        "get_weather",
        [
            ("What is the weather in Oslo?", [("get_weather", {"city": "Oslo"})]),
            ("Do I need an umbrella in Lima right now?", [("get_weather", {"city": "Lima"})]),
            (
                "How warm is it in Chicago, in degrees Fahrenheit?",
                [("get_weather", {"city": "Chicago", "unit": "fahrenheit"})],
            ),
            (
                "Compare the weather in Rome and in Madrid.",
                [("get_weather", {"city": "Rome"}), ("get_weather", {"city": "Madrid"})],
            ),
            ("What is 12 times 12?", _NONE),
            ("Write one sentence about the sea.", _NONE),
        ],
    ),
    (
        "two-tools",
        "get_weather send_email",
        [
            ("Is it raining in Hamburg?", [("get_weather", {"city": "Hamburg"})]),
            (
                "Send an email to anna@example.org with the subject Lunch and the text: See you at noon.",
                [("send_email", {"to": "anna@example.org", "subject": "Lunch", "body": _has("see you at noon")})],
            ),
            (
                "Mail bob@example.com that the meeting is cancelled. The subject is Meeting.",
                [("send_email", {"to": "bob@example.com", "subject": "Meeting", "body": _has("cancel")})],
            ),
            (
                "Send the text Hello with the subject Greetings to carl@example.com and to dora@example.com.",
                [
                    ("send_email", {"to": "carl@example.com", "body": _has("hello")}),
                    ("send_email", {"to": "dora@example.com", "body": _has("hello")}),
                ],
            ),
            ("What is the capital of Portugal?", _NONE),
            ("Thank you, that was very helpful!", _NONE),
        ],
    ),
    (
        "kitchen",
        "set_timer convert_currency add_to_list",
        [
            ("Set a timer for 8 minutes.", [("set_timer", {"minutes": 8})]),
            ("My eggs need 6 minutes. Start a timer for them.", [("set_timer", {"minutes": 6})]),
            (
                "How much are 250 US dollars in euros?",
                [("convert_currency", {"amount": 250, "from_currency": "USD", "to_currency": "EUR"})],
            ),
            (
                "Convert 1200 yen into pounds sterling.",
                [("convert_currency", {"amount": 1200, "from_currency": "JPY", "to_currency": "GBP"})],
            ),
            ("Put milk and bread on my shopping list.", [("add_to_list", {"items": ["milk", "bread"]})]),
            (
                "Add rice to the shopping list, and start a timer for 15 minutes.",
                [("add_to_list", {"items": ["rice"]}), ("set_timer", {"minutes": 15})],
            ),
            ("Which is heavier, a kilogram of iron or a kilogram of feathers?", _NONE),
        ],
    ),
    (
        "project",
        "read_file list_folder run_tests search_code rename_file",
        [
            ("Show me what is in setup.cfg.", [("read_file", {"path": _path("setup.cfg")})]),
            ("Which files are in the folder src/models?", [("list_folder", {"path": _path("src/models")})]),
            ("Run the tests in tests/unit.", [("run_tests", {"path": _path("tests/unit")})]),
            ("Where is parse_header used?", [("search_code", {"query": _has("parse_header")})]),
            ("Find every TODO in the Python files.", [("search_code", {"query": _has("todo"), "file_type": "py"})]),
            (
                "Rename notes.txt to notes.md.",
                [("rename_file", {"old_path": _path("notes.txt"), "new_path": _path("notes.md")})],
            ),
            (
                "Read a.py and b.py.",
                [("read_file", {"path": _path("a.py")}), ("read_file", {"path": _path("b.py")})],
            ),
            (
                "List the folder docs, and run the tests in tests/docs.",
                [("list_folder", {"path": _path("docs")}), ("run_tests", {"path": _path("tests/docs")})],
            ),
            ("What does the word refactoring mean?", _NONE),
            ("What is the difference between a list and a tuple in Python?", _NONE),
        ],
    ),
    (
        "house",
        "play_music set_light set_thermostat lock_door set_timer get_weather add_event list_events",
        [
            ("Turn on the light in the kitchen.", [("set_light", {"room": "kitchen", "state": "on"})]),
            (
                "It is too bright in the bedroom. Light off, please.",
                [("set_light", {"room": "bedroom", "state": "off"})],
            ),
            ("Make it 21 degrees in here.", [("set_thermostat", {"celsius": 21})]),
            ("Lock the back door.", [("lock_door", {"door": "back"})]),
            ("Play something by Nina Simone at volume 30.", [("play_music", {"artist": "Nina Simone", "volume": 30})]),
            (
                "Switch off the lights in the office and in the garage.",
                [("set_light", {"room": "office", "state": "off"}), ("set_light", {"room": "garage", "state": "off"})],
            ),
            (
                "Good night! Lock the front door and set the heating to 17 degrees.",
                [("lock_door", {"door": "front"}), ("set_thermostat", {"celsius": 17})],
            ),
            ("What do I have planned on 2026-05-04?", [("list_events", {"date": "2026-05-04"})]),
            ("How are you today?", _NONE),
            ("Name three famous jazz pianists.", _NONE),
        ],
    ),
    (
        "twelve-tools",
        "get_weather send_email convert_currency set_timer add_event list_events book_table get_stock_price translate "
        "add_to_list get_distance play_music",
        [
            ("How far is it from Berlin to Prague?", [("get_distance", {"start": "Berlin", "end": "Prague"})]),
            ("What is a share with the symbol MSFT worth?", [("get_stock_price", {"symbol": "MSFT"})]),
            (
                "Book a table for four people at Casa Luna at 19:30.",
                [("book_table", {"restaurant": _has("casa luna"), "people": 4, "time": "19:30"})],
            ),
            (
                "Translate 'good morning' into Finnish, with the tool.",
                [("translate", {"text": _has("good morning"), "language": "Finnish"})],
            ),
            (
                "Add the event Dentist on 2026-03-09 at 08:15.",
                [("add_event", {"title": _has("dentist"), "date": "2026-03-09", "time": "08:15"})],
            ),
            (
                "I need the prices of AAPL and NVDA.",
                [("get_stock_price", {"symbol": "AAPL"}), ("get_stock_price", {"symbol": "NVDA"})],
            ),
            (
                "What is the weather in Vienna, and how far is Vienna from Graz?",
                [("get_weather", {"city": "Vienna"}), ("get_distance", {"start": "Vienna", "end": "Graz"})],
            ),
            ("Explain in one sentence what inflation is.", _NONE),
            ("Write a haiku about autumn.", _NONE),
        ],
    ),
    (
        "all-tools",
        " ".join(EVERY_TOOL),
        [
            ("Lock the garage door.", [("lock_door", {"door": "garage"})]),
            ("Open the file README.md and show me its text.", [("read_file", {"path": _path("README.md")})]),
            ("What is the temperature in Cairo?", [("get_weather", {"city": "Cairo"})]),
            (
                "Change 75 Swiss francs into Danish kroner.",
                [("convert_currency", {"amount": 75, "from_currency": "CHF", "to_currency": "DKK"})],
            ),
            ("Wake me in 25 minutes.", [("set_timer", {"minutes": 25})]),
            (
                "We are out of coffee, tea and sugar. Put them on the list.",
                [("add_to_list", {"items": ["coffee", "tea", "sugar"]})],
            ),
            ("Search the code for the text retry_after.", [("search_code", {"query": _has("retry_after")})]),
            (
                "Play Mozart, and switch on the light in the office.",
                [("play_music", {"artist": _has("mozart")}), ("set_light", {"room": "office", "state": "on"})],
            ),
            (
                "Check the weather in Paris, London and Tokyo.",
                [("get_weather", {"city": city}) for city in ("Paris", "London", "Tokyo")],
            ),
            ("What can you do for me?", _NONE),
            ("Is 97 a prime number?", _NONE),
            ("Tell me a short joke about cats.", _NONE),
        ],
    ),
]
