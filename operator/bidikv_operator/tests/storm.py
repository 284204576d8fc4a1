"""A cluster in memory for ``test_storm.py``: an API server whose watches lag and whose writes fail, the controllers of
Kubernetes, kubelets, and operators that end anywhere and begin with nothing but what the cluster shows.

Kept to what the operator can feel. Server-side apply knows one manager, whose last manifest says which fields it owns.
"""

from __future__ import annotations

import copy
import random
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from bidikv_operator import names
from bidikv_operator.cache import ChildRef, Key, ObjectCache
from bidikv_operator.engines.facts import FactStore
from bidikv_operator.kinds import (
    CONTROLLER_REVISION,
    DEPLOYMENT,
    INFERENCE,
    LEADER_WORKER_SET,
    OPTIONAL_KINDS,
    POD,
    SECRET,
    WATCHED_KINDS,
    Kind,
)
from bidikv_operator.kube import ConflictError, ForbiddenError, InvalidError, Listed, NotFoundError, TransientError
from bidikv_operator.reconcile import Reconciler
from bidikv_operator.rollout.plan import resolve_count
from bidikv_operator.rollout.sets import LEADER_WORKER_SET_LABEL
from bidikv_operator.tests.engine_samples import make_report
from bidikv_operator.token_store import TokenStore
from bidikv_operator.watch import is_dealt_with
from bidikv_operator.workqueue import Done, RequeueAfter, RetryLaterError, compute_backoff

Object = dict[str, Any]
Place = tuple[str, ChildRef]

NAMESPACE: Final = "team"
SET_LABEL: Final = "test/set"
"""On pods: uid of the Deployment or LeaderWorkerSet that made them."""
TEMPLATE_LABEL: Final = "test/template"
GRACE: Final = timedelta(days=1)
"""No pod is overdue here: each holds its accelerators until its kubelet says that it is gone."""
REFUSED_IMAGE: Final = "vllm:refused"
"""No policy of this cluster admits a template with it."""
BROKEN_IMAGE: Final = "vllm:broken"
"""Its engines end as soon as they start."""
WATCHED: Final = (*WATCHED_KINDS, *OPTIONAL_KINDS)


class ProcessEndedError(BaseException):
    """The operator's process is killed here. Not an Exception: nothing of the operator may catch it."""


@dataclass
class Clock:
    now: datetime = datetime(2026, 1, 1, tzinfo=UTC)

    def monotonic(self) -> float:
        return self.now.timestamp()

    def read(self) -> datetime:
        return self.now


class Server:
    """The API server as the operator's client sees it."""

    def __init__(self, clock: Clock, rng: random.Random) -> None:
        self.clock, self.rng = clock, rng
        self.objects: dict[Place, Object] = {}
        self.changes: dict[Kind, deque[tuple[str, Object]]] = defaultdict(deque)
        """What the watches have yet to tell."""
        self.missing: set[Kind] = set()
        """Optional kinds that are not served."""
        self.fault_rate = 0.0
        self.on_write: Callable[[str, Kind, Object | None, Object], None] = lambda verb, kind, before, sent: None
        """Told each write of the operator before it takes effect."""
        self.meanwhile: Callable[[], None] = lambda: None
        """Called at each request, once before and once after it takes effect: the rest of the world does not wait."""
        self.writes: list[str] = []
        self._applied: dict[tuple[Place, str], Object] = {}
        self._version = 1000

    # --- as somebody else than the operator ---------------------------------------------------------------------------

    def find(self, kind: Kind, name: str) -> Object | None:
        found = self.objects.get((NAMESPACE, ChildRef(kind, name)))
        return copy.deepcopy(found)

    def select(self, *kinds: Kind) -> list[Object]:
        return [copy.deepcopy(obj) for (_, ref), obj in self.objects.items() if ref.kind in kinds]

    def store(self, kind: Kind, obj: Object) -> Object:
        """Put an object; nothing happens if it is there already, in every field."""
        place = (NAMESPACE, ChildRef(kind, obj["metadata"]["name"]))
        before = self.objects.get(place)
        obj = copy.deepcopy(obj)
        metadata = obj["metadata"]
        metadata["namespace"] = NAMESPACE
        if before is None:
            self._version += 1
            metadata["uid"] = f"uid-{self._version}"
            metadata["generation"] = 1
            metadata["creationTimestamp"] = self.clock.now.isoformat()
        else:
            for name in ("uid", "generation", "resourceVersion", "creationTimestamp"):
                metadata[name] = before["metadata"][name]
            if _without(before) != _without(obj):
                metadata["generation"] += 1
            if before == obj:
                return copy.deepcopy(before)
        self._version += 1
        metadata["resourceVersion"] = str(self._version)
        self.objects[place] = obj
        self._tell(kind, before, obj)
        return copy.deepcopy(obj)

    def remove(self, kind: Kind, name: str) -> None:
        """At once; the garbage collector follows."""
        place = (NAMESPACE, ChildRef(kind, name))
        obj = self.objects.pop(place)
        for subresource in ("", "status"):
            self._applied.pop((place, subresource), None)
        self._version += 1
        last = copy.deepcopy(obj)
        last["metadata"]["resourceVersion"] = str(self._version)
        self._tell(kind, last, None)

    def end_pod(self, name: str) -> None:
        """Ask a pod to end; its kubelet takes its time."""
        pod = self.find(POD, name)
        if pod is not None and "deletionTimestamp" not in pod["metadata"]:
            pod["metadata"]["deletionTimestamp"] = (self.clock.now + GRACE).isoformat()
            self.store(POD, pod)

    def _tell(self, kind: Kind, before: Object | None, after: Object | None) -> None:
        if kind not in WATCHED or kind in self.missing:
            return
        if after is not None and _is_selected(kind, after):
            self.changes[kind].append(("MODIFIED", copy.deepcopy(after)))
        elif before is not None and _is_selected(kind, before):
            last = copy.deepcopy(before)
            last["metadata"]["resourceVersion"] = str(self._version)
            self.changes[kind].append(("DELETED", last))

    # --- as the operator's client -------------------------------------------------------------------------------------

    async def get(self, kind: Kind, namespace: str, name: str) -> Object:
        self._fail("get", before=True)
        self.meanwhile()
        found = self.objects.get((namespace, ChildRef(kind, name)))
        if found is None:
            raise NotFoundError("not found", status=404)
        return copy.deepcopy(found)

    async def pages(self, kind: Kind, namespace: str | None, *, label_selector: str = "") -> AsyncIterator[Listed]:
        items = [obj for obj in self.select(kind) if not label_selector or _is_selected(kind, obj)]
        yield Listed(tuple(items), str(self._version))

    async def apply(self, kind: Kind, manifest: Object, *, subresource: str | None = None) -> Object:
        place = self._place(kind, manifest)
        self.meanwhile()
        live = self.objects.get(place)
        verb = f"apply {subresource}" if subresource else "apply"
        self._begin(verb, kind, manifest)
        if subresource is not None and live is None:
            raise NotFoundError("not found", status=404)
        self._check_preconditions(live, manifest["metadata"])
        self.on_write(verb, kind, live, manifest)
        if subresource is not None and live is not None:
            key = (place, subresource)
            status = merge(live.get("status"), self._applied.get(key), manifest["status"])
            answer = self.store(kind, {**live, "status": status})
            self._applied[key] = copy.deepcopy(manifest["status"])
        else:
            sent = {name: value for name, value in manifest.items() if name != "status"}
            sent["metadata"] = {
                name: value for name, value in manifest["metadata"].items() if name not in ("uid", "resourceVersion")
            }
            merged = merge(live, self._applied.get((place, "")), sent)
            _admit(kind, live, merged)
            answer = self.store(kind, merged)
            self._applied[place, ""] = copy.deepcopy(sent)
        self._fail("apply", before=False)
        return answer

    async def apply_new(self, kind: Kind, manifest: Object) -> Object:
        metadata = {**manifest["metadata"], "resourceVersion": "1"}
        return await self.apply(kind, {**manifest, "metadata": metadata})

    async def patch(self, kind: Kind, namespace: str, name: str, *, uid: str, change: Object) -> Object:
        self.meanwhile()
        live = self.find(kind, name)
        sent = {**change, "metadata": {**change.get("metadata", {}), "name": name}}
        self._begin("patch", kind, sent)
        if live is None:
            raise NotFoundError("not found", status=404)
        self._check_preconditions(live, {"uid": uid})
        self.on_write("patch", kind, live, sent)
        answer = self.store(kind, _patch(live, change))
        self._fail("patch", before=False)
        return answer

    async def create(self, kind: Kind, manifest: Object) -> Object:
        self.meanwhile()
        live = self.objects.get(self._place(kind, manifest))
        self._begin("create", kind, manifest)
        if live is not None:
            raise ConflictError("exists", status=409)
        self.on_write("create", kind, None, manifest)
        return self.store(kind, manifest)

    async def delete(self, kind: Kind, namespace: str, name: str, *, uid: str) -> None:
        self.meanwhile()
        live = self.find(kind, name)
        sent = {"metadata": {"name": name}}
        self._begin("delete", kind, sent)
        if live is None or live["metadata"]["uid"] != uid:
            return
        self.on_write("delete", kind, live, sent)
        if kind == POD:
            self.end_pod(name)
        else:
            self.remove(kind, name)
        self._fail("delete", before=False)

    def take_writes(self) -> list[str]:
        taken, self.writes = self.writes, []
        return taken

    @staticmethod
    def _place(kind: Kind, manifest: Object) -> Place:
        return manifest["metadata"]["namespace"], ChildRef(kind, manifest["metadata"]["name"])

    def _begin(self, verb: str, kind: Kind, sent: Object) -> None:
        if kind in self.missing:
            raise NotFoundError("the server could not find the requested resource", status=404)
        self._fail(verb, before=True)
        self.writes.append(f"{verb} {kind.kind} {sent['metadata']['name']}")

    @staticmethod
    def _check_preconditions(live: Object | None, wanted: Mapping[str, Any]) -> None:
        if live is None:
            if "uid" in wanted:  # a resourceVersion is ignored where there is nothing
                raise ConflictError("uid mismatch", status=409)
            return
        for name in ("uid", "resourceVersion"):
            if name in wanted and wanted[name] != live["metadata"][name]:
                raise ConflictError(f"{name} mismatch", status=409)

    def _fail(self, verb: str, *, before: bool) -> None:
        """Perhaps. After a write: its answer is lost, or the process that sent it is."""
        if not before:
            self.meanwhile()
        if self.rng.random() >= self.fault_rate:
            return
        if verb != "get" and self.rng.random() < 0.4:
            raise ProcessEndedError
        if not before or verb == "get":
            raise TransientError("no answer")
        raise self.rng.choice(
            [
                TransientError("slow down", status=429, retry_after=3),
                TransientError("etcd", status=500),
                ConflictError("changed meanwhile", status=409),
                ForbiddenError("a policy that cannot be reached", status=403),
            ]
        )


def merge(live: Any, last: Any, new: Any) -> Any:
    """Server-side apply of ``new`` by the manager whose last manifest was ``last``."""
    if isinstance(new, dict):
        merged = dict(live) if isinstance(live, dict) else {}
        for name, value in (last if isinstance(last, dict) else {}).items():
            if name not in new and name in merged:
                rest = _prune(merged[name], value)
                if rest in ({}, None):
                    del merged[name]
                else:
                    merged[name] = rest
        for name, value in new.items():
            before = last.get(name) if isinstance(last, dict) else None
            merged[name] = merge(merged.get(name), before, value)
        return merged
    key = _find_list_key(new)
    if key is None or not isinstance(live, list):
        return copy.deepcopy(new)
    known = {item.get(key): item for item in live if isinstance(item, dict)}
    owned = {item.get(key): item for item in last if isinstance(item, dict)} if isinstance(last, list) else {}
    names_now = {item[key] for item in new}
    merged_items = [merge(known.get(item[key]), owned.get(item[key]), item) for item in new]
    return merged_items + [item for name, item in known.items() if name not in names_now and name not in owned]


def _prune(live: Any, owned: Any) -> Any:
    """What is left of a field when its owner gives it up."""
    if not (isinstance(live, dict) and isinstance(owned, dict)):
        return None
    rest = {}
    for name, value in live.items():
        kept = _prune(value, owned[name]) if name in owned else value
        if kept not in ({}, None):
            rest[name] = kept
    return rest


def _find_list_key(items: Any) -> str | None:
    for key in ("name", "type"):
        if isinstance(items, list) and items and all(isinstance(item, dict) and key in item for item in items):
            return key
    return None


def _patch(live: Any, change: Any) -> Any:
    if not isinstance(change, dict):
        return change
    merged = dict(live) if isinstance(live, dict) else {}
    for key, value in change.items():
        merged[key] = _patch(merged.get(key), value)
    return merged


def _without(obj: Object) -> Object:
    return {name: value for name, value in obj.items() if name not in ("metadata", "status")}


def _is_selected(kind: Kind, obj: Object) -> bool:
    return kind == INFERENCE or names.LABEL_OWNER in (obj["metadata"].get("labels") or {})


def _admit(kind: Kind, live: Object | None, merged: Object) -> None:
    if kind == CONTROLLER_REVISION and live is not None and live.get("data") != merged.get("data"):
        raise InvalidError("data: field is immutable", status=422)
    if kind not in (DEPLOYMENT, LEADER_WORKER_SET):
        return
    if live is not None and live["spec"].get("selector") != merged["spec"].get("selector"):
        raise InvalidError("spec.selector: field is immutable", status=422)
    if REFUSED_IMAGE in str(merged["spec"]):
        raise ForbiddenError("a policy refuses the image", status=403)


# --- controllers and kubelets -----------------------------------------------------------------------------------------


def find_template(obj: Object) -> Object:
    spec = obj["spec"]
    found: Object = spec["template"] if "template" in spec else spec["leaderWorkerTemplate"]["leaderTemplate"]
    return found


def is_live(pod: Object) -> bool:
    return "deletionTimestamp" not in pod["metadata"]


def is_ready(pod: Object) -> bool:
    return is_live(pod) and any(
        one["type"] == "Ready" and one["status"] == "True" for one in pod["status"].get("conditions", [])
    )


class Controllers:
    """Deployments, LeaderWorkerSets, garbage collector, kubelets: one small step at a time."""

    def __init__(self, server: Server, clock: Clock, rng: random.Random) -> None:
        self.server, self.clock, self.rng = server, clock, rng
        self._pods = 0
        self._progress: dict[str, tuple[object, datetime]] = {}
        self._taken: dict[str, Object] = {}
        """The template that each set last made pods of: one that is paused goes on with it."""

    def step(self) -> None:
        """Something happens somewhere."""
        self.rng.choice([self.control_one, self.collect, self.run_one, self.run_one])()

    def settle(self) -> bool:
        """Everything that can happen now does. Whether anything did."""
        before = self.server._version
        for obj in self.server.select(DEPLOYMENT, LEADER_WORKER_SET):
            self.control(obj)
        self.collect()
        for pod in self.server.select(POD):
            self.run(pod)
        for obj in self.server.select(DEPLOYMENT, LEADER_WORKER_SET):
            self.control(obj)
        return self.server._version != before

    def control_one(self) -> None:
        found = self.server.select(DEPLOYMENT, LEADER_WORKER_SET)
        if found:
            self.control(self.rng.choice(found))

    def run_one(self) -> None:
        waiting = [pod for pod in self.server.select(POD) if not is_ready(pod)]
        if waiting:
            self.run(self.rng.choice(waiting))

    def pods_of(self, obj: Object) -> list[Object]:
        return [
            pod for pod in self.server.select(POD) if pod["metadata"]["labels"][SET_LABEL] == obj["metadata"]["uid"]
        ]

    def control(self, obj: Object) -> None:
        """A rolling update and the right number of pods, as ``k8s.io/kubernetes/pkg/controller/deployment`` does."""
        kind = DEPLOYMENT if "template" in obj["spec"] else LEADER_WORKER_SET
        if "deletionTimestamp" in obj["metadata"]:
            pods = self.pods_of(obj)
            for pod in pods:
                self.server.end_pod(pod["metadata"]["name"])
            if not pods:
                self.server.remove(kind, obj["metadata"]["name"])
            return
        wanted, template = obj["spec"].get("replicas", 1), str(find_template(obj))
        uid, is_paused = obj["metadata"]["uid"], obj["spec"].get("paused", False)
        if not is_paused:
            self._taken[uid] = find_template(obj)
        live = [pod for pod in self.pods_of(obj) if is_live(pod)]
        new = [pod for pod in live if pod["metadata"]["annotations"][TEMPLATE_LABEL] == template]
        old = [pod for pod in live if pod not in new]
        surge, unavailable = _read_strategy(obj, wanted)
        lowest = wanted - unavailable
        for pod in self._choose_excess(kind, new, len(new) - wanted):
            self.server.end_pod(pod["metadata"]["name"])
            new.remove(pod)
        for pod in self._choose_excess(kind, old, len(new) + len(old) - wanted - surge):
            self.server.end_pod(pod["metadata"]["name"])
            old.remove(pod)
        if not old:
            surge = 0
        missing = min(wanted - len(new), wanted + surge - len(new) - len(old))
        if is_paused:
            missing = wanted - len(new) - len(old) if uid in self._taken else 0
        made = [self._make_pod(obj, self._taken[uid]) for _ in range(missing)]
        new += [pod for pod in made if pod["metadata"]["annotations"][TEMPLATE_LABEL] == template]
        old += [pod for pod in made if pod not in new]
        for pod in sorted(old, key=is_ready) if not is_paused else ():
            kept = sum(map(is_ready, new)) + sum(map(is_ready, old)) - is_ready(pod)
            if len(new) + len(old) > lowest and kept >= (lowest if is_ready(pod) else 0):
                self.server.end_pod(pod["metadata"]["name"])
                old.remove(pod)
        self._write_status(kind, obj, new, old)

    def _choose_excess(self, kind: Kind, pods: list[Object], count: int) -> list[Object]:
        def cost(pod: Object) -> int:
            return int(pod["metadata"].get("annotations", {}).get(names.ANNOTATION_DELETION_COST, "0"))

        if kind == DEPLOYMENT:
            return sorted(pods, key=lambda pod: (is_ready(pod), cost(pod)))[: max(0, count)]
        return pods[len(pods) - max(0, count) :]

    def _make_pod(self, obj: Object, template: Object) -> Object:
        self._pods += 1
        labels = {**template["metadata"]["labels"], SET_LABEL: obj["metadata"]["uid"]}
        if "leaderWorkerTemplate" in obj["spec"]:
            labels[LEADER_WORKER_SET_LABEL] = obj["metadata"]["name"]
        metadata = {"name": f"pod-{self._pods}", "labels": labels, "annotations": {TEMPLATE_LABEL: str(template)}}
        pod = {
            "metadata": metadata,
            "spec": {"image": template["spec"]["containers"][0]["image"]},
            "status": {"phase": "Pending"},
        }
        return self.server.store(POD, pod)

    def _write_status(self, kind: Kind, obj: Object, new: list[Object], old: list[Object]) -> None:
        name = obj["metadata"]["name"]
        live = self.server.find(kind, name)
        if live is None:
            return
        counts = {
            "replicas": len(new) + len(old),
            "updatedReplicas": len(new),
            "readyReplicas": sum(map(is_ready, [*new, *old])),
        }
        is_complete = not old and counts["readyReplicas"] == obj["spec"].get("replicas", 1)
        if kind == LEADER_WORKER_SET:
            conditions = self._tell_progress(live.get("status", {}), is_complete=is_complete, is_updating=bool(old))
            self.server.store(kind, {**live, "status": {**counts, "conditions": conditions}})
            return
        seen, since = self._progress.get(obj["metadata"]["uid"], (None, self.clock.now))
        if seen != (counts, obj["metadata"]["generation"]):
            since = self.clock.now
        self._progress[obj["metadata"]["uid"]] = ((counts, obj["metadata"]["generation"]), since)
        deadline = timedelta(seconds=obj["spec"].get("progressDeadlineSeconds", 600))
        is_late = not is_complete and self.clock.now - since > deadline
        reason = "ProgressDeadlineExceeded" if is_late else "NewReplicaSetAvailable"
        conditions = [{"type": "Progressing", "status": str(not is_late), "reason": reason}]
        live["status"] = {**counts, "observedGeneration": obj["metadata"]["generation"], "conditions": conditions}
        self.server.store(kind, live)

    def _tell_progress(self, status: Object, *, is_complete: bool, is_updating: bool) -> list[Object]:
        """A LeaderWorkerSet's conditions, as those up to release 0.8 have them: without a deadline."""
        told = {one["type"]: one for one in status.get("conditions", [])}
        present = ["Available"] if is_complete else ["Progressing", *(["UpdateInProgress"] if is_updating else [])]
        for name in present:
            if told.get(name, {}).get("status") != "True":
                told[name] = {"type": name, "status": "True", "lastTransitionTime": self.clock.now.isoformat()}
        for name in ("Progressing", "UpdateInProgress") if is_complete else ("Available",):
            if name in told:
                told[name] = {**told[name], "status": "False"}
        return list(told.values())

    def collect(self) -> None:
        """The garbage collector: what a deleted owner leaves, and pods of sets that are gone."""
        uids = {obj["metadata"]["uid"] for obj in self.server.objects.values()}
        for (_, ref), obj in list(self.server.objects.items()):
            owners = obj["metadata"].get("ownerReferences", [])
            if ref.kind == POD:
                if obj["metadata"]["labels"][SET_LABEL] not in uids:
                    self.server.end_pod(ref.name)
            elif owners and owners[0]["kind"] == names.KIND and owners[0]["uid"] not in uids:
                self.server.remove(ref.kind, ref.name)

    def run(self, pod: Object) -> None:
        """The pod's kubelet."""
        name = pod["metadata"]["name"]
        if not is_live(pod):
            self.server.remove(POD, name)
            return
        container: Object = {"name": names.ENGINE_CONTAINER, "ready": True, "started": True}
        ready = "True"
        if pod["spec"]["image"] == BROKEN_IMAGE:
            ended = {"terminated": {"exitCode": 1, "message": "ValueError: no"}}
            container = {"name": names.ENGINE_CONTAINER, "ready": False, "state": ended}
            ready = "False"
        before: Object = next((one for one in pod["status"].get("conditions", []) if one["type"] == "Ready"), {})
        since = before["lastTransitionTime"] if before.get("status") == ready else self.clock.now.isoformat()
        pod["status"] = {
            "phase": "Running",
            "podIP": f"10.0.{int(name[4:]) // 250}.{int(name[4:]) % 250 + 1}",
            "conditions": [
                {"type": "PodScheduled", "status": "True"},
                {"type": "Ready", "status": ready, "lastTransitionTime": since},
            ],
            "containerStatuses": [container],
        }
        self.server.store(POD, pod)


def _read_strategy(obj: Object, wanted: int) -> tuple[int, int]:
    rolling = obj["spec"]["strategy" if "template" in obj["spec"] else "rolloutStrategy"]
    rolling = rolling.get("rollingUpdate") or rolling["rollingUpdateConfiguration"]
    surge = resolve_count(rolling["maxSurge"], wanted, is_rounded_up=True)
    unavailable = resolve_count(rolling["maxUnavailable"], wanted, is_rounded_up=False)
    return surge, min(wanted, unavailable if surge or unavailable else 1)


# --- operators --------------------------------------------------------------------------------------------------------


@dataclass
class Operator:
    """A process of the operator: its memory, its queue of one key, its watches."""

    server: Server
    clock: Clock
    key: Key
    runtime_image: str
    make_token: Callable[[], str]
    passes: int = 0
    is_dirty: bool = True
    due: float | None = None
    _failures: int = 0
    cache: ObjectCache = field(init=False)
    reconciler: Reconciler = field(init=False)

    def __post_init__(self) -> None:
        self.cache, self.facts = ObjectCache(), FactStore(self.clock.monotonic)
        self.tokens = TokenStore(self.server, propagation_seconds=180, now=self.clock.read, make_token=self.make_token)
        self.reconciler = Reconciler(
            kube=self.server,  # type: ignore[arg-type]
            cache=self.cache,
            tokens=self.tokens,
            engines=self.facts,
            runtime_image=self.runtime_image,
            identity="test",
            missing_kinds=frozenset(self.server.missing),
            clock=self.clock.read,
        )
        self.server.changes.clear()  # its watches begin with a list
        for kind in WATCHED:
            if kind not in self.server.missing:
                for obj in self.server.select(kind):
                    if _is_selected(kind, obj):
                        self.cache.put(kind, obj)

    def deliver(self, kinds: Iterable[Kind]) -> None:
        """Let the watches of some kinds tell all that they know (``watch.py``)."""
        for kind in kinds:
            while self.server.changes[kind]:
                event, obj = self.server.changes[kind].popleft()
                if event == "DELETED":
                    key = self.cache.drop(kind, obj)
                else:
                    is_echo = self.cache.knows(kind, obj) and is_dealt_with(kind, obj)
                    key = None if is_echo else self.cache.put(kind, obj)
                self.is_dirty = self.is_dirty or key == self.key

    def poll(self, unreachable: set[str], sessions: int) -> None:
        """Ask the engines (``engines/poll.py``)."""
        targets = self.facts.targets(self.key, self.cache.pods(self.key))
        addresses = {target.address for target in targets}
        for target in targets:
            told = unreachable - {target.address}
            report = make_report(
                unread_sessions=(sessions + int(target.uid.removeprefix("uid-"))) % 5,
                unreachable=tuple(sorted(addresses & told)),
                reached=tuple(sorted(addresses - told - {target.address})),
            )
            self.facts.take(self.key, target, report)
        resource = self.cache.resource(self.key)
        if resource and self.facts.judge(self.key, self.cache.pods(self.key), resource.get("status") or {}):
            self.is_dirty = True

    def is_due(self) -> bool:
        return self.is_dirty or (self.due is not None and self.clock.monotonic() >= self.due)

    async def run(self) -> bool:
        """One pass, as a worker of the queue runs it. Whether it succeeded.

        Raises:
            ProcessEndedError: in the middle.
            Exception: anything that is not explained is a fault of the operator.
        """
        self.passes += 1
        self.is_dirty, self.due = False, None
        try:
            result: Done | RequeueAfter = await self.reconciler.reconcile(self.key)
        except RetryLaterError as error:
            self._failures += 1
            delay = compute_backoff(self._failures, jitter=0, at_least=error.after or 0.0)
            self.due = self.clock.monotonic() + delay
            return False
        self._failures = 0
        if isinstance(result, RequeueAfter):
            self.due = self.clock.monotonic() + result.seconds
        return True


def find_secret(server: Server, key: Key) -> Object | None:
    return server.find(SECRET, names.child_name(key.name, names.TOKEN_SECRET))
