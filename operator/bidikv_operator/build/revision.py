"""Engines' templates, kept in ControllerRevisions so that an operator with other builders restarts no engine.

A revision is named by its role and the hash of what its template was built from (``rollout/revision.py``). Where one
exists for what the spec says now, its template is used; what the builders would make today is not looked at. The API
server refuses to change the data of a ControllerRevision, so a revision is what it was when it was first needed. It is
written only once the API server has accepted the template (``apply.py``): one that it refuses must not outlive the
operator that built it. One that holds something else (somebody put it in the place of ours) is not used, and replaced.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from bidikv_operator import names
from bidikv_operator.build.engine_pod import build_engine_template, build_worker_template
from bidikv_operator.build.meta import Manifest, build_object
from bidikv_operator.cache import ChildRef
from bidikv_operator.kinds import CONTROLLER_REVISION
from bidikv_operator.resolved import Resolved

Object = Mapping[str, Any]

KEPT_REVISIONS: Final = 2
"""Of each role, besides the one in use: what a spec that is set back finds again."""


@dataclass(frozen=True)
class EngineTemplates:
    """Pod templates of one role, without the group's label."""

    engine: Manifest
    """Of the whole replica, or of its first pod."""
    worker: Manifest | None
    """Of the other pods of a replica that spans nodes."""
    present: str
    """Hash of what they were built from."""


def choose_templates(
    resolved: Resolved, role: names.Role, children: Mapping[ChildRef, Object], present: str | None = None
) -> EngineTemplates:
    """The stored ones, else new ones.

    Args:
        present: the input whose templates to use in this step, if they are stored; None: what the spec says now.
    """
    newest = resolved.identity.input_of(role)
    if present is not None and present != newest:
        held = _read_templates(resolved, role, present, children)
        if held is not None:
            return held
    stored = _read_templates(resolved, role, newest, children)
    if stored is not None:
        return stored
    worker = build_worker_template(resolved, role) if resolved.engine(role).nodes > 1 else None
    # In the order in which the stored ones come back: equal templates give equal bytes.
    return EngineTemplates(_sort_keys(build_engine_template(resolved, role)), _sort_keys(worker), newest)


def build_controller_revision(
    resolved: Resolved, role: names.Role, templates: EngineTemplates, children: Mapping[ChildRef, Object]
) -> Manifest:
    """The revision that holds ``templates``; a new one gets the next number of its role."""
    ref = _find_revision(resolved, role, templates.present)
    stored = children.get(ref)
    revision = build_object(CONTROLLER_REVISION, resolved, ref.name, role)
    revision["metadata"]["annotations"] = {names.ANNOTATION_INPUT: templates.present}
    revision["data"] = {"template": templates.engine}
    if templates.worker is not None:
        revision["data"]["workerTemplate"] = templates.worker
    numbers = [known["revision"] for known in _iterate_revisions(role, children)]
    revision["revision"] = stored["revision"] if stored is not None else max(numbers, default=0) + 1
    return revision


def choose_kept_revisions(
    resolved: Resolved, chosen: Mapping[names.Role, EngineTemplates], children: Mapping[ChildRef, Object]
) -> frozenset[ChildRef]:
    """Earlier revisions that stay: the newest of each role, besides those that are used or will be."""
    kept = set()
    for role, templates in chosen.items():
        newest = resolved.identity.input_of(role)
        used = {_find_revision(resolved, role, present).name for present in (newest, templates.present)}
        if newest != templates.present:
            kept.add(_find_revision(resolved, role, newest))
        earlier = [known for known in _iterate_revisions(role, children) if known["metadata"]["name"] not in used]
        earlier.sort(key=lambda known: (-known["revision"], known["metadata"]["name"]))
        kept |= {ChildRef(CONTROLLER_REVISION, known["metadata"]["name"]) for known in earlier[:KEPT_REVISIONS]}
    return frozenset(kept)


def _read_templates(
    resolved: Resolved, role: names.Role, present: str, children: Mapping[ChildRef, Object]
) -> EngineTemplates | None:
    """What a revision holds; None where there is none, it cannot be used, or somebody else took its name."""
    stored = children.get(_find_revision(resolved, role, present))
    if stored is None or not _is_own(resolved, stored):
        return None
    data: Any = stored.get("data")
    engine: Any = data.get("template") if isinstance(data, Mapping) else None
    worker: Any = data.get("workerTemplate") if isinstance(data, Mapping) else None
    if not _is_template(engine) or _is_template(worker) != (resolved.engine(role).nodes > 1):
        return None
    return EngineTemplates(engine, worker, present)


def _is_own(resolved: Resolved, stored: Object) -> bool:
    """One without a controller was orphaned with its resource, which came back."""
    owners = [ref for ref in stored["metadata"].get("ownerReferences") or [] if ref.get("controller")]
    return not owners or owners[0]["uid"] == resolved.uid


def _is_template(value: Any) -> bool:
    metadata, spec = (value.get("metadata"), value.get("spec")) if isinstance(value, Mapping) else (None, None)
    return (
        isinstance(metadata, Mapping)
        and isinstance(metadata.get("labels"), Mapping)
        and isinstance(spec, Mapping)
        and bool(spec.get("containers"))
    )


def _find_revision(resolved: Resolved, role: names.Role, present: str) -> ChildRef:
    return ChildRef(CONTROLLER_REVISION, names.child_name(resolved.name, f"{role}-{present}"))


def _iterate_revisions(role: names.Role, children: Mapping[ChildRef, Object]) -> list[Object]:
    return [
        obj
        for ref, obj in children.items()
        if ref.kind == CONTROLLER_REVISION and (obj["metadata"].get("labels") or {}).get(names.LABEL_ROLE) == role
    ]


def _sort_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sort_keys(value[key]) for key in sorted(value)}
    if isinstance(value, list):
        return [_sort_keys(item) for item in value]
    return value
