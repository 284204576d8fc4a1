"""Requests of an agent's conversation: a system prompt, tools, then turns of user, assistant with tool calls, tool.

Pure and fixed by the seed. What makes them like real ones for a router: many messages, source code and JSON as strings,
so that about one byte in twenty is part of an escape, numbers that a wrong type would change, keys beyond OpenAI's.
"""

from __future__ import annotations

import json
import random
from typing import Any, Final

MODEL: Final = "mock"
_VOCABULARY: Final = (
    "the router reads each block of a prompt once and keeps what decode has computed so far while prefill asks which "
    "lease still holds error handling must stay bounded return value of this function is never checked by its callers "
    "naïve größe 温度 schedule worker cache layer token"
)
_WORDS: Final = _VOCABULARY.split()
_TOOLS: Final = ("read_file", "edit_file", "run_command", "search_code")


def build_body(target_bytes: int, *, stream: bool, seed: int) -> bytes:
    """A chat request of at least ``target_bytes`` (compact UTF-8 JSON, as OpenAI's client sends it).

    The last message is a tool's result or a user's, as before any turn of an agent.
    """
    source = random.Random(seed)
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "system", "content": _build_text(source, 40)}],
        "tools": [_build_tool(name) for name in _TOOLS[: 1 if target_bytes < 4096 else len(_TOOLS)]],
        "temperature": 0.7,
        "top_p": 0.95,
        "max_tokens": 1024,
        "stream": stream,
    }
    if stream:
        body["stream_options"] = {"include_usage": True}
    size = len(_encode(body))
    lines = max(1, min(40, target_bytes // 2000))
    number = 0
    while size < target_bytes:
        for message in _build_turn(source, number, lines):
            body["messages"].append(message)
            size += len(_encode(message)) + 1
        number += 1
    return _encode(body)


def _build_turn(source: random.Random, number: int, lines: int) -> list[dict[str, Any]]:
    tool = source.choice(_TOOLS)
    arguments = json.dumps({"path": f"src/module_{source.randrange(999)}.py", "pattern": _build_text(source, 4)})
    call = {"id": f"call_{number:06d}", "type": "function", "function": {"name": tool, "arguments": arguments}}
    result = _build_code(source, lines)
    if tool == "run_command":  # JSON within a string: its escapes are escaped again
        result = json.dumps({"exit": 0, "seconds": round(source.random(), 6), "output": result})
    return [
        {"role": "user", "content": _build_text(source, 12)},
        {"role": "assistant", "content": _build_text(source, 8), "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": result},
    ]


def _build_text(source: random.Random, words: int) -> str:
    return " ".join(source.choice(_WORDS) for _ in range(words)) + ".\n"


def _build_code(source: random.Random, lines: int) -> str:
    return "".join(
        f'{" " * 4 * source.randrange(3)}{source.choice(_WORDS)}["{source.choice(_WORDS)}"] = '
        f"{source.randrange(10_000)}  # {_build_text(source, 6)}"
        for _ in range(lines)
    )


def _build_tool(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"path": {"type": "string"}, "pattern": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "description": f"Call {name}.", "parameters": parameters}}


def _encode(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
