"""The Secret with the peers' tokens over an API server in memory."""

from __future__ import annotations

import base64
import copy
import itertools
import logging
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from bidikv_operator import names
from bidikv_operator.cache import ChildRef, Key, ObjectCache
from bidikv_operator.kinds import SECRET
from bidikv_operator.kube import ConflictError, ForbiddenError, TransientError
from bidikv_operator.reconcile import Reconciler
from bidikv_operator.resolved import Resolved
from bidikv_operator.tests.samples import RUNTIME_IMAGE, FakeKube, make_resource, store_resource
from bidikv_operator.token_store import TokenOutcome, TokenStore
from bidikv_operator.validate import validate
from bidikv_operator.workqueue import Done, RequeueAfter, RetryLaterError
from bidikv_runtime import contract

Object = dict[str, Any]
KEY = Key("team", "chat")
PLACE = ("team", ChildRef(SECRET, "chat-peer-token"))
WAIT = 180


class World:
    def __init__(self) -> None:
        self.kube = FakeKube()
        self.moment = datetime(2026, 3, 1, tzinfo=UTC)
        self.made = itertools.count(1)
        self.resource = make_resource()
        self.store = self.build_store()

    def build_store(self) -> TokenStore:
        """What a new process starts with."""
        return TokenStore(self.kube, WAIT, now=lambda: self.moment, make_token=lambda: f"token-{next(self.made):016}")

    async def ensure(self, **security: Any) -> TokenOutcome:
        found = validate(self.resource, runtime_image=RUNTIME_IMAGE)
        assert isinstance(found, Resolved)
        wanted = replace(found, security=replace(found.security, **security))
        return await self.store.ensure(wanted, self.resource)

    def lines(self) -> list[int]:
        """Numbers of the tokens in the Secret, in order."""
        content = base64.b64decode(self.kube.objects[PLACE]["data"][contract.TOKEN_KEY]).decode()
        return [int(line.removeprefix("token-")) for line in content.splitlines()]

    def edit(self, **changes: Any) -> None:
        self.kube.store(SECRET, {**self.kube.objects[PLACE], **changes})

    def wait(self, seconds: float) -> None:
        self.moment += timedelta(seconds=seconds)


@pytest.fixture
def world() -> World:
    return World()


async def test_it_is_created_once_and_then_costs_no_request(world: World) -> None:
    assert await world.ensure() == TokenOutcome()
    assert world.lines() == [1]
    assert world.store.token(KEY) == "token-0000000000000001"
    world.kube.take_writes()
    world.kube.reads.clear()
    for _ in range(3):
        assert await world.ensure() == TokenOutcome()
    assert world.kube.reads == []
    assert world.kube.take_writes() == []


async def test_a_new_process_reads_it_and_writes_nothing(world: World) -> None:
    await world.ensure()
    world.kube.take_writes()
    world.store = world.build_store()
    assert world.store.token(KEY) is None
    await world.ensure()
    assert world.store.token(KEY) == "token-0000000000000001"
    assert world.kube.take_writes() == []


async def test_a_rotation_goes_on_under_the_next_leader(world: World) -> None:
    await world.ensure()
    assert await world.ensure(token_rotation="now") == TokenOutcome(pause=WAIT)
    assert world.lines() == [1, 2]
    world.store = world.build_store()
    world.wait(WAIT - 1)
    assert await world.ensure(token_rotation="now") == TokenOutcome(pause=1)
    assert world.lines() == [1, 2]
    world.wait(1)
    assert await world.ensure(token_rotation="now") == TokenOutcome(pause=WAIT)
    assert world.lines() == [2, 1]
    assert world.store.token(KEY) == "token-0000000000000002"
    world.store = world.build_store()
    world.wait(WAIT)
    assert await world.ensure(token_rotation="now") == TokenOutcome()
    assert world.lines() == [2]
    world.kube.take_writes()
    await world.ensure(token_rotation="now")
    assert world.kube.take_writes() == []


async def test_a_secret_that_was_deleted_comes_back(world: World) -> None:
    await world.ensure()
    world.kube.remove(SECRET, "team", "chat-peer-token")
    await world.ensure()
    assert PLACE not in world.kube.objects, "nothing tells of it before"
    world.store.expire()
    assert await world.ensure() == TokenOutcome(pause=WAIT)
    assert world.lines() == [1, 2], "engines accept the one they know"


@pytest.mark.parametrize(
    "damage",
    [
        {"data": {contract.TOKEN_KEY: base64.b64encode(b"short").decode()}},
        {"data": {}},
    ],
)
async def test_a_damaged_secret_is_repaired(world: World, damage: Object) -> None:
    await world.ensure()
    world.edit(**damage)
    world.store.expire()
    await world.ensure()
    assert world.lines() == [1, 2]


async def test_lost_labels_and_owner_are_repaired_and_tokens_stay(world: World) -> None:
    await world.ensure()
    before = copy.deepcopy(world.kube.objects[PLACE]["metadata"])
    stripped = {key: value for key, value in before.items() if key != "ownerReferences"}
    world.edit(metadata={**stripped, "annotations": {}})
    world.store.expire()
    await world.ensure()
    after = world.kube.objects[PLACE]["metadata"]
    assert after["ownerReferences"] == before["ownerReferences"]
    assert after["annotations"] == before["annotations"]
    assert world.lines() == [1]


async def test_a_token_of_a_users_own_is_taken(world: World) -> None:
    """The engines have mounted it, too."""
    await world.ensure()
    world.edit(data={contract.TOKEN_KEY: base64.b64encode(b"token-0000000000000077").decode()})
    world.store.expire()
    await world.ensure()
    assert world.store.token(KEY) == "token-0000000000000077"


async def test_a_refused_token_is_read_again_now_and_then(world: World) -> None:
    await world.ensure()
    world.edit(data={contract.TOKEN_KEY: base64.b64encode(b"token-0000000000000077").decode()})
    assert not world.store.refuse(KEY), "it was read just now"
    world.wait(60)
    assert world.store.refuse(KEY)
    await world.ensure()
    assert world.store.token(KEY) == "token-0000000000000077"
    assert not world.store.refuse(KEY)
    assert not world.store.refuse(Key("team", "unknown"))


async def test_somebody_elses_secret_is_left_alone(world: World) -> None:
    theirs = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "chat-peer-token", "namespace": "team"}}
    world.kube.store(SECRET, {**theirs, "data": {"mine": "MQ=="}})
    outcome = await world.ensure()
    assert outcome.failure is not None
    assert outcome.failure.reason == names.REASON_NAME_TAKEN
    assert str(outcome.failure).startswith("Secret chat-peer-token: exists and belongs to something else")
    assert world.kube.take_writes() == []
    assert world.store.token(KEY) is None


async def test_the_secret_of_a_predecessor_is_waited_for(world: World) -> None:
    await world.ensure()
    world.resource["metadata"]["uid"] = "another"
    assert await world.ensure() == TokenOutcome(waiting=PLACE[1])
    assert world.store.token(KEY) is None, "its token is not the new resource's"
    world.kube.remove(SECRET, "team", "chat-peer-token")
    assert await world.ensure() == TokenOutcome()
    assert len(world.lines()) == 1
    assert world.lines() != [1]


async def test_a_new_resource_costs_one_request(world: World) -> None:
    assert await world.ensure() == TokenOutcome()
    assert world.kube.reads == []
    assert len(world.kube.take_writes()) == 1


async def test_a_resource_with_a_status_is_not_new(world: World) -> None:
    """Its Secret most likely exists: a refused write would come before the read."""
    await world.ensure()
    world.kube.take_writes()
    world.resource["status"] = {"observedGeneration": 1}
    world.store = world.build_store()
    assert await world.ensure() == TokenOutcome()
    assert len(world.kube.reads) == 1
    assert world.kube.take_writes() == []


async def test_a_write_in_between_wins(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.ensure()
    live = world.kube.objects[PLACE]
    sent: list[Object] = []

    async def apply(kind: object, manifest: Object) -> Object:
        sent.append(manifest)
        raise ConflictError("the object has been modified", status=409)

    monkeypatch.setattr(world.kube, "apply", apply)
    with pytest.raises(ConflictError):
        await world.ensure(token_rotation="now")
    assert sent[0]["metadata"]["resourceVersion"] == live["metadata"]["resourceVersion"]
    assert world.store.token(KEY) == "token-0000000000000001"


async def test_a_refusal_of_the_api_server_is_a_failure_and_an_absence_is_not(world: World) -> None:
    world.kube.refuse = lambda verb, kind, name: ForbiddenError("secrets is forbidden", status=403)
    outcome = await world.ensure()
    assert outcome.failure is not None
    assert (outcome.failure.reason, outcome.failure.message) == (names.REASON_APPLY_FAILED, "secrets is forbidden")
    world.kube.refuse = lambda verb, kind, name: TransientError("away")
    with pytest.raises(TransientError):
        await world.ensure()


async def test_a_resource_that_must_not_change_has_its_token_read_only(world: World) -> None:
    await world.store.load(KEY, world.resource)
    assert world.store.token(KEY) is None
    await world.ensure()
    world.kube.take_writes()
    world.store = world.build_store()
    await world.store.load(KEY, world.resource)
    assert world.store.token(KEY) == "token-0000000000000001"
    world.kube.reads.clear()
    await world.store.load(KEY, world.resource)
    assert world.kube.reads == []
    assert world.kube.take_writes() == []
    world.store.forget(KEY)
    assert world.store.token(KEY) is None


async def test_a_pass_creates_it_before_the_pods_and_shows_it_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    kube = FakeKube(cache := ObjectCache())
    tokens = TokenStore(kube, WAIT, make_token=lambda: "very-secret-0123456789")
    reconciler = Reconciler(
        kube=kube,  # type: ignore[arg-type]
        cache=cache,
        tokens=tokens,
        runtime_image=RUNTIME_IMAGE,
        identity="test",
    )
    store_resource(kube, make_resource())
    assert await reconciler.reconcile(KEY) == Done()
    written = [what for _, what in kube.take_writes()]
    assert written.index("Secret chat-peer-token") < written.index("Deployment chat-router")
    encoded = base64.b64encode(b"very-secret-0123456789\n").decode()
    for (_, ref), obj in kube.objects.items():
        shown = repr(obj).replace(encoded, "" if ref.kind == SECRET else encoded)
        assert "very-secret" not in shown
        assert encoded not in shown
    assert "very-secret" not in caplog.text + repr(tokens) + repr(reconciler)
    assert all(ref.kind != SECRET for ref in cache.children(KEY))


async def test_a_pass_tells_of_a_foreign_secret_and_comes_back_for_a_rotation() -> None:
    kube = FakeKube(cache := ObjectCache())
    moment = datetime(2026, 3, 1, tzinfo=UTC)
    reconciler = Reconciler(
        kube=kube,  # type: ignore[arg-type]
        cache=cache,
        tokens=TokenStore(kube, WAIT, now=lambda: moment),
        runtime_image=RUNTIME_IMAGE,
        identity="test",
    )
    metadata = {"name": "chat-peer-token", "namespace": "team"}
    kube.store(SECRET, {"apiVersion": "v1", "kind": "Secret", "metadata": metadata})
    store_resource(kube, make_resource())
    with pytest.raises(RetryLaterError, match="Secret chat-peer-token: exists and belongs"):
        await reconciler.reconcile(KEY)
    status = next(obj["status"] for (_, ref), obj in kube.objects.items() if ref.kind.kind == names.KIND)
    assert {c["type"]: c["reason"] for c in status["conditions"]}["Ready"] == "NameTaken"
    kube.remove(SECRET, "team", "chat-peer-token")
    assert await reconciler.reconcile(KEY) == Done()
    kube.remove(SECRET, "team", "chat-peer-token")
    reconciler.tokens.expire()
    assert await reconciler.reconcile(KEY) == RequeueAfter(WAIT)
