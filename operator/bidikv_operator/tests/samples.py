"""Resources and a fake API server for the tests of the operator."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from hypothesis import strategies as st

from bidikv_operator import names
from bidikv_operator.cache import ChildRef, ObjectCache, owner_key
from bidikv_operator.fabric import INSTANCE_TYPES
from bidikv_operator.kinds import INFERENCE, SECRET, Kind
from bidikv_operator.kube import ConflictError, Listed, NotFoundError
from bidikv_operator.resolved import Resolved
from bidikv_operator.rollout.sets import find_engine_set
from bidikv_operator.validate import validate

Object = dict[str, Any]
RUNTIME_IMAGE = "registry.example/bidikv/runtime:v1"
UID = "6f7b1a34-0000-4000-8000-000000000001"


def make_resource(spec: Object | None = None, *, name: str = "chat", **changes: Any) -> Object:
    """A small valid resource on TCP; ``changes`` replace top-level keys of its spec."""
    base: Object = {
        "model": {"source": {"path": "/models/small"}},
        "image": "vllm/vllm-openai:v0.32.0",
        "fabric": {"type": "TCP"},
    }
    metadata = {"name": name, "namespace": "team", "uid": UID, "generation": 3, "resourceVersion": "100"}
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": metadata,
        "spec": spec if spec is not None else {**base, **changes},
    }


TCP = make_resource(
    model={
        "source": {"persistentVolumeClaim": {"claimName": "models", "path": "qwen/small"}},
        "servedName": "small",
        "maxLength": 8192,
    },
    imagePullSecrets=["registry"],
    kvReuse={"mode": "OneWay"},
    prefill={
        "replicas": 2,
        "gpusPerPod": 0,
        "extraArgs": ["--dtype", "float32"],
        "env": [{"name": "OMP_NUM_THREADS", "value": "1"}, {"name": "UCX_TLS", "value": "tcp"}],
        "podTemplate": {
            "metadata": {"annotations": {"team.example/cost": "7"}},
            "spec": {
                "volumes": [{"name": "scratch", "emptyDir": {}}],
                "containers": [
                    {
                        "name": "engine",
                        "resources": {"requests": {"cpu": "1"}},
                        "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
                    },
                    {"name": "sidecar", "image": "registry.example/sidecar:v1"},
                ],
            },
        },
    },
    decode={"gpusPerPod": 0},
    router={"replicas": 3},
)
EFA = make_resource(
    model={
        "source": {
            "huggingFace": {"repository": "Qwen/Qwen3-32B", "revision": "abc123", "tokenSecretName": "hub"},
        },
    },
    fabric={"type": "EFA", "instanceType": "p5en.48xlarge"},
    prefill={"replicas": 2, "tensorParallelSize": 4},
    decode={"replicas": 2, "tensorParallelSize": 4, "env": [{"name": "PYTHONPATH", "value": "/plugins"}]},
    router={"replicas": 1},
)


def resolve(resource: Object) -> Resolved:
    checked = validate(resource, runtime_image=RUNTIME_IMAGE)
    assert isinstance(checked, Resolved), checked
    return checked


@st.composite
def valid_resources(draw: st.DrawFn) -> Object:
    """Resources that the CRD's schema and the operator accept."""
    efa = draw(st.booleans())
    instance = draw(st.sampled_from(sorted(INSTANCE_TYPES)))
    most = INSTANCE_TYPES[instance].gpus if efa else 64
    word = st.from_regex(r"[a-z][a-z0-9-]{0,8}[a-z0-9]", fullmatch=True)

    divisor = draw(st.integers(1, most))  # one role's tensor parallel size divides the other's
    sizes = [divisor, divisor * draw(st.integers(1, most // divisor))]

    def engine() -> Object:
        parallel = sizes.pop(draw(st.integers(0, len(sizes) - 1)))
        role: Object = {"tensorParallelSize": parallel, "replicas": draw(st.integers(0, 5))}
        if draw(st.booleans()):
            role["gpusPerPod"] = draw(st.just(0) | st.integers(parallel, most))
        if draw(st.booleans()):
            role["env"] = [
                {"name": name.upper().replace("-", "_"), "value": draw(st.text(max_size=5))}
                for name in draw(st.lists(word, max_size=3, unique=True))
            ]
        if draw(st.booleans()):
            role["podTemplate"] = {"spec": {"containers": [{"name": draw(word), "image": "x"}]}}
        return role

    source = draw(
        st.sampled_from(
            [
                {"path": "/m"},
                {"persistentVolumeClaim": {"claimName": "c", "path": "m"}},
                {"huggingFace": {"repository": "a/b"}},
            ]
        )
    )
    spec: Object = {
        "model": {"source": source},
        "image": "image:tag",
        "fabric": {"type": "EFA", "instanceType": instance} if efa else {"type": "TCP"},
        "prefill": engine(),
        "decode": engine(),
    }
    if draw(st.booleans()):
        spec["router"] = {"replicas": draw(st.integers(0, 4))}
    # 40 characters is what the CRD allows; the operator itself bears any Service name.
    name = draw(st.from_regex(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", fullmatch=True))
    return make_resource(spec, name=name)


class FakeKube:
    """An API server in memory: objects, resource versions, and a record of every write."""

    def __init__(self, cache: ObjectCache | None = None) -> None:
        self.cache = cache
        """Where a watch would file changes, when there is one; none watches Secrets."""
        self.objects: dict[tuple[str, ChildRef], Object] = {}
        self.writes: list[tuple[str, str]] = []
        self.reads: list[tuple[str, str]] = []
        self.refuse: Callable[[str, Kind, str], Exception | None] = lambda verb, kind, name: None
        self.mutate: Callable[[Object], Object] = lambda obj: obj
        """A mutating webhook."""
        self._version = 1000

    def store(self, kind: Kind, obj: Object) -> Object:
        """Put an object as somebody else would, and let the watch tell."""
        self._version += 1
        obj = copy.deepcopy(obj)
        obj["metadata"].setdefault("uid", f"uid-{self._version}")
        obj["metadata"]["resourceVersion"] = str(self._version)
        self.objects[obj["metadata"]["namespace"], ChildRef(kind, obj["metadata"]["name"])] = obj
        if self.cache is not None and kind != SECRET and owner_key(kind, obj) is not None:
            self.cache.put(kind, obj)
        return copy.deepcopy(obj)

    def remove(self, kind: Kind, namespace: str, name: str) -> None:
        obj = self.objects.pop((namespace, ChildRef(kind, name)))
        if self.cache is not None:
            self.cache.drop(kind, obj)

    async def get(self, kind: Kind, namespace: str, name: str) -> Object:
        self.reads.append(("get", f"{kind.kind} {name}"))
        found = self.objects.get((namespace, ChildRef(kind, name)))
        if found is None:
            raise NotFoundError(f"{kind.plural} {name!r} not found", status=404)
        return copy.deepcopy(found)

    async def pages(self, kind: Kind, namespace: str | None, *, label_selector: str = "") -> AsyncIterator[Listed]:
        self.reads.append(("list", kind.kind))
        items = [
            copy.deepcopy(obj)
            for (place, ref), obj in self.objects.items()
            if ref.kind == kind
            and namespace in (None, place)
            and (not label_selector or label_selector in obj["metadata"].get("labels", {}))
        ]
        half = len(items) // 2
        yield Listed(tuple(items[:half]), str(self._version))
        yield Listed(tuple(items[half:]), str(self._version))

    async def apply(self, kind: Kind, manifest: Object, *, subresource: str | None = None) -> Object:
        name = manifest["metadata"]["name"]
        self._write("apply" if subresource is None else f"apply {subresource}", kind, name)
        live = self.objects.get((manifest["metadata"]["namespace"], ChildRef(kind, name)))
        uid = manifest["metadata"].get("uid")
        if uid is not None and (live is None or live["metadata"]["uid"] != uid):
            raise ConflictError("uid mismatch", status=409)
        if subresource is not None:
            if live is None:
                raise NotFoundError("gone", status=404)
            return self.store(kind, {**live, "status": manifest["status"]})
        merged = {**copy.deepcopy(live or {}), **copy.deepcopy(manifest)}
        if live is not None:
            merged["metadata"] = {**live["metadata"], **manifest["metadata"]}
        return self.store(kind, _count_generation(live, self.mutate(merged)))

    async def apply_new(self, kind: Kind, manifest: Object) -> Object:
        if (manifest["metadata"]["namespace"], ChildRef(kind, manifest["metadata"]["name"])) in self.objects:
            raise ConflictError("exists", status=409)
        return await self.apply(kind, manifest)

    async def patch(self, kind: Kind, namespace: str, name: str, *, uid: str, change: Object) -> Object:
        self._write("patch", kind, name)
        live = self.objects.get((namespace, ChildRef(kind, name)))
        if live is None:
            raise NotFoundError("gone", status=404)
        if live["metadata"]["uid"] != uid:
            raise ConflictError("uid mismatch", status=409)
        return self.store(kind, _count_generation(live, _merge_patch(live, change)))

    async def create(self, kind: Kind, manifest: Object) -> Object:
        self._write("create", kind, manifest["metadata"]["name"])
        return self.store(kind, manifest)

    async def delete(self, kind: Kind, namespace: str, name: str, *, uid: str) -> None:
        self._write("delete", kind, name)
        if self.objects[namespace, ChildRef(kind, name)]["metadata"]["uid"] == uid:
            self.remove(kind, namespace, name)

    def _write(self, verb: str, kind: Kind, name: str) -> None:
        self.writes.append((verb, f"{kind.kind} {name}"))
        error = self.refuse(verb, kind, name)
        if error is not None:
            raise error

    def take_writes(self) -> Sequence[tuple[str, str]]:
        """The writes since the last call."""
        taken, self.writes = self.writes, []
        return taken


def _count_generation(live: Object | None, obj: Object) -> Object:
    """As the API server counts changes of a spec."""
    if live is None:
        return {**obj, "metadata": {**obj["metadata"], "generation": 1}}
    changes = int(live.get("spec") != obj.get("spec"))
    generation = live["metadata"].get("generation", 1) + changes
    return {**obj, "metadata": {**obj["metadata"], "generation": generation}}


def _merge_patch(live: Any, change: Any) -> Any:
    """As RFC 7386 says."""
    if not isinstance(change, dict):
        return change
    merged = dict(live) if isinstance(live, dict) else {}
    for key, value in change.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = _merge_patch(merged.get(key), value)
    return merged


def find_set(resource: Object, role: names.Role) -> str:
    """Name of the current set of an engine role."""
    return find_engine_set(resolve(resource), role).name


def store_resource(kube: FakeKube, resource: Object) -> Object:
    return kube.store(INFERENCE, resource)
