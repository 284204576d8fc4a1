"""Go on with a stream of chat or completions whose decode engine died; pure.

A :class:`Recorder` follows the stream that a client gets and knows the text so far. When the engine dies, it builds the
request that asks another engine for the rest: the conversation with a partial answer to go on with, or the prompt with
the text behind it. A :class:`Rewriter` makes the other engine's stream look like more of the first one.

Only whole events go to the client, so that what the client has got is exactly what was recorded; the beginning of an
event that never ended is dropped.

An engine may also say itself that it failed: when vLLM's core dies, its server ends every stream with an error event
and ``[DONE]``. These are held back (:attr:`Recorder.failed`): either the stream goes on elsewhere, or they are sent
after all (:meth:`Recorder.release`).

What it cannot do: one choice of plain text only. A request or a stream with more than that (tool calls, reasoning, log
probabilities, a grammar, several choices) is not continued, see :func:`_is_continuable` and :meth:`Recorder._observe`.

How exact it is:

- Text: nothing is lost or sent twice. The model goes on from the text, not from its tokens: at the seam the tokens may
  be others than in one run, and a chat template that trims a message drops white space at its end for the model.
- Tokens: exact when the stream carries ``usage`` or ``token_ids`` with each event. Else every event counts as one token
  (or as the request's ``stream_interval``), which is too few where the engine puts several into one event.
  ``max_tokens`` and ``usage`` are as exact as that.
- A stop string across the seam is not noticed. A seed starts anew.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from bidikv_runtime.router.api.legs import is_batch, is_set
from bidikv_runtime.router.api.splice import Buffer, Fields, parse_fields, splice
from bidikv_runtime.router.observe.record import Route

_END: Final = b"\n\n"
_DATA: Final = b"data:"
_DONE: Final = b"[DONE]"
_EVENT_BYTES: Final = 1024 * 1024
"""Of one event; a longer one is no token."""
_TEXT_CHARACTERS: Final = 4 * 1024 * 1024
_NOT_WITH: Final = (
    "audio",
    "continue_final_message",
    "echo",
    "function_call",
    "functions",
    "logprobs",
    "prompt_embeds",
    "structured_outputs",
    "suffix",
    "use_beam_search",
)


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: list[msgspec.Raw] | None = None
    function_call: msgspec.Raw = msgspec.Raw(b"null")


class _Choice(msgspec.Struct):
    index: int = 0
    delta: _Delta | None = None
    text: str | None = None
    logprobs: msgspec.Raw = msgspec.Raw(b"null")
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice]
    id: msgspec.Raw = msgspec.Raw(b"null")
    created: msgspec.Raw = msgspec.Raw(b"null")
    model: msgspec.Raw = msgspec.Raw(b"null")
    usage: _Usage | None = None


class _Error(msgspec.Struct):
    code: int


class _Failure(msgspec.Struct):
    error: _Error


class _Options(msgspec.Struct):
    type: str = ""


_CHUNK: Final = msgspec.json.Decoder(_Chunk)
_FAILURE: Final = msgspec.json.Decoder(_Failure)
_OPTIONS: Final = msgspec.json.Decoder(_Options)
_BAD_JSON: Final = (msgspec.MsgspecError, UnicodeDecodeError)


class _Events:
    """Cuts a stream into whole events."""

    def __init__(self) -> None:
        self._pending = b""

    def cut(self, data: bytes) -> list[bytes]:
        """The events that ``data`` completes, each with the blank line behind it."""
        *events, self._pending = (self._pending + data).split(_END)
        return [event + _END for event in events]

    @property
    def is_too_long(self) -> bool:
        return len(self._pending) > _EVENT_BYTES

    def flush(self) -> bytes:
        """The beginning of an event that has not ended."""
        pending, self._pending = self._pending, b""
        return pending


def _read_data(event: bytes) -> bytes:
    """What an event of one ``data`` line carries; empty for any other, such as a comment."""
    line = event[: -len(_END)].lstrip(b"\n")
    return line[len(_DATA) :].strip() if line.startswith(_DATA) and b"\n" not in line else b""


def _is_failure(data: bytes) -> bool:
    try:
        return _FAILURE.decode(data).error.code >= 500
    except _BAD_JSON:
        return False


def _is_continuable(route: Route, fields: Fields) -> bool:
    if route not in ("chat", "completions") or bytes(fields.get("stream", b"")) != b"true":
        return False
    if any(is_set(fields, key) for key in _NOT_WITH):
        return False
    if any(bytes(fields.get(key, b"1")) not in (b"1", b"null") for key in ("n", "best_of")):
        return False
    if bytes(fields.get("add_generation_prompt", b"true")) != b"true":
        return False
    if is_set(fields, "tool_choice") and bytes(fields["tool_choice"]) not in (b'"none"', b'"auto"'):
        return False
    if is_set(fields, "response_format"):
        try:
            return _OPTIONS.decode(fields["response_format"]).type == "text"
        except _BAD_JSON:
            return False
    if route == "completions":
        return bytes(memoryview(fields.get("prompt", b""))[:1]) == b'"' and not is_batch(fields)
    return bytes(memoryview(fields.get("messages", b""))[:1]) == b"["


class Recorder:
    """Follows the stream of one request, over all engines that took part in it."""

    def __init__(self, route: Route, per_event: int) -> None:
        self.continuable = True
        """Nothing has come that could not be continued."""
        self.tokens = 0
        """Generated so far, all engines together."""
        self.prompt_tokens = 0
        """Of the client's prompt; 0 when no event has said so."""
        self.identity: dict[str, bytes] = {}
        """``id``, ``created`` and ``model`` of the first event, encoded."""
        self.began = False
        """The event with the role, or any with text, went to the client."""
        self._route = route
        self._per_event = per_event
        self._text: list[str] = []
        """Since the last follow-up, as are its characters."""
        self._asked_tokens = 0
        """Those that the last follow-up took into account."""
        self._asked = False
        """The last follow-up's messages end with a partial answer."""
        self._characters = 0
        self._events = _Events()
        self._finished = False
        self._done = False
        self._held: list[bytes] = []

    @classmethod
    def build(cls, route: Route, fields: Fields) -> Recorder | None:
        """A recorder, or None for a request whose stream could never be continued."""
        if not _is_continuable(route, fields):
            return None
        return cls(route, _read_count(fields, "stream_interval") or 1)

    def feed(self, data: bytes) -> bytes:
        """Record ``data``; what of it to send now: whole events, or everything once it cannot be continued."""
        if not self.continuable:
            return data
        passed = b"".join([self.record(event) for event in self._events.cut(data)])
        if self._events.is_too_long:
            self.continuable = False
        if not self.continuable:
            passed += self._events.flush()
        return passed

    def record(self, event: bytes) -> bytes:
        """Take note of a whole event; give it back unless it is held back."""
        if self.continuable and (self._held or self._take(event)):
            self._held.append(event)
            return b""
        return event

    @property
    def failed(self) -> bool:
        """The engine said that it failed; this and what came behind it is held back."""
        return bool(self._held)

    def release(self) -> bytes:
        """What was held back, to be sent; a :class:`Rewriter` drops it, since its stream goes on."""
        held, self._held = self._held, []
        return b"".join(held)

    def _take(self, event: bytes) -> bool:
        """Take note of one event; whether it says that the engine failed."""
        data = _read_data(event)
        if not data:
            return False
        if data == _DONE:
            self._done = True
            return False
        try:
            self._observe(_CHUNK.decode(data))
        except _BAD_JSON:
            if not self._finished and _is_failure(data):
                return True
            self.continuable = False
        return False

    def _observe(self, chunk: _Chunk) -> None:
        if not self.identity:
            self.identity = {"id": bytes(chunk.id), "created": bytes(chunk.created), "model": bytes(chunk.model)}
        if chunk.usage is not None:
            self.prompt_tokens = chunk.usage.prompt_tokens or self.prompt_tokens
        if not chunk.choices:
            return
        choice = chunk.choices[0]
        text: str | None
        if self._route == "chat":
            delta = choice.delta or _Delta()
            beyond = delta.tool_calls or delta.reasoning or delta.reasoning_content or delta.refusal
            plain = not beyond and bytes(delta.function_call) == b"null"
            text = delta.content
            is_role = delta.role is not None and not text and choice.finish_reason is None
        else:
            plain, text, is_role = True, choice.text, False
        if not plain or len(chunk.choices) > 1 or choice.index != 0 or bytes(choice.logprobs) != b"null":
            self.continuable = False
            return
        self.began = True
        if text:
            self._text.append(text)
            self._characters += len(text)
            if self._characters > _TEXT_CHARACTERS:
                self.continuable = False
        if choice.finish_reason is not None:
            self._finished = True
        if chunk.usage is not None and chunk.usage.completion_tokens is not None:
            self.tokens = chunk.usage.completion_tokens
        elif choice.token_ids is not None:
            self.tokens += len(choice.token_ids)
        elif not is_role:
            self.tokens += self._per_event if self.tokens else 1  # vLLM sends the first token at once

    def build_ending(self) -> bytes:
        """What is left to send when the whole answer has come and only the stream's end is missing, else nothing."""
        return b"data: [DONE]\n\n" if self.continuable and self._finished and not self._done else b""

    def build_follow_up(self, body: Buffer, fields: Fields) -> list[Buffer] | None:
        """The request for the rest of the answer.

        Args:
            body: of the request whose stream broke: the client's, or the last follow-up.
            fields: its top-level values.

        Returns:
            None when the stream cannot be continued, has ended, or has used up ``max_tokens``.
        """
        if not self.continuable or self._finished:
            return None
        self._events.flush()
        text, generated = "".join(self._text), self.tokens - self._asked_tokens
        if not text and not generated:
            return [body]
        override: dict[str, bytes] = {}
        for key in ("max_tokens", "max_completion_tokens"):
            if (limit := _read_count(fields, key)) is not None:
                if limit <= generated:
                    return None
                override[key] = b"%d" % (limit - generated)
        if least := _read_count(fields, "min_tokens"):
            override["min_tokens"] = b"%d" % max(0, least - generated)
        self._text.clear()
        self._asked_tokens = self.tokens
        if not text:
            return splice(fields, (), override)
        encoded = msgspec.json.encode(text)
        key = "messages" if self._route == "chat" else "prompt"
        history = memoryview(fields[key])
        if self._route == "completions":
            history, added = history[:-1], encoded[1:]
        elif self._asked:
            history, added = history[: -len(b'"}]')], encoded[1:] + b"}]"
        else:
            override |= {"add_generation_prompt": b"false", "continue_final_message": b"true"}
            history, added = history[:-1], b',{"role":"assistant","content":%b}]' % encoded
        self._asked = True
        *pieces, last = splice(fields, (key,), override)
        start = bytes(last)[:-1] + (b',"%b":' if len(last) > 2 else b'"%b":') % key.encode("ascii")
        return [*pieces, start, history, added + b"}"]


class Rewriter:
    """Makes the stream of a follow-up one with what ``recorder`` has seen."""

    def __init__(self, recorder: Recorder) -> None:
        recorder.release()
        self._recorder = recorder
        self._events = _Events()
        self._before = recorder.tokens
        """Tokens that other engines have generated."""

    def feed(self, data: bytes) -> bytes:
        """What to send instead of ``data``: whole events only."""
        return b"".join(
            [
                self._recorder.record(rewritten)
                for event in self._events.cut(data)
                if (rewritten := self._rewrite(event))
            ]
        )

    def _rewrite(self, event: bytes) -> bytes:
        data = _read_data(event)
        if not data or data == _DONE:
            return event
        try:
            chunk, fields = _CHUNK.decode(data), parse_fields(data)
        except (*_BAD_JSON, ValueError):
            return event  # an error, for one
        override = dict(self._recorder.identity)
        choice = chunk.choices[0] if chunk.choices else None
        if self._recorder.began and choice is not None and choice.delta is not None and choice.delta.role is not None:
            if not choice.delta.content and choice.finish_reason is None:
                return b""
            override["choices"] = _drop_role(fields["choices"])
        if chunk.usage is not None:
            override["usage"] = self._correct_usage(fields["usage"], chunk.usage)
        repeated = ("prompt_token_ids", "prompt_text") if self._recorder.began else ()
        return b"data: " + b"".join(splice(fields, repeated, override)) + _END

    def _correct_usage(self, raw: msgspec.Raw, usage: _Usage) -> bytes:
        completion = (usage.completion_tokens or 0) + self._before
        prompt = self._recorder.prompt_tokens or max(0, usage.prompt_tokens - self._before)
        corrected: dict[str, Any] = msgspec.json.decode(raw)
        corrected |= {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }
        return msgspec.json.encode(corrected)


def _drop_role(raw: msgspec.Raw) -> bytes:
    choices = msgspec.json.decode(raw)
    choices[0]["delta"].pop("role", None)
    return msgspec.json.encode(choices)


def _read_count(fields: Fields, key: str) -> int | None:
    raw = fields.get(key)
    if raw is None:
        return None
    try:
        return msgspec.json.decode(raw, type=int)
    except _BAD_JSON:
        return None
