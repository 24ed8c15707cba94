"""Ten conversations of agents, as a server's log has them: reasoning, calls of tools, their results, answers."""

import json
from typing import Any

Message = dict[str, Any]

_NAMES = {
    "weather": {"city": "The city's name."},
    "read_file": {"path": "Where the file is."},
    "write_file": {"path": "Where the file is.", "text": "All of it."},
    "search": {"query": "What to look for.", "filters": "An object of field and value."},
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Calls {name}.",
            "parameters": {
                "type": "object",
                "properties": {
                    key: {"type": "object" if key == "filters" else "string", "description": text}
                    for key, text in fields.items()
                },
                "required": list(fields),
            },
        },
    }
    for name, fields in _NAMES.items()
]


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _system(text: str) -> Message:
    return {"role": "system", "content": text}


def _says(text: str, thought: str) -> Message:
    return {"role": "assistant", "content": text, "reasoning": thought}


def _asks(thought: str, calls: dict[str, dict[str, Any]], text: str = "") -> Message:
    """An answer that calls tools; ``calls`` has the arguments by a call's id, ``<name>-<number>``."""
    made = [
        {
            "id": _id(name),
            "function": {
                "arguments": json.dumps(arguments, ensure_ascii=False),
                "name": name.partition("-")[0],
            },
            "type": "function",
        }
        for name, arguments in calls.items()
    ]
    return {"role": "assistant", "content": text, "reasoning": thought, "tool_calls": made}


def _tool(call: str, text: str) -> Message:
    return {"role": "tool", "tool_call_id": _id(call), "name": call.partition("-")[0], "content": text}


def _id(call: str) -> str:
    """Nine letters and digits, as some templates want."""
    name, _, number = call.partition("-")
    return f"{name.replace('_', ''):x<8}"[:8] + number


_OSLO, _ROME = {"city": "Oslo"}, {"city": "Rome"}
_HIT = '{"hits": [{"id": 7, "title": "Café \\"Übersee\\""}]}'
CONVERSATIONS: list[list[Message]] = [
    [
        _user("Weather in Oslo?"),
        _asks("I look it up.", {"weather-1": _OSLO}),
        _tool("weather-1", "12 degrees"),
        _says("It is 12 degrees in Oslo.", "That is all."),
    ],
    [
        _system("You help with files. Be brief."),
        _user("What is in notes.txt?"),
        _asks("Read it.", {"read_file-1": {"path": "notes.txt"}}, "I look."),
        _tool("read_file-1", "milk\neggs\n\tbread"),
        _says("A shopping list: milk, eggs, bread.", "A list."),
    ],
    [
        _user("Weather in Oslo and Rome?"),
        _asks("Oslo first.", {"weather-1": _OSLO}),
        _tool("weather-1", "12"),
        _asks("Now Rome.", {"weather-2": _ROME}),
        _tool("weather-2", "25"),
        _says("12 and 25 degrees.", "Both are known."),
        _user("Thanks."),
        _says("You are welcome.", "Be polite."),
    ],
    [
        _user("Weather in Oslo and Rome, at once?"),
        _asks("Both.", {"weather-1": _OSLO, "weather-2": _ROME}),
        _tool("weather-1", "12"),
        _tool("weather-2", "25"),
        _says("Rome is warmer by 13 degrees.", "25 - 12 = 13"),
    ],
    [
        _user("Find the café's page."),
        _asks(
            "Search.",
            {"search-1": {"query": "café Übersee", "filters": {"kind": ["bar", "café"], "open": True}}},
        ),
        _tool("search-1", _HIT),
        _says('It is page 7: "Café Übersee" ☕.', "One hit."),
    ],
    [
        _user("Hello!"),
        _says("Hello. What shall I do?", "A greeting."),
        _user("Weather in Rome."),
        _asks("Ask.", {"weather-1": _ROME}),
        _tool("weather-1", "25"),
        _says("25 degrees.", "Tell."),
    ],
    [
        _system("You write code."),
        _user("Write hello.py."),
        _asks("Write.", {"write_file-1": {"path": "hello.py", "text": 'if True:\n    print("hello")\n'}}),
        _tool("write_file-1", "28 bytes"),
        _asks("Check.", {"read_file-2": {"path": "hello.py"}}),
        _tool("read_file-2", 'if True:\n    print("hello")\n'),
        _says('Done:\n\n```python\nif True:\n    print("hello")\n```', "It is as it should be."),
    ],
    [
        _user("Is a.txt there?"),
        _asks("Read a.txt.", {"read_file-1": {"path": "a.txt"}}),
        _tool("read_file-1", "no such file"),
        _asks("Perhaps A.txt.", {"read_file-2": {"path": "A.txt"}}),
        _tool("read_file-2", "no such file"),
        _asks("Search.", {"search-3": {"query": "a.txt", "filters": {}}}),
        _tool("search-3", "[]"),
        _says("No.", "It is not."),
    ],
    [
        _user("Weather in Oslo?"),
        _asks("Ask.", {"weather-1": _OSLO}),
        _tool("weather-1", "12"),
        _says("12 degrees.", "Tell."),
        _user("And in Rome?"),
        _asks("Ask again.", {"weather-2": _ROME}),
        _tool("weather-2", "25"),
        _says("25 degrees.", "Tell."),
        _user("Which is warmer?"),
        _says("Rome.", "25 > 12"),
    ],
    [
        _user("Copy a.txt to b.txt."),
        _asks("Read.", {"read_file-1": {"path": "a.txt"}}, "First I read a.txt."),
        _tool("read_file-1", "alpha"),
        _asks("Write.", {"write_file-2": {"path": "b.txt", "text": "alpha"}}, "Now I write b.txt."),
        _tool("write_file-2", "5 bytes"),
        _says("b.txt now holds what a.txt holds.", "Done."),
    ],
]
