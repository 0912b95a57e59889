"""The tools that tasks offer, in the form of chat completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def _tool(name: str, description: str, *required: str, **parameters: str | list[str]) -> dict[str, Any]:
    """Return a tool. A parameter is "TYPE: description", "TYPE[]: description", or a list of strings to choose from."""
    properties: dict[str, Any] = {}
    for parameter, what in parameters.items():
        if isinstance(what, list):
            properties[parameter] = {"type": "string", "enum": what}
            continue
        kind, _, words = what.partition(": ")
        schema: dict[str, Any] = {"type": kind.removesuffix("[]"), "description": words}
        if kind.endswith("[]"):
            schema = {"type": "array", "items": {"type": kind.removesuffix("[]")}, "description": words}
        properties[parameter] = schema
    schema = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


_ALL = [
    _tool(
        "get_weather",
        "Get the current weather of a city.",
        "city",
        city="string: name of the city",
        unit=["celsius", "fahrenheit"],
    ),
    _tool(
        "send_email",
        "Send an email to one person.",
        "to",
        "subject",
        "body",
        to="string: email address",
        subject="string: subject line",
        body="string: text of the message",
    ),
    _tool(
        "convert_currency",
        "Convert an amount of money from one currency into another.",
        "amount",
        "from_currency",
        "to_currency",
        amount="number: amount to convert",
        from_currency="string: ISO code of three letters",
        to_currency="string: ISO code of three letters",
    ),
    _tool(
        "set_timer",
        "Start a kitchen timer.",
        "minutes",
        minutes="integer: length in minutes",
        label="string: what the timer is for",
    ),
    _tool("read_file", "Read a text file of the project.", "path", path="string: path below the project's root"),
    _tool("list_folder", "List the files in a folder of the project.", "path", path="string: path of the folder"),
    _tool("run_tests", "Run the tests of a folder or a file.", "path", path="string: path of the tests"),
    _tool(
        "search_code",
        "Search the project for a text.",
        "query",
        query="string: text to search for",
        file_type=["py", "js", "md"],
    ),
    _tool(
        "rename_file",
        "Rename a file of the project.",
        "old_path",
        "new_path",
        old_path="string: present path",
        new_path="string: new path",
    ),
    _tool(
        "play_music",
        "Play music of an artist.",
        "artist",
        artist="string: name of the artist",
        volume="integer: volume from 0 to 100",
    ),
    _tool(
        "set_light",
        "Switch the light of a room on or off.",
        "room",
        "state",
        room=["kitchen", "bedroom", "office", "garage"],
        state=["on", "off"],
    ),
    _tool(
        "set_thermostat",
        "Set the temperature of the heating.",
        "celsius",
        celsius="number: temperature in degrees Celsius",
    ),
    _tool("lock_door", "Lock a door of the house.", "door", door=["front", "back", "garage"]),
    _tool(
        "add_event",
        "Add an event to the calendar.",
        "title",
        "date",
        title="string: title of the event",
        date="string: date as YYYY-MM-DD",
        time="string: time as HH:MM",
    ),
    _tool("list_events", "List the events of a day.", "date", date="string: date as YYYY-MM-DD"),
    _tool(
        "book_table",
        "Book a table in a restaurant.",
        "restaurant",
        "people",
        restaurant="string: name of the restaurant",
        people="integer: number of people",
        time="string: time as HH:MM",
    ),
    _tool("get_stock_price", "Get the price of a share.", "symbol", symbol="string: ticker symbol, such as AAPL"),
    _tool(
        "translate",
        "Translate a text into another language.",
        "text",
        "language",
        text="string: text to translate",
        language="string: name of the target language in English",
    ),
    _tool(
        "add_to_list",
        "Add items to the shopping list.",
        "items",
        items="string[]: names of the items",
    ),
    _tool(
        "get_distance",
        "Get the distance between two cities in kilometers.",
        "start",
        "end",
        start="string: city",
        end="string: city",
    ),
]
TOOLS = {tool["function"]["name"]: tool for tool in _ALL}


def tools(names: str) -> list[dict[str, Any]]:
    return [TOOLS[name] for name in names.split()]


EVERY_TOOL: Sequence[str] = list(TOOLS)
