"""Which route a request takes."""

from __future__ import annotations

import pytest

from bidikv_runtime.router.api.errors import ApiError
from bidikv_runtime.router.api.routes import Target, choose_route


@pytest.mark.parametrize(
    ("method", "path", "target"),
    [
        ("POST", "/v1/chat/completions", Target("chat")),
        ("POST", "/v1/completions", Target("completions")),
        ("POST", "/v1/responses", Target("responses")),
        ("POST", "/v1/messages", Target("messages")),
        ("POST", "/v1/messages/count_tokens", Target("passed")),
        ("POST", "/v1/chat/completions/batch", Target("passed")),
        ("POST", "/v1/chat/completions/render", Target("passed")),
        ("POST", "/v1/embeddings", Target("passed")),
        ("POST", "/v1/audio/transcriptions", Target("passed")),
        ("POST", "/v1/something/new", Target("passed")),
        ("POST", "/v2/rerank", Target("passed")),
        ("POST", "/rerank", Target("passed")),
        ("POST", "/score", Target("passed")),
        ("POST", "/pooling", Target("passed")),
        ("POST", "/classify", Target("passed")),
        ("POST", "/tokenize", Target("passed")),
        ("GET", "/v1/models", Target("models")),
        ("GET", "/v1/models/org/name", Target("models", b"org/name")),
        ("GET", "/v1/models/org%2Fname", Target("models", b"org/name")),
        ("GET", "/v1/responses/resp_1", Target("passed", b"resp_1")),
        ("POST", "/v1/responses/resp_1/cancel", Target("passed", b"resp_1")),
        ("GET", "/health", Target("local")),
        ("HEAD", "/ready", Target("local")),
        ("GET", "/metrics", Target("local")),
        ("GET", "/debug/sessions", Target("local")),
    ],
)
def test_routes(method: str, path: str, target: Target) -> None:
    assert choose_route(method.encode(), path.encode()) == target


@pytest.mark.parametrize(
    ("method", "path", "status", "allow"),
    [
        ("GET", "/v1/chat/completions", 405, "POST"),
        ("HEAD", "/v1/chat/completions", 405, "POST"),
        ("GET", "/v1/messages", 405, "POST"),
        ("GET", "/tokenize", 405, "POST"),
        ("DELETE", "/v1/responses/resp_1", 405, "GET"),
        ("GET", "/v1/responses/resp_1/cancel", 405, "POST"),
        ("GET", "/v1/responses", 405, "POST"),
        ("POST", "/v1/models", 405, "GET"),
        ("HEAD", "/v1/models", 405, "GET"),
        ("DELETE", "/v1/models/m", 405, "GET"),
        ("POST", "/health", 405, "GET, HEAD"),
        ("POST", "/v1/load_lora_adapter", 404, ""),
        ("POST", "/v1/unload_lora_adapter", 404, ""),
        ("POST", "/v1/%6coad_lora_adapter", 404, ""),
        ("POST", "/v1/load_lora_adapter#x", 404, ""),
        ("POST", "/inference/v1/generate", 404, ""),
        ("POST", "/reset_prefix_cache", 404, ""),
        ("POST", "/sleep", 404, ""),
        ("GET", "/v1/realtime", 404, ""),
        ("GET", "/", 404, ""),
        ("GET", "/v1/", 404, ""),
        ("OPTIONS", "*", 404, ""),
    ],
)
def test_what_is_not_served(method: str, path: str, status: int, allow: str) -> None:
    with pytest.raises(ApiError) as caught:
        choose_route(method.encode(), path.encode())
    assert (caught.value.status, caught.value.allow) == (status, allow)
    assert ((b"allow", allow.encode()) in caught.value.headers()) is bool(allow)
