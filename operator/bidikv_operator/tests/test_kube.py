"""The client on the wire: against a small HTTP server on loopback."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio import client

from bidikv_operator.kinds import DEPLOYMENT, INFERENCE, LEASE, POD, SERVICE
from bidikv_operator.kube import (
    ConflictError,
    ForbiddenError,
    InvalidError,
    Kube,
    NotFoundError,
    NotLeaderError,
    TransientError,
    build_error,
)

Object = dict[str, Any]


class Server:
    """Answers from a script and keeps what it was asked."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, dict[str, str], str, Any]] = []
        self.answers: list[tuple[int, Any]] = []
        self.delay = 0.0

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.text()
        self.requests.append(
            (
                request.method,
                request.path,
                dict(request.query),
                request.content_type,
                json.loads(body) if body else None,
            )
        )
        await asyncio.sleep(self.delay)
        status, answer = self.answers.pop(0) if self.answers else (200, {})
        return web.Response(status=status, text=answer if isinstance(answer, str) else json.dumps(answer))


@pytest.fixture
async def server() -> AsyncIterator[tuple[Server, Kube]]:
    script = Server()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", script.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    kube = Kube(client.ApiClient(client.Configuration(host=f"http://{host}:{port}")), write_timeout_seconds=5)
    yield script, kube
    await kube.close()
    await runner.cleanup()


MANIFEST: Object = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"name": "x", "namespace": "n"},
    "spec": {"replicas": 0, "empty": {}},
}


async def test_an_apply_of_what_must_be_new(server: tuple[Server, Kube]) -> None:
    script, kube = server
    script.answers = [(201, {}), (409, {"message": "the object has been modified"})]
    await kube.apply_new(DEPLOYMENT, MANIFEST)
    sent = script.requests[0][4]
    assert sent == {**MANIFEST, "metadata": {"name": "x", "namespace": "n", "resourceVersion": "1"}}
    with pytest.raises(ConflictError):
        await kube.apply_new(DEPLOYMENT, MANIFEST)


async def test_the_token_is_asked_for_at_each_request() -> None:
    """A service account's token is replaced about every hour."""
    seen: list[str | None] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(request.headers.get("Authorization"))
        return web.json_response({})

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    configuration = client.Configuration(host=f"http://127.0.0.1:{runner.addresses[0][1]}")
    tokens = iter(["Bearer one", "Bearer two"])

    def refresh(configuration: client.Configuration) -> None:
        configuration.api_key["BearerToken"] = next(tokens)

    configuration.api_key["BearerToken"] = "Bearer none"
    configuration.refresh_api_key_hook = refresh  # type: ignore[assignment]
    kube = Kube(client.ApiClient(configuration), write_timeout_seconds=5)
    try:
        await kube.get(SERVICE, "n", "x")
        await kube.get(SERVICE, "n", "x")
    finally:
        await kube.close()
        await runner.cleanup()
    assert seen == ["Bearer one", "Bearer two"]


async def test_apply_is_server_side(server: tuple[Server, Kube]) -> None:
    script, kube = server
    script.answers = [(201, {"kind": "Deployment"})]
    assert await kube.apply(DEPLOYMENT, MANIFEST) == {"kind": "Deployment"}
    (request,) = script.requests
    assert request == (
        "PATCH",
        "/apis/apps/v1/namespaces/n/deployments/x",
        {"fieldManager": "bidikv-operator", "force": "true", "fieldValidation": "Ignore"},
        "application/apply-patch+yaml",
        MANIFEST,
    )


async def test_status_goes_to_its_subresource(server: tuple[Server, Kube]) -> None:
    script, kube = server
    await kube.apply(INFERENCE, MANIFEST, subresource="status")
    assert script.requests[0][1] == "/apis/serving.bidikv.io/v1alpha1/namespaces/n/bidikvinferences/x/status"


async def test_delete_carries_the_uid_and_bears_absence(server: tuple[Server, Kube]) -> None:
    script, kube = server
    script.answers = [(200, {}), (404, {"message": "none"}), (409, {"message": "uid"}), (403, {"message": "no"})]
    await kube.delete(SERVICE, "n", "x", uid="u")
    method, path, _, content_type, body = script.requests[0]
    assert (method, path, content_type) == ("DELETE", "/api/v1/namespaces/n/services/x", "application/json")
    assert body == {"preconditions": {"uid": "u"}, "propagationPolicy": "Background"}
    await kube.delete(SERVICE, "n", "x", uid="u")
    await kube.delete(SERVICE, "n", "x", uid="u")
    with pytest.raises(ForbiddenError):
        await kube.delete(SERVICE, "n", "x", uid="u")


async def test_lists_are_paged(server: tuple[Server, Kube]) -> None:
    script, kube = server
    script.answers = [
        (200, {"metadata": {"resourceVersion": "7", "continue": "more"}, "items": [{"metadata": {"name": "a"}}]}),
        (200, {"metadata": {"resourceVersion": "7"}, "items": [{"metadata": {"name": "b"}}]}),
    ]
    listed = [page async for page in kube.pages(POD, None, label_selector="a=b")]
    assert [item["metadata"]["name"] for page in listed for item in page.items] == ["a", "b"]
    assert {item["kind"] for page in listed for item in page.items} == {"Pod"}
    assert [page.resource_version for page in listed] == ["7", "7"]
    first, second = (request[2] for request in script.requests)
    assert first == {"limit": "100", "labelSelector": "a=b"}
    assert second == {"limit": "100", "labelSelector": "a=b", "continue": "more"}
    assert script.requests[0][1] == "/api/v1/pods"


async def test_a_deposed_leader_writes_nothing(server: tuple[Server, Kube]) -> None:
    script, kube = server
    kube.may_write = lambda: False
    for write in (
        kube.apply(DEPLOYMENT, MANIFEST),
        kube.create(DEPLOYMENT, MANIFEST),
        kube.delete(SERVICE, "n", "x", uid="u"),
    ):
        with pytest.raises(NotLeaderError):
            await write
    assert script.requests == []
    await kube.replace_lease(MANIFEST)  # what the gate itself depends on
    await kube.get(LEASE, "n", "x")
    assert [request[0] for request in script.requests] == ["PUT", "GET"]


@pytest.mark.parametrize("is_connected", [False, True])
async def test_a_leader_deposed_while_a_write_waits_for_its_connection_does_not_send_it(
    server: tuple[Server, Kube], is_connected: bool
) -> None:
    script, kube = server
    if is_connected:
        await kube.get(SERVICE, "n", "x")
        script.requests.clear()
    answers = iter([True, False])
    kube.may_write = lambda: next(answers)
    with pytest.raises(NotLeaderError):
        await kube.apply(DEPLOYMENT, MANIFEST)
    assert script.requests == []
    await kube.get(SERVICE, "n", "x")
    assert len(script.requests) == 1


async def test_writes_are_counted(server: tuple[Server, Kube]) -> None:
    _, kube = server
    seen: list[tuple[str, str]] = []
    kube.on_write = lambda verb, kind: seen.append((verb, kind))
    await kube.get(SERVICE, "n", "x")
    await kube.apply(DEPLOYMENT, MANIFEST)
    assert seen == [("PATCH", "Deployment")]


async def test_a_hanging_request_is_transient(server: tuple[Server, Kube]) -> None:
    script, kube = server
    script.delay = 30
    kube._write_timeout = 0.05
    with pytest.raises(TransientError, match="no answer within"):
        await kube.apply(DEPLOYMENT, MANIFEST)


async def test_an_absent_server_is_transient() -> None:
    kube = Kube(client.ApiClient(client.Configuration(host="http://127.0.0.1:9")), write_timeout_seconds=5)
    with pytest.raises(TransientError, match="did not reach"):
        await kube.get(SERVICE, "n", "x")
    await kube.close()


async def test_discovery(server: tuple[Server, Kube]) -> None:
    script, kube = server
    script.answers = [(200, {"resources": [{"name": "deployments"}]}), (200, {"resources": []}), (404, {})]
    assert [await kube.discover(DEPLOYMENT) for _ in range(3)] == [True, False, False]
    assert script.requests[0][1] == "/apis/apps/v1"


async def test_an_answer_that_is_no_json(server: tuple[Server, Kube]) -> None:
    script, kube = server
    script.answers = [(502, "<html>bad gateway</html>")]
    with pytest.raises(TransientError, match="status 502"):
        await kube.get(SERVICE, "n", "x")


@pytest.mark.parametrize(
    ("status", "message", "error"),
    [
        (400, "bad", InvalidError),
        (401, "who", TransientError),
        (403, "no", ForbiddenError),
        (404, "none", NotFoundError),
        (409, "clash", ConflictError),
        (422, "spec.x: Invalid value", InvalidError),
        (422, 'ConfigMap "x" is invalid: metadata.uid: Invalid value: "a": field is immutable', ConflictError),
        (429, "slow down", TransientError),
        (500, "etcd", TransientError),
        (500, "failed to create typed patch object (n/x): .spec.foo: field not declared in schema", InvalidError),
        (500, 'Internal error occurred: failed calling webhook "x": connection refused', ForbiddenError),
        (503, "away", TransientError),
    ],
)
def test_errors_by_meaning(status: int, message: str, error: type[Exception]) -> None:
    built = build_error(status, {"message": message}, None, what="GET /x")
    assert type(built) is error
    assert str(built) == message


def test_retry_after() -> None:
    assert build_error(429, {}, "7", what="GET /x").retry_after == 7
    assert build_error(503, {}, "Wed, 21 Oct", what="GET /x").retry_after is None
