"""80 questions with tools: 40 need a call, and 40 ask to show JSON or code, which is not a call.

Many models write a call as text: a JSON object with the name and the arguments. The server treats an answer as a call
if the answer was not cut off, consists only of such an object, with or without a code fence, names one of the tools,
and matches the tool's schema. `written_call` implements this rule a second time, independently of the server.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import jsonschema

from tests.real.answers import Choice, calls_of, text_of
from tests.real.groups import Task
from tests.real.tools import TOOLS, tools

_TOKENS = 240
_FENCE = re.compile(r"```[\w+-]*[ \t]*\n(.*)\n[ \t]*```", re.DOTALL)
_OFFERED = "get_weather send_email set_timer convert_currency search_code read_file translate add_event"


def needed_tasks() -> list[Task]:
    """Return the questions that need a call. An answer is right if it is one call of the right tool."""
    found = []
    for name, questions in _NEEDED.items():
        for number, question in enumerate(questions, 1):
            found.append(_task(f"{name}-{number}", question, lambda choice, name=name: called(choice) == [name]))
    return found


def shown_tasks() -> list[Task]:
    """Return the questions that ask to show JSON or code. An answer is right if it contains no call."""
    return [_task(question, question, lambda choice: not called(choice)) for question in _SHOWN]


def called(choice: Choice) -> list[str]:
    return [name for name, _ in calls_of(choice)]


def _task(name: str, question: str, is_right: Any) -> Task:
    body = {
        "messages": [{"role": "user", "content": question}],
        "tools": tools(_OFFERED),
        "tool_choice": "auto",
        "max_tokens": _TOKENS,
    }
    return Task(name, body, is_right)


def written_call(choice: Choice) -> tuple[str, Any] | None:
    """Return the name and the arguments of the call if an answer is a call in plain JSON, or else None."""
    if choice["finish_reason"] != "stop" or calls_of(choice):
        return None
    text = text_of(choice).strip()
    fenced = _FENCE.fullmatch(text)
    try:
        call = json.loads(fenced[1] if fenced else text)
    except ValueError:
        return None
    if not isinstance(call, dict) or call.keys() != {"name", "arguments"}:
        return None
    if call["name"] not in _OFFERED.split() or not _is_valid(call["arguments"], call["name"]):
        return None
    return call["name"], call["arguments"]


def _is_valid(arguments: Any, name: str) -> bool:
    schema = TOOLS[name]["function"]["parameters"]
    return bool(jsonschema.Draft202012Validator(schema).is_valid(arguments))


_NEEDED: dict[str, Sequence[str]] = {
    "get_weather": [
        "What is the weather like in Helsinki?",
        "Is it cold in Montreal today?",
        "Tell me the weather in Nairobi in degrees Celsius.",
        "Should I take sunglasses to Athens?",
        "How hot is it in Dubai, in Fahrenheit?",
        "Weather in Seoul, please.",
    ],
    "send_email": [
        "Send an email to jo@example.com with the subject Hi and the text How are you?",
        "Email lee@example.org that I will be late. The subject is Delay.",
        "Write to team@example.com: the build is green. Subject: Build.",
        "Please mail sam@example.net the text 'The keys are under the mat.' with the subject Keys.",
        "Send pat@example.com an email with the subject Thanks and the body Thank you for the gift.",
    ],
    "set_timer": [
        "Set a timer for 10 minutes.",
        "Start a timer of 3 minutes for the tea.",
        "I want to be reminded in 45 minutes. Start a timer.",
        "Timer, 20 minutes, label pizza.",
        "Please time 12 minutes for the pasta.",
    ],
    "convert_currency": [
        "How much is 100 USD in EUR?",
        "Convert 50 British pounds to Japanese yen.",
        "What are 999 Swedish kronor worth in US dollars?",
        "Change 20 euros to Polish zloty.",
        "I have 5000 Indian rupees. How many Canadian dollars is that?",
    ],
    "search_code": [
        "Search the project for the text connect_timeout.",
        "Where in the Python files is load_config called?",
        "Find the word deprecated in the Markdown files.",
        "Look for the string api_key in the code.",
        "Which JavaScript files mention localStorage? Search for it.",
    ],
    "read_file": [
        "Show me the file pyproject.toml of the project.",
        "What does src/main.py contain? Read it.",
        "Open docs/index.md.",
        "Read the file LICENSE.",
        "I need the contents of config/settings.yaml.",
    ],
    "translate": [
        "Use the tool to translate 'thank you very much' into Japanese.",
        "Translate the text 'Where is the station?' into Italian with the tool.",
        "Call the translator: 'I am hungry' in Welsh.",
        "Translate 'open the window' to Swahili, using the tool.",
    ],
    "add_event": [
        "Add an event named Concert on 2026-06-12 at 20:00.",
        "Put 'Call mother' into my calendar for 2026-01-31.",
        "Create a calendar event: Team lunch, 2026-04-15, 12:30.",
        "Add Vet appointment to the calendar on 2026-09-03 at 09:45.",
        "My flight is on 2026-07-01 at 06:20. Add it to the calendar.",
    ],
}
_SHOWN = [
    "Do not call anything. Show me what a JSON call of get_weather for Paris would look like.",
    "Write an example of the JSON with which a program would call set_timer for 5 minutes, and explain each key.",
    "I am writing documentation. Show an example call of convert_currency as JSON in a code block, with a short text.",
    "What does the JSON schema of the tool send_email look like? Show it in a code block.",
    "List the names of your tools as a JSON array.",
    "Show me a JSON object with the keys name and arguments. It is an exercise, so make up a tool named fly_kite.",
    "Give me an example of a tool call in OpenAI's format as JSON, for a tool named lookup_word.",
    "Explain what the field arguments of a tool call contains, with an example in JSON.",
    "Write a JSON object that describes a person named Ada who is 36 years old.",
    "Show a package.json for a small project named demo.",
    "Write a tsconfig.json with strict mode on.",
    "Show an example of GeoJSON for a point in Berlin.",
    "Give me a JSON array with the first five prime numbers.",
    "Write a JSON object with the name and the population of three cities.",
    "Show me a JSON document with a nested object and explain it.",
    "Convert this to JSON: name=Tom, age=30, city=Leeds.",
    'Correct this JSON: {"a": 1, "b": [2, 3}',
    'Format this JSON with indentation: {"x":1,"y":{"z":[1,2]}}',
    "What is the difference between JSON and YAML? Show a short example of both.",
    "Write a JSON schema for an object with a required string `title`.",
    "Write a Python function that sends an email with smtplib.",
    "Write a Python function get_weather(city) that returns a fixed dictionary.",
    "Show a Python script that starts a timer with time.sleep.",
    "Write a function in JavaScript that converts a currency with a given rate.",
    "How do I read a file in Python? Show the code.",
    "How do I search for a text in all files of a folder with grep? Show the command.",
    "Show a Python dictionary with the keys name and arguments.",
    "Write a Python class Event with a title and a date.",
    "Show how to parse JSON in Python with json.loads.",
    "Write a unit test in Python for a function add(a, b).",
    "Show a curl command that posts JSON to http://localhost:8000/items.",
    "Write an SQL query that counts the rows of a table named users.",
    "Show a Dockerfile for a small Python program.",
    "Write a regular expression that matches dates such as 2026-01-31.",
    "Show a YAML file for a GitHub workflow that runs pytest.",
    "Write a Makefile with a target named test.",
    "Show me a haiku in a code block.",
    "Write a TypeScript interface for a weather report with a city and a temperature.",
    "Give me a JSON example of a log entry with a time, a level and a message.",
    "Write a JSON object with a key `name` whose value is `get_weather`, and a key `version` whose value is 2.",
]
