"""Leave the exception that ends an engine where Kubernetes shows it: in the container's termination message.

vLLM's engine core and workers are processes of their own. What ends them is in the middle of the log; the container's
last lines, which the kubelet would take instead, only say that the engine core failed (measured with vLLM 0.32: the
API server's traceback alone fills the kubelet's 2048 bytes). vLLM loads plugins of the entry point group
``vllm.general_plugins`` in each of its processes (``vllm/plugins/__init__.py``), ``install.py`` declares this one, and
it listens to the few records with which vLLM reports the end of a process.

Only the first process to fail writes: what others say afterwards are consequences. Nothing here may harm an engine:
every failure is swallowed, and without the file (outside Kubernetes) nothing happens.
"""

from __future__ import annotations

import logging
import os
from typing import Final

FILE: Final = "/dev/termination-log"
"""The kubelet's default ``terminationMessagePath``; made anew for every start of a container, writable by any user."""
ENV_FILE: Final = "BIDIKV_TERMINATION_LOG"
"""Another file, for a container with another ``terminationMessagePath``."""
LIMIT: Final = 1500
"""Bytes. The messages of all containers of a pod share 12 KiB."""
VLLM_LOGGER: Final = "vllm"
FATAL: Final = (
    "EngineCore failed to start.",
    "EngineCore encountered a fatal error.",
    "WorkerProc failed to start.",
    "WorkerProc failed.",
)
"""Beginnings of vLLM's records (0.32 and 0.33: ``v1/engine/core.py``, ``v1/executor/multiproc_executor.py``)."""


class LastWords(logging.Handler):
    """Writes the exception of the first fatal record to the termination message."""

    def __init__(self, path: str) -> None:
        super().__init__(logging.ERROR)
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if record.exc_info and record.exc_info[1] is not None and record.getMessage().startswith(FATAL):
                _write_first(self._path, describe(record.exc_info[1]))
        except Exception:
            self.handleError(record)


def describe(error: BaseException) -> str:
    """``module.Class: message``, as the last line of a traceback has it, on one line."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{name}: {' '.join(str(error).split())}"


def install_handler() -> None:
    """Entry point: vLLM calls it in each of its processes, perhaps more than once."""
    path = os.environ.get(ENV_FILE) or FILE
    logger = logging.getLogger(VLLM_LOGGER)
    if os.path.exists(path) and not any(isinstance(handler, LastWords) for handler in logger.handlers):
        logger.addHandler(LastWords(path))


def _write_first(path: str, words: str) -> None:
    file = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        if os.fstat(file).st_size == 0:
            os.write(file, words.encode()[:LIMIT])
    finally:
        os.close(file)
