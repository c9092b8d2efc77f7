"""Five chats, as people publish them, and one for some templates: a record each, and its texts by name."""

from __future__ import annotations

import json
from typing import Any

ONE = ("How are you?", "I am well, thank you.")
THREE = (  # the second answer ends in a line feed, which some templates take away
    ("What does the fox see?", "A river and a hill."),
    ("And what else?", "12 ducks. 🦆\n"),
    ("Is it brown?", "Yes."),
)
SYSTEM = "Answer in one word."
WITH_SYSTEM = ("Is there a dog?", "No, none.")
PLAIN_BEFORE = ("Hello!", "Hello! How are you?")
THOUGHT = "Two hills, and 6 ducks on each.\nThat is 12."
WITH_THOUGHT = ("How many ducks are there?", "There are 12 ducks.")

FUNCTION = {
    "name": "weather",
    "description": "Says how warm it will be.",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "The name of a city."},
            "days": {"type": "integer", "description": "How many days ahead."},
        },
        "required": ["city"],
    },
}
TOOL = {"type": "function", "function": FUNCTION}
CALL_ID = "call00001"  # of nine letters and digits, as Mistral's templates want it
ARGUMENTS = {"city": "Zürich", "days": 2}
RESULT = '{"degrees": 18}'
WITH_TOOLS = ("How warm is Zürich in two days?", "It will be 18 degrees.")

TOOL_JSON = json.dumps(TOOL, ensure_ascii=False)  # as templates write a mapping
TOOL_JSON_INDENTED = json.dumps(TOOL, ensure_ascii=False, indent=4)
ARGUMENTS_JSON = json.dumps(ARGUMENTS, ensure_ascii=False)
RESULT_JSON = json.dumps(RESULT)


def _turns(*exchanges: tuple[str, str]) -> list[dict[str, Any]]:
    return [
        {"role": role, "content": text}
        for question, answer in exchanges
        for role, text in (("user", question), ("assistant", answer))
    ]


_TOOL_TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": WITH_TOOLS[0]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": CALL_ID, "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}],
    },
    {"role": "tool", "tool_call_id": CALL_ID, "name": "weather", "content": RESULT},
    {"role": "assistant", "content": WITH_TOOLS[1]},
]
CHATS: dict[str, dict[str, Any]] = {
    "one": {"messages": _turns(ONE)},
    "three": {"messages": _turns(*THREE)},
    "system": {"messages": [{"role": "system", "content": SYSTEM}, *_turns(WITH_SYSTEM)]},
    "tools": {"messages": _TOOL_TURNS, "tools": [TOOL]},
    "thinking": {
        "messages": [
            *_turns(PLAIN_BEFORE),
            {"role": "user", "content": WITH_THOUGHT[0]},
            {"role": "assistant", "reasoning_content": THOUGHT, "content": WITH_THOUGHT[1]},
        ]
    },
}
# of templates that write calls and their results, but read no definitions
UNDEFINED: dict[str, dict[str, Any]] = {"calls": {"messages": _TOOL_TURNS}}
