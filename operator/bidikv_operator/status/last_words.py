"""What a crashed engine said last, as reason and remedy. Pure.

The kubelet hands on a container's termination message: what the process wrote to ``/dev/termination-log`` (the
connector writes the exception that ended an engine process there), else the last 2048 bytes of its log
(``terminationMessagePolicy: FallbackToLogsOnError``). The texts below were taken from vLLM 0.32 and huggingface_hub at
work. Process ids, times and addresses are cut out: they would be new at every restart.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from bidikv_operator import names

LIMIT: Final = 400
"""Characters of the engine's words that a sentence quotes."""
PREFIX: Final = re.compile(
    r"^(\([\w-]+ pid=\d+\) )?((ERROR|WARNING|INFO|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ?)?"
)
"""vLLM's: process, level, time and place of a log line."""
EXCEPTION: Final = re.compile(r"^[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit|Failure): .+")
USAGE_ERROR: Final = re.compile(r"^\S+: error: (.+)")
"""The last line of argparse."""
VARYING: Final = (
    (re.compile(r"0x[0-9a-fA-F]{6,}"), "0x..."),
    (re.compile(r"\bpid[= ]\d+"), "pid ..."),
    (re.compile(r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d+)?Z?"), "..."),
    (re.compile(r"\b\d{1,3}(\.\d{1,3}){3}:\d{4,5}\b"), "..."),
    (re.compile(r"\b[0-9a-f]{12,}\b|\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"), "..."),
    (re.compile(r"\(Request ID: [^)]*\)"), ""),
    # Free memory differs a little at every attempt.
    (re.compile(r"(\d+)\.\d+(?=(/\d+(\.\d+)?)? ?[KMGT]i?B)"), r"\1"),
    (re.compile(r"\bProcess \d+"), "Process ..."),
)
VALIDATION: Final = re.compile(
    r"^pydantic_core\._pydantic_core\.ValidationError: \d+ validation errors? for \w+ (Value error, )?"
)
"""pydantic's way of saying that a configuration is wrong; what follows ``[type=`` repeats the whole configuration."""
WORKER: Final = re.compile(
    r"^RuntimeError: Worker failed with error '(.*)', please check the stack trace.*$", re.DOTALL
)
"""How the engine core passes on what a worker said."""
SECONDARY: Final = (
    "Engine core initialization failed",
    "WorkerProc initialization failed",
    "leaked shared_memory",
    "leaked semaphore",
)
"""Consequences: the cause is another line, or was lost before the last 2048 bytes."""


@dataclass(frozen=True)
class Cause:
    reason: str
    words: str
    """The engine's own, shortened; empty when it said nothing that tells."""
    remedy: str


@dataclass(frozen=True)
class _Known:
    pattern: re.Pattern[str]
    reason: str
    remedy: str


def _known(pattern: str, reason: str, remedy: str) -> _Known:
    return _Known(re.compile(pattern, re.IGNORECASE | re.DOTALL), reason, remedy)


KNOWN: Final = (
    _known(
        r"RevisionNotFound|not a valid git identifier",
        names.REASON_MODEL_NOT_FOUND,
        "correct spec.model.source.huggingFace.revision",
    ),
    _known(
        r"RepositoryNotFound|not a valid model identifier",
        names.REASON_MODEL_NOT_FOUND,
        "correct spec.model.source; a private repository looks absent without a token (tokenSecretName)",
    ),
    _known(
        r"gated repo|GatedRepoError|Invalid credentials in Authorization|401 Unauthorized|403 (Client Error|Forbidden)",
        names.REASON_ACCESS_DENIED,
        "give a token that may read the model in the Secret that spec.model.source.huggingFace.tokenSecretName names "
        "(key token), and accept the model's terms on its page if it is gated",
    ),
    _known(
        r"couldn't connect to|LocalEntryNotFound|offline mode|outgoing traffic has been disabled",
        names.REASON_HUB_UNREACHABLE,
        "let the pods reach the hub (proxy, egress policy, HF_ENDPOINT in env), or use a persistentVolumeClaim or path",
    ),
    _known(
        r"No such file or directory|does not appear to have a file named|Can't load the configuration|"
        r"Invalid repository ID or local directory|Repo id must (be in the form|use)",
        names.REASON_MODEL_NOT_FOUND,
        "correct spec.model.source: that folder of the volume or image must hold config.json, weights and tokenizer",
    ),
    _known(
        r"CUDA out of memory|OutOfMemoryError|No available memory for the cache blocks|"
        r"larger than the available KV cache memory|less than requested memory for kv|"
        r"less than desired GPU memory utilization|Failed core proc\(s\): \{[^}]*: -9\b",
        names.REASON_OUT_OF_MEMORY,
        "raise tensorParallelSize or the pod's memory, lower spec.model.maxLength, or change --gpu-memory-utilization "
        "in extraArgs",
    ),
    _known(r"greater than the derived max_model_len", names.REASON_CRASHING, "lower spec.model.maxLength"),
    _known(
        r"unrecognized arguments|^argument |expected (one|at least one) argument",
        names.REASON_CRASHING,
        "correct the role's extraArgs",
    ),
    _known(
        r"UnsupportedEngineError|SettingsError",
        names.REASON_CRASHING,
        "change what the sentence names, in extraArgs, env or image",
    ),
)


def find_cause(message: str) -> Cause | None:
    """What ended the engine, or None when its last words do not tell.

    Args:
        message: ``lastState.terminated.message``, any text of at most some kilobytes.
    """
    text = "\n".join(PREFIX.sub("", line, count=1) for line in message.splitlines())
    words = _choose_words(text)
    for known in KNOWN:
        match = known.pattern.search(words or text)
        if match is not None:
            return Cause(known.reason, words or _shorten(_line_of(text, match.start())), known.remedy)
    if words is None:
        return None
    return Cause(names.REASON_CRASHING, words, "read more with kubectl logs --previous")


def _choose_words(text: str) -> str | None:
    """The last exception with the lines that belong to it, else the last word of the argument parser."""
    lines = text.splitlines()
    for place in range(len(lines) - 1, -1, -1):
        line = lines[place]
        usage = USAGE_ERROR.match(line)
        if usage is not None:
            return _shorten(usage[1])
        if not EXCEPTION.match(line):
            continue
        if any(part in line for part in SECONDARY):
            continue
        following = []
        for more in lines[place + 1 : place + 5]:
            if not more.strip() or more.startswith(("Traceback", "  File ", "During handling", "The above")):
                break
            following.append(more.strip())
        return _shorten(" ".join((line, *following)))
    return None


def _line_of(text: str, place: int) -> str:
    return text[text.rfind("\n", 0, place) + 1 :].split("\n", 1)[0]


def _shorten(words: str) -> str:
    for pattern, replacement in VARYING:
        words = pattern.sub(replacement, words)
    words = VALIDATION.sub("", WORKER.sub(r"\1", " ".join(words.split())))
    words = words.split(" [type=", 1)[0].rstrip(". ")
    return words if len(words) <= LIMIT else words[: LIMIT - 3].rstrip() + "..."
