"""LeaderWorkerSets: engines whose replicas span nodes (https://lws.sigs.k8s.io, leaderworkerset.x-k8s.io/v1).

The first pod of a replica serves and is all that routers, peers and the rollout know of it; the others are workers of
its vLLM. A replica lives and dies as a whole: ranks of one engine cannot be replaced one by one.
"""

from __future__ import annotations

from bidikv_operator import names
from bidikv_operator.build.deployment import label_set, with_group
from bidikv_operator.build.meta import Manifest, build_object
from bidikv_operator.build.revision import EngineTemplates
from bidikv_operator.cache import ChildRef
from bidikv_operator.kinds import LEADER_WORKER_SET
from bidikv_operator.resolved import Resolved


def build_leader_worker_set(
    resolved: Resolved, role: names.Role, ref: ChildRef, templates: EngineTemplates, replicas: int
) -> Manifest:
    """The LeaderWorkerSet ``ref``, with as many pods per replica as the role has nodes."""
    if templates.worker is None:
        raise ValueError(f"{role} spans nodes and its templates have none for workers")
    leader_worker_set = build_object(LEADER_WORKER_SET, resolved, ref.name, role)
    label_set(leader_worker_set, resolved, templates)
    leader_worker_set["spec"] = {
        "replicas": replicas,
        "leaderWorkerTemplate": {
            "size": resolved.engine(role).nodes,
            "restartPolicy": "RecreateGroupOnPodRestart",
            "leaderTemplate": with_group(templates.engine, resolved),
            "workerTemplate": with_group(templates.worker, resolved),
        },
        "rolloutStrategy": {
            "type": "RollingUpdate",
            "rollingUpdateConfiguration": {
                "maxSurge": resolved.updates.max_surge,
                "maxUnavailable": resolved.updates.max_unavailable,
            },
        },
        "startupPolicy": "LeaderCreated",
    }
    return leader_worker_set
