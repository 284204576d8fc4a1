"""Faults of a simulated engine: what is wrong with it now, from the environment or the control port.

``GET /faults`` on the control port tells them. ``POST /faults`` replaces them: what is not named is whole again. So
``{}`` heals what can be healed.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Annotated, Any, Final, Literal, NoReturn

import msgspec

from e2e.simengine.asgi import Receive, Scope, Send, read_body, send_json

PATH: Final = "/faults"
OUT_OF_MEMORY: Final = 137
"""Exit status of a container whose process the kernel killed for memory."""


class FaultError(ValueError):
    """The faults cannot be understood."""


class FaultSet(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All fields have the value of an engine that is well."""

    crash: bool = False
    """End the process at once, with ``exit_code``."""
    crash_after_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    """The same once so many more tokens were generated; 0 for never."""
    exit_code: Annotated[int, msgspec.Meta(ge=0, le=255)] = 1
    """Of a crash. 137: the process kills itself, as for want of memory."""
    hang: bool = False
    """Steps stop: requests wait for ever, /health stays 200 as vLLM's does."""
    deaf: bool = False
    """No HTTP request is answered, /health included."""
    refuse: bool = False
    """Connections to the HTTP port are refused."""
    status: Annotated[int, msgspec.Meta(ge=400, le=599)] | None = None
    """Turns are answered with this, at once."""
    unhealthy: bool = False
    """/health tells 503, as vLLM's does when its engine core has died."""
    silent: bool = False
    """The lookup port answers nobody, so peers cannot reach the engine; all else is well."""
    slow: Annotated[float, msgspec.Meta(gt=0, le=1e6)] = 1.0
    """Everything that takes time takes so many times as long."""
    start: Literal["", "never", "model_not_found", "out_of_memory", "no_kv_cache"] = ""
    """How the start fails; it has no effect later. never: it lasts until other faults are set. The others: vLLM's last
    words, then an exit, with 137 for out_of_memory and 1 else."""


_DECODER: Final = msgspec.json.Decoder(FaultSet)


def parse_faults(text: bytes | str) -> FaultSet:
    """Faults as JSON; nothing is none.

    Raises:
        FaultError: one sentence.
    """
    try:
        return _DECODER.decode(text) if text else FaultSet()
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        known = ", ".join(item.name for item in msgspec.structs.fields(FaultSet))
        raise FaultError(
            f"the faults cannot be understood ({error}): send a JSON object with some of {known}"
        ) from None


class Faults:
    """The present ones."""

    def __init__(self, first: FaultSet) -> None:
        self.now = first
        self._tokens = 0
        self._whole, self._may_start = asyncio.Event(), asyncio.Event()
        self.on_refuse: Callable[[bool], Any] = lambda refuse: None
        """Closes or opens the HTTP port."""
        self.on_silent: Callable[[bool], Any] = lambda silent: None
        """Closes or opens the lookup port."""
        self.set(first)

    @property
    def slow(self) -> float:
        return self.now.slow

    def set(self, faults: FaultSet) -> None:
        """Replace them."""
        self.now, self._tokens = faults, 0
        if faults.crash:
            end_process(faults.exit_code)
        for event, is_well in ((self._whole, not faults.hang), (self._may_start, faults.start != "never")):
            if is_well:
                event.set()
            else:
                event.clear()
        self.on_refuse(faults.refuse)
        self.on_silent(faults.silent)

    async def wait_for_start(self, seconds: float) -> None:
        """The time that the start takes."""
        await asyncio.sleep(seconds * self.slow)
        await self._may_start.wait()

    async def wait_until_whole(self) -> None:
        """Return at once unless the engine hangs."""
        await self._whole.wait()

    def count_token(self) -> None:
        """A token was generated."""
        self._tokens += 1
        if 0 < self.now.crash_after_tokens <= self._tokens:
            end_process(self.now.exit_code)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The control port (ASGI)."""
        if scope["path"] != PATH:
            await send_json(send, 404, {"error": f"there is only {PATH}"})
        elif scope["method"] == "POST":
            try:
                faults = parse_faults(await read_body(receive))
            except FaultError as error:
                await send_json(send, 400, {"error": str(error)})
                return
            if faults.crash:  # else nobody could tell whether it was understood
                await send_json(send, 200, msgspec.to_builtins(faults))
                asyncio.get_running_loop().call_later(0.05, self.set, faults)
                return
            self.set(faults)
            await send_json(send, 200, msgspec.to_builtins(faults))
        else:
            await send_json(send, 200, msgspec.to_builtins(self.now))


def end_process(exit_code: int) -> NoReturn:
    """End without any clean-up, as a crash does."""
    if exit_code == OUT_OF_MEMORY:
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(exit_code)


LAST_WORDS: Final = {
    "model_not_found": """\
Traceback (most recent call last):
  File "/usr/local/lib/python3.12/dist-packages/huggingface_hub/utils/_validators.py", line 106, in _inner_fn
    validate_repo_id(arg_value)
huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '{model}'.
OSError: Can't load the configuration of '{model}'. If you were trying to load it from \
'https://huggingface.co/models', make sure you don't have a local directory with the same name. Otherwise, make sure \
'{model}' is the correct path to a directory containing a config.json file
""",
    "out_of_memory": "",
    "no_kv_cache": """\
ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the \
engine (this flag also controls CPU memory reservation on the CPU backend, despite its name).
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{'EngineCore': 1}}
""",
}


def fail_start(kind: str, model: str) -> NoReturn:
    """Say vLLM's last words and end the process; ``kind`` is one of ``FaultSet.start``, but not ``never``."""
    words = LAST_WORDS[kind].format(model=model).encode()
    if words:
        os.write(2, words)
    end_process(OUT_OF_MEMORY if kind == "out_of_memory" else 1)
