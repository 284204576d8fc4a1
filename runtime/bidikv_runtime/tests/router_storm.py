"""What a storm is made of: engines that fail by a seed, and clients that can tell a right answer from a wrong one.

Every request carries a nonce, and what it must be answered follows from the nonce alone, so that an answer that is cut
short, doubled, mixed with another one or from another session cannot pass for the right one. What an engine does to a
request is drawn from seed, nonce, engine and try: the order in which requests arrive changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
from collections import Counter
from dataclasses import asdict, dataclass, field
from random import Random
from typing import Any, Final, Literal

from bidikv_runtime.contract import REPORT_PATH, EngineReport, SessionReport
from bidikv_runtime.router.choice.endpoints import Endpoint
from bidikv_runtime.tests.router_engine import Exchange, MockEngine

Api = Literal["chat", "completions", "responses", "messages", "passed"]
Fault = Literal[
    "none", "reset", "head", "status", "lost", "refusal", "body", "stall", "stall_body", "close", "endless", "pause"
]
State = Literal["ready", "leaving", "unready"]
PATHS: Final[dict[Api, str]] = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "passed": "/v1/embeddings",
}
RETRIABLE: Final[tuple[Fault, ...]] = ("reset", "head", "status", "lost")
ANY: Final[tuple[Fault, ...]] = (*RETRIABLE, "refusal", "body", "stall", "stall_body", "close", "endless", "pause")
SILENCE_SECONDS: Final = 0.4
"""Of the routers' limits: what stalls is given up after this."""
_NONCE: Final = re.compile(rb"nonce-[0-9a-f]{8}")
_RETRIED: Final = (500, 502, 503, 504)
_VERDICTS: Final = (400, 404, 429)


# --- what is right ---


def build_pieces(nonce: str) -> list[str]:
    """The text that answers ``nonce``, as its events carry it."""
    random = Random(nonce)
    padding = random.choice([0, 0, 0, 10, 500, 40_000])
    return [f"{nonce}:{index}{'x' * padding} " for index in range(random.randint(1, 6))]


def _build_event(api: Api, text: str) -> bytes:
    if api == "chat":
        return _data({"id": "i", "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]})
    if api == "completions":
        return _data({"id": "i", "choices": [{"index": 0, "text": text, "finish_reason": None}]})
    name = "response.output_text.delta" if api == "responses" else "content_block_delta"
    return f"event: {name}\n".encode() + _data({"type": name, "delta": text})


def _build_end(api: Api) -> list[bytes]:
    if api in ("chat", "completions"):
        choice = {"index": 0, "delta": {}, "text": "", "finish_reason": "stop"}
        return [_data({"id": "i", "choices": [choice]}), b"data: [DONE]\n\n"]
    name = "response.completed" if api == "responses" else "message_stop"
    return [f"event: {name}\n".encode() + _data({"type": name})]


def _data(document: Any) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


# --- engines ---


class StormEngine(MockEngine):
    """An engine with faults."""

    def __init__(self, seed: int, role: str, number: int, faults: tuple[Fault, ...], share: float) -> None:
        super().__init__(lookup_port=5700 + number)
        self.name = f"{role}{number}"
        self.role = role
        self.faults = faults
        self.share = share
        """Of requests that meet a fault."""
        self.running: list[str] = []
        """Nonces of what it is answering."""
        self.broken: set[str] = set()
        """Nonces of which it broke an answer off, or may have."""
        self._begun: set[str] = set()
        self._seed = seed
        self._tries: Counter[str] = Counter()
        self._sessions: dict[str, SessionReport] = {}
        self._reports = 0
        self.behave = self._behave

    def describe(self, state: State = "ready") -> Endpoint:
        """As a snapshot of the cluster shows it."""
        return Endpoint(
            "127.0.0.1",
            self.port,
            self.lookup_port,
            ready=state == "ready",
            serving=state != "unready",
            terminating=state == "leaving",
            state_port=self.port,
        )

    async def stop(self) -> None:
        self.broken |= self._begun & {*self.running}
        await super().stop()

    async def _behave(self, exchange: Exchange) -> None:
        self.exchanges.clear()  # they hold bodies
        if exchange.method == "GET":
            await self._tell(exchange)
            return
        nonce = _NONCE.findall(exchange.body)[-1].decode()
        self._tries[nonce] += 1
        random = Random(f"{self._seed}/{nonce}/{self.name}/{self._tries[nonce]}")
        fault = random.choice(self.faults) if random.random() < self.share else "none"
        self.running.append(nonce)
        try:
            await self._answer(exchange, nonce, fault, random)
            transport = exchange.writer.transport
            while transport.get_write_buffer_size() and not transport.is_closing():  # noqa: ASYNC110 -- nobody tells
                await asyncio.sleep(0.001)  # who is killed now has not sent it all
        finally:
            self.running.remove(nonce)

    async def _tell(self, exchange: Exchange) -> None:
        if not exchange.target.startswith(REPORT_PATH):
            await exchange.send_json(200, {})
            return
        self._reports += 1
        random = Random(f"{self._seed}/{self.name}/report/{self._reports}")
        if (chance := random.random()) < self.share / 4:
            await exchange.send_json(random.choice([404, 500]), {})
        elif chance < self.share / 2:
            exchange.writer.transport.abort()
        else:
            held = tuple(self._sessions.values())
            report = EngineReport(self.name, "e", self._reports, "", len(self.running), 0, 5000.0, 1.0, held)
            await exchange.send_json(200, asdict(report))

    async def _answer(self, exchange: Exchange, nonce: str, fault: Fault, random: Random) -> None:
        body = exchange.json
        params = body.get("kv_transfer_params") or {}
        guarded = exchange.header("x-bidikv-handover") == "guarded"
        if self.role == "decode" and (name := params.get("bidikv_session")):
            tokens = max(1, len(exchange.body) // 4)
            self._sessions[name] = SessionReport(name, tokens, tokens, tokens, params.get("bidikv_body_bytes", 0))
        exchange.body = b""
        match fault:
            case "reset":
                exchange.writer.transport.abort()
                return
            case "head":
                await exchange.send(b"HTTP/1.1 200 OK\r\ncontent-ty")
                exchange.writer.transport.abort()
                return
            case "status" | "refusal":
                status = random.choice(_RETRIED if fault == "status" else _VERDICTS)
                await exchange.send_json(status, {"error": {"message": nonce, "code": status}})
                return
            case "lost" if guarded:
                await exchange.send_json(503, {"error": {"message": nonce, "code": 503}}, "x-bidikv-handover: lost")
                return
            case "stall":
                await exchange.closed_by_router.wait()
                return
            case "pause":
                await asyncio.sleep(0.3)  # long enough for a comment
        self._begun.add(nonce)
        if self.role == "prefill":
            tokens = 1 + len(nonce)
            usage = {"prompt_tokens": tokens, "input_tokens": tokens}
            await self._send_document(exchange, nonce, {"usage": usage, "prompt_token_ids": [1, 2]}, fault)
        elif body.get("stream") is True:
            await self._send_stream(exchange, nonce, _find_api(exchange.target), json.dumps(body), fault)
        else:
            await self._send_document(exchange, nonce, {"text": "".join(build_pieces(nonce))}, fault)
        if fault == "close":
            exchange.writer.close()  # as it does to connections that were idle for long

    async def _send_document(self, exchange: Exchange, nonce: str, document: Any, fault: Fault) -> None:
        data = json.dumps(document).encode()
        length = b"" if fault == "endless" else b"content-length: %d\r\n" % len(data)
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n" + length + b"\r\n"
        if fault in ("body", "stall_body"):
            self.broken.add(nonce)
            await exchange.send(head + data[: len(data) // 2])
            await self._break(exchange, fault)
            return
        await exchange.send(head + data)
        if fault == "endless":
            exchange.writer.close()

    async def _send_stream(self, exchange: Exchange, nonce: str, api: Api, body: str, fault: Fault) -> None:
        pieces = build_pieces(nonce)
        done = len(re.findall(rf"{nonce}:\d+x* ", body))  # when it goes on with another engine's answer
        events = [_build_event(api, text) for text in pieces[done:]]
        chunked = fault != "endless"
        if chunked:
            await exchange.send_stream_head()
        else:
            await exchange.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
        send = exchange.send_chunk if chunked else exchange.send
        for index, event in enumerate([*events, *_build_end(api)]):
            if fault in ("body", "stall_body") and index == len(events) // 2:
                self.broken.add(nonce)
                if Random(nonce).random() < 0.3:
                    await exchange.send(b"%x\r\n" % len(event) + event[:5])  # within a chunk
                await self._break(exchange, fault)
                return
            await send(event)
            await asyncio.sleep(0)
        if chunked:
            await exchange.send(b"0\r\n\r\n")
        else:
            exchange.writer.close()

    async def _break(self, exchange: Exchange, fault: Fault) -> None:
        if fault == "body":
            exchange.writer.transport.abort()
        else:
            await exchange.closed_by_router.wait()


def _find_api(target: str) -> Api:
    return next(api for api, path in PATHS.items() if path == target)


# --- clients ---


@dataclass
class Outcome:
    """How a request ended, as its client saw it."""

    nonce: str
    api: Api
    streamed: bool
    kind: Literal["whole", "error", "event", "cut", "left"] = "cut"
    status: int = 0
    text: str = ""
    detail: str = ""


@dataclass
class StormClient:
    """One session."""

    seed: str
    port: int
    turns: int
    may_leave: bool
    seconds: float
    """Deadline of each request."""
    outcomes: list[Outcome] = field(default_factory=list)

    async def run(self) -> None:
        random = Random(self.seed)
        name = f"{random.getrandbits(32):08x}"
        api: Api = random.choice(["chat", "chat", "completions", "responses", "messages", "passed"])
        http10, slow, named = random.random() < 0.1, random.random() < 0.2, random.random() < 0.7
        history: list[tuple[str, str]] = []
        connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        try:
            for _ in range(self.turns):
                nonce = f"nonce-{random.getrandbits(32):08x}"
                streamed = api != "passed" and random.random() < 0.6
                outcome = Outcome(nonce, api, streamed)
                self.outcomes.append(outcome)
                body = _build_body(api, nonce, history, streamed, random)
                headers = {"x-session-id": name} if named else {}
                async with asyncio.timeout(self.seconds):
                    connection = connection or await self._connect(slow)
                    kept = await _Asking(*connection, outcome, random, slow, http10, self.may_leave).run(headers, body)
                if not kept:
                    connection[1].transport.abort()
                    connection = None
                if outcome.kind == "whole":
                    history.append((nonce, outcome.text[:2000]))
        finally:
            if connection is not None:
                connection[1].close()

    async def _connect(self, slow: bool) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        raw = socket.socket()
        if slow:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", self.port))
            return await asyncio.open_connection(sock=raw, limit=1024 if slow else 65536)
        except BaseException:
            raw.close()
            raise


def _build_body(api: Api, nonce: str, history: list[tuple[str, str]], streamed: bool, random: Random) -> bytes:
    said = [f"question {old} {answer}" for old, answer in history]
    padding = "y" * random.choice([0, 0, 0, 3000, 200_000])  # the largest: in memory that is used again
    document: dict[str, Any] = {"model": "m", "user": padding, "stream": streamed}
    if api in ("chat", "messages", "responses"):
        messages = [{"role": role, "content": text} for text in said for role in ("user", "assistant")]
        document["input" if api == "responses" else "messages"] = [*messages, {"role": "user", "content": nonce}]
        if api == "messages":
            document["max_tokens"] = 100
    elif api == "completions":
        document["prompt"] = "".join([*said, nonce])
        document["echo"] = random.random() < 0.2  # a direct turn
    else:
        document["input"] = nonce
    return json.dumps(document).encode()


class _Left(Exception):
    """The client left on purpose."""


class _Asking:
    """One request on a connection."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        outcome: Outcome,
        random: Random,
        slow: bool,
        http10: bool,
        may_leave: bool,
    ) -> None:
        self._reader, self._writer, self._outcome, self._random = reader, writer, outcome, random
        self._slow, self._http10 = slow, http10
        self._leave_after = random.choice([0, 0, 1, 2, 5, 40]) if may_leave and random.random() < 0.25 else -1
        """Reads, after which the client leaves."""

    async def run(self, headers: dict[str, str], body: bytes) -> bool:
        """Send it and judge the answer; whether the connection can be used again."""
        chunked = not self._http10 and self._random.random() < 0.2
        framing = "transfer-encoding: chunked" if chunked else f"content-length: {len(body)}"
        lines = [f"POST {PATHS[self._outcome.api]} HTTP/1.{0 if self._http10 else 1}", "host: r", framing]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        head = "\r\n".join([*lines, "", ""]).encode()
        data = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if chunked else body
        outcome = self._outcome
        try:
            self._writer.write(head)
            if self._random.random() < 0.3:
                await asyncio.sleep(0)
            self._writer.write(data)
            if self._leave_after == 0:
                await asyncio.sleep(self._random.random() * 0.05)
                raise _Left
            return await self._read()
        except _Left:
            outcome.kind = "left"
            if self._random.random() < 0.3:
                with contextlib.suppress(OSError, RuntimeError):  # uvloop has an error of its own for a closed one
                    self._writer.write_eof()
                await asyncio.sleep(0.02)
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            outcome.kind, outcome.detail = "cut", repr(error)
        return False

    async def _pace(self) -> None:
        if self._leave_after > 0:
            self._leave_after -= 1
            if self._leave_after == 0:
                raise _Left
        if self._slow:
            await asyncio.sleep(self._random.random() * 0.004)

    async def _exactly(self, count: int) -> bytes:
        parts = []
        while count:
            await self._pace()
            data = await self._reader.read(min(count, 8192))
            if not data:
                raise asyncio.IncompleteReadError(b"", count)
            parts.append(data)
            count -= len(data)
        return b"".join(parts)

    async def _line(self) -> bytes:
        return (await self._reader.readuntil(b"\r\n"))[:-2]

    async def _read(self) -> bool:
        outcome = self._outcome
        await self._pace()
        status_line = await self._line()
        assert status_line.startswith(b"HTTP/1.1 "), f"{status_line!r} is no status line: the framing before was wrong"
        outcome.status = int(status_line.split(b" ")[1])
        headers: dict[str, str] = {}
        while line := await self._line():
            name, _, value = line.decode().partition(":")
            headers[name.lower()] = value.strip()
        if "text/event-stream" in headers.get("content-type", ""):
            return await self._read_events(headers)
        if "content-length" in headers:
            body = await self._exactly(int(headers["content-length"]))
        else:
            assert headers.get("connection") == "close", f"a body without an end: {headers}"
            body = await self._to_the_end()
        self._judge_document(body, "content-length" in headers)
        return headers.get("connection") != "close"

    async def _to_the_end(self) -> bytes:
        parts = []
        while data := await self._reader.read(8192):
            await self._pace()
            parts.append(data)
        return b"".join(parts)

    def _judge_document(self, body: bytes, is_whole: bool) -> None:
        outcome = self._outcome
        try:
            document = json.loads(body)
        except ValueError:
            assert not is_whole, f"not JSON: {body[:200]!r}"
            return  # cut
        if outcome.status == 200:
            outcome.kind, outcome.text = "whole", document["text"]
        else:
            outcome.kind, outcome.detail = "error", document["error"]["message"]

    async def _read_events(self, headers: dict[str, str]) -> bool:
        received = b""
        chunked = headers.get("transfer-encoding") == "chunked"
        assert chunked is not self._http10 or headers.get("connection") == "close"
        complete = False
        try:
            if chunked:
                while size := int(await self._line(), 16):
                    received += await self._exactly(size)
                    assert await self._exactly(2) == b"\r\n", "a chunk does not end where it should"
                assert await self._line() == b""
                complete = True
            else:
                received = await self._to_the_end()
        finally:
            self._judge_events(received, complete or not chunked)
        return headers.get("connection") != "close" and complete

    def _judge_events(self, received: bytes, complete: bool) -> None:
        outcome = self._outcome
        ended = failed = False
        texts = []
        for event in received.decode().split("\n\n")[: None if complete else -1]:
            lines = [line for line in event.split("\n") if line and not line.startswith(":")]
            data = next((line.removeprefix("data: ") for line in lines if line.startswith("data: ")), None)
            if data is None:
                continue  # the beginning of an event that broke off, or a comment
            if data == "[DONE]":
                assert not ended, "two ends"
                ended = True
                continue
            try:
                document = json.loads(data)
            except ValueError:
                continue  # the same
            if "error" in document:
                failed, outcome.detail = True, str(document["error"].get("message"))
                continue
            assert not ended, f"something behind the end: {data}"  # an error may be: the engine died right there
            texts.append(_read_text(outcome.api, document))
            ended = document.get("type") in ("response.completed", "message_stop")
        outcome.text = "".join(texts)
        if failed:
            outcome.kind = "event"
        elif ended and complete:
            outcome.kind = "whole"


def _read_text(api: Api, document: Any) -> str:
    if api == "chat":
        return str(document["choices"][0]["delta"].get("content") or "")
    if api == "completions":
        return str(document["choices"][0]["text"] or "")
    return str(document.get("delta") or "")
