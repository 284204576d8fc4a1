"""Which route a request takes, by its method and path; pure.

What vLLM 0.32 serves (``entrypoints/{openai,anthropic,pooling,serve,speech_to_text,cohere,generate}``), sorted by what
a router has to do for it:

- turns: generate from a conversation or a prompt; they have a prefill leg;
- stored responses: only the engine that made one knows it, and the session that its id carries names that engine
  (``session.parse_response_id``);
- models: answered from all engines;
- everything else that reads a request and answers it: one engine, no second leg.

Refused is what changes or shows the state of one engine only (adapters, caches, profiles, weights), and
``/inference/v1/generate``, whose sampling parameters take KV parameters where the router does not look for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote_to_bytes

from bidikv_runtime.router.api.errors import ApiError
from bidikv_runtime.router.observe.record import Route


@dataclass(frozen=True, slots=True)
class Target:
    """What a request asks for."""

    route: Route
    item: bytes = b""
    """Id of the stored response (route ``passed``) or of the model (route ``models``) that it names."""


_LOCAL: Final = frozenset({b"/health", b"/ready", b"/metrics", b"/debug/sessions", b"/debug/engines"})
_TURNS: Final = {
    b"/v1/chat/completions": Target("chat"),
    b"/v1/completions": Target("completions"),
    b"/v1/responses": Target("responses"),
    b"/v1/messages": Target("messages"),
}
_PASSED: Final = dict.fromkeys(
    (
        b"/classify",
        b"/cohere/v2/chat",
        b"/detokenize",
        b"/generative_scoring",
        b"/pooling",
        b"/rerank",
        b"/score",
        b"/tokenize",
        b"/v1/audio/transcriptions",
        b"/v1/audio/translations",
        b"/v1/chat/completions/batch",
        b"/v1/embeddings",
        b"/v1/messages/count_tokens",
        b"/v1/rerank",
        b"/v1/score",
        b"/v2/embed",
        b"/v2/rerank",
    ),
    Target("passed"),
)
_POST: Final = _TURNS | _PASSED
_REFUSED: Final = (b"/v1/load_lora_adapter", b"/v1/unload_lora_adapter")
"""They would change one engine only; prefill and decode must serve the same adapters."""
_OTHER_POST: Final = Target("passed")
_LOCAL_TARGET: Final = Target("local")
_MODELS: Final = Target("models")
_RESPONSES: Final = b"/v1/responses/"
_CANCEL: Final = b"/cancel"


def choose_route(method: bytes, path: bytes) -> Target:
    """The route of a request.

    Args:
        method: as sent.
        path: without its query, as sent.

    Raises:
        ApiError: 404 for a path that the router does not serve, 405 (with the methods that it does) for a wrong method.
    """
    if method == b"POST":
        target = _POST.get(path)
        if target is not None:
            return target
        # The engine would decode the one and cut off the other, past the checks here.
        if b"%" in path or b"#" in path:
            raise ApiError(404, "The path must not contain percent-encoded characters or '#'.")
        if path.startswith(_RESPONSES) and path.endswith(_CANCEL):
            return Target("passed", path[len(_RESPONSES) : -len(_CANCEL)])
        if path in _REFUSED:
            raise ApiError(404, "Adapters are not managed through the router; give them to the engines at start.")
        if path.startswith(b"/v1/") and not _is_read_only(path):
            return _OTHER_POST
    elif method == b"GET" or method == b"HEAD":
        if path in _LOCAL:
            return _LOCAL_TARGET
        if method == b"GET":
            if path == b"/v1/models":
                return _MODELS
            if path.startswith(b"/v1/models/"):
                return Target("models", unquote_to_bytes(path[len(b"/v1/models/") :]))
            if path.startswith(_RESPONSES) and b"/" not in (name := path[len(_RESPONSES) :]) and name:
                return Target("passed", name)
    raise _build_refusal(method, path)


def _is_read_only(path: bytes) -> bool:
    return path == b"/v1/models" or path.startswith(b"/v1/models/")


def _build_refusal(method: bytes, path: bytes) -> ApiError:
    if path in _LOCAL:
        allowed = "GET, HEAD"
    elif path in _POST or (path.startswith(_RESPONSES) and path.endswith(_CANCEL)):
        allowed = "POST"
    elif _is_read_only(path) or path.startswith(_RESPONSES):
        allowed = "GET"
    else:
        return ApiError(
            404, "The router serves the OpenAI API and Anthropic's messages under /v1, /health, /ready and /metrics."
        )
    return ApiError(405, f"{method.decode('latin-1')} is not allowed here; use {allowed}.", allow=allowed)
