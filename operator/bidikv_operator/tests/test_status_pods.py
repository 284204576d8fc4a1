"""What pods in trouble look like, and what the status says of them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from bidikv_operator import names
from bidikv_operator.status.pods import (
    SEVERITY,
    Readiness,
    Trouble,
    describe_stages,
    diagnose_pod,
    find_trouble,
    read_readiness,
)
from bidikv_operator.status.scheduling import Needs, compute_needs, explain_unschedulable

Object = dict[str, Any]
NOW, LATER = "2026-01-01T00:00:00Z", "2026-01-01T01:00:00Z"
UID = "6f7b1a34-0000-4000-8000-000000000001"
NEEDS = Needs(
    requests={"nvidia.com/gpu": "4", "vpc.amazonaws.com/efa": "8", "hugepages-2Mi": "5Gi"},
    node_selector={"node.kubernetes.io/instance-type": "p5en.48xlarge"},
    claims=("models",),
)
EXPECTED = "4 nvidia.com/gpu, 8 vpc.amazonaws.com/efa, 5Gi hugepages-2Mi"


def pod(*, is_leaving: bool = False, **status: Any) -> Object:
    metadata: Object = {"name": "chat-x-1", "labels": {names.LABEL_ROLE: "prefill"}}
    if is_leaving:
        metadata["deletionTimestamp"] = NOW
    return {"metadata": metadata, "status": status}


def waiting(reason: str, message: str = "") -> Object:
    return {"name": "engine", "image": "reg/i:1", "state": {"waiting": {"reason": reason, "message": message}}}


def ended(code: int, reason: str = "Error", message: str = "", *, phase: str = "waiting") -> Object:
    """A crashing container in one of the three phases between which it alternates."""
    end = {"terminated": {"exitCode": code, "reason": reason, "message": message}}
    states: Object = {
        "waiting": {"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": end},
        "running": {"state": {"running": {"startedAt": NOW}}, "lastState": end, "started": False},
        "terminated": {"state": end, "lastState": {}},
    }
    return {"name": "engine", "image": "reg/i:1", "ready": False, "restartCount": 4, **states[phase]}


def unschedulable(message: str) -> Object:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return {"conditions": [condition]}


NO_GPU = unschedulable("0/2 nodes are available: 2 Insufficient nvidia.com/gpu. preemption: 0/2 nodes are available")


# --- containers -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("status", "reason", "words"),
    [
        (NO_GPU, "Unschedulable", f"a pod needs {EXPECTED}; of 2 nodes: 2 without free nvidia.com/gpu"),
        ({"containerStatuses": [waiting("ErrImagePull")]}, "ImagePullFailed", "image reg/i:1 of container engine"),
        ({"containerStatuses": [waiting("ImagePullBackOff")]}, "ImagePullFailed", "spec.imagePullSecrets"),
        ({"initContainerStatuses": [waiting("ErrImagePull")]}, "ImagePullFailed", "reg/i:1"),
        ({"containerStatuses": [waiting("InvalidImageName")]}, "ImagePullFailed", "no valid image reference"),
        ({"containerStatuses": [waiting("ErrImageNeverPull")]}, "ImagePullFailed", "spec.imagePullPolicy"),
        (
            {"containerStatuses": [waiting("CreateContainerConfigError", 'secret "hub" not found')]},
            "ContainerConfigError",
            'secret "hub" not found; create that Secret',
        ),
        (
            {
                "containerStatuses": [
                    waiting("CreateContainerConfigError", "couldn't find key token in Secret team/hub")
                ]
            },
            "ContainerConfigError",
            "couldn't find key token in Secret team/hub; add that key",
        ),
        (
            {
                "containerStatuses": [
                    waiting("CreateContainerConfigError", "container has runAsNonRoot and image will run as root")
                ]
            },
            "ContainerConfigError",
            "spec.security.podSecurity",
        ),
        ({"containerStatuses": [ended(1)]}, "ContainerCrashing", "exit code 1; read why with kubectl logs"),
        ({"containerStatuses": [ended(0, "Completed")]}, "ContainerCrashing", "keeps ending without an error"),
        ({"containerStatuses": [{**ended(0, "Completed"), "restartCount": 1}]}, None, ""),
        ({"initContainerStatuses": [ended(1)]}, "ContainerCrashing", "exit code 1"),
        ({"containerStatuses": [ended(137, "OOMKilled")]}, "OutOfMemory", "resources.memory"),
        (
            {"containerStatuses": [ended(1, message="torch.OutOfMemoryError: CUDA out of memory. Tried 2.00 GiB.")]},
            "OutOfMemory",
            "torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB; raise tensorParallelSize",
        ),
        (
            {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory. Container x"},
            "PodEvicted",
            "(Evicted: The node was low on resource: memory)",
        ),
        (
            {"phase": "Failed", "conditions": [{"type": "DisruptionTarget", "reason": "PreemptionByScheduler"}]},
            "PodEvicted",
            "PreemptionByScheduler",
        ),
        (
            {
                "phase": "Failed",
                "reason": "UnexpectedAdmissionError",
                "message": "Allocate failed due to requested number of devices unavailable for nvidia.com/gpu. "
                "Requested: 4, Available: 0, which is unexpected",
            },
            "PodEvicted",
            "requested number of devices unavailable for nvidia.com/gpu)",
        ),
        ({"containerStatuses": [waiting("ContainerCreating")]}, None, ""),
        ({"containerStatuses": [{"name": "engine", "ready": False, "state": {"running": {}}}]}, None, ""),
        ({"initContainerStatuses": [{"name": "i", "state": {"terminated": {"exitCode": 0}}}]}, None, ""),
        ({"conditions": [{"type": "Ready", "status": "True"}], "containerStatuses": [ended(1)]}, None, ""),
        ({"conditions": [{"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}]}, None, ""),
        ({}, None, ""),
    ],
)
def test_pod_troubles(status: Object, reason: str | None, words: str) -> None:
    trouble = diagnose_pod(pod(**status), NEEDS)
    if reason is None:
        assert trouble is None
    else:
        assert trouble is not None
        assert trouble.reason == reason
        assert words in trouble.message
        assert trouble.reason in SEVERITY


@pytest.mark.parametrize(
    ("message", "reason", "words"),
    [
        # containerd, as ImagePullBackOff repeats it
        (
            'Back-off pulling image "reg/i:1": ErrImagePull: rpc error: code = NotFound desc = failed to pull and '
            'unpack image "reg/i:1": failed to resolve reference "reg/i:1": reg/i:1: not found',
            "ImagePullFailed",
            "does not exist in its registry",
        ),
        (
            "failed to pull and unpack image: failed to resolve reference: pull access denied, repository does not "
            "exist or may require authorization: server message: insufficient_scope: authorization failed",
            "ImagePullDenied",
            "spec.imagePullSecrets",
        ),
        (
            "failed to authorize: failed to fetch oauth token: unexpected status from GET request: 401 Unauthorized",
            "ImagePullDenied",
            "spec.imagePullSecrets",
        ),
        (
            'failed to do request: Head "https://reg/v2/": dial tcp: lookup reg on 10.0.0.10:53: no such host',
            "ImagePullFailed",
            "cannot be reached from the node",
        ),
    ],
)
def test_why_an_image_cannot_be_pulled(message: str, reason: str, words: str) -> None:
    trouble = diagnose_pod(pod(containerStatuses=[waiting("ImagePullBackOff", message)]), NEEDS)
    assert trouble is not None
    assert trouble.reason == reason
    assert words in trouble.message
    assert "10.0.0.10" not in trouble.message


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ({}, Readiness(False, "")),
        ({"conditions": None}, Readiness(False, "")),
        ({"conditions": [{"type": "PodScheduled", "status": "True", "lastTransitionTime": "x"}]}, Readiness(False, "")),
        ({"conditions": [{"type": "Ready", "status": "True"}]}, Readiness(True, "")),
        ({"conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": "x"}]}, Readiness(True, "x")),
        ({"conditions": [{"type": "Ready", "status": "False", "lastTransitionTime": "x"}]}, Readiness(False, "x")),
        # its node does not answer
        ({"conditions": [{"type": "Ready", "status": "Unknown", "lastTransitionTime": "x"}]}, Readiness(False, "x")),
    ],
)
def test_readiness(status: Object, expected: Readiness) -> None:
    assert read_readiness({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}, "status": status}) == expected
    assert read_readiness({"metadata": {}}) == Readiness()


def test_readiness_that_was_lost_is_told_and_the_first_wait_for_it_is_not() -> None:
    running = {"name": "engine", "ready": False, "started": True, "state": {"running": {"startedAt": NOW}}}

    def diagnose(since: str) -> Trouble | None:
        ready = {"type": "Ready", "status": "False", "lastTransitionTime": since}
        return diagnose_pod(pod(conditions=[ready], containerStatuses=[running]), NEEDS)

    assert diagnose(NOW) is None
    trouble = diagnose(LATER)
    assert trouble is not None
    assert trouble.reason == "PodNotAnswering"


def test_ids_of_one_attempt_are_left_out() -> None:
    def tell(container: str) -> str:
        message = f'failed to reserve name "engine_chat-x-1_team_{UID}_0": reserved for "{container}"'
        trouble = diagnose_pod(pod(containerStatuses=[waiting("CreateContainerError", message)]), NEEDS)
        assert trouble is not None
        return trouble.message

    assert tell("a" * 64) == tell("0123456789ab" * 5)
    assert "chat-x-1" not in tell("a" * 64)
    assert "reserved for" in tell("a" * 64)


def test_a_leaving_pod_is_no_trouble() -> None:
    assert diagnose_pod(pod(is_leaving=True, containerStatuses=[ended(137)]), NEEDS) is None


@pytest.mark.parametrize("message", ["", "RuntimeError: boom\n"])
def test_the_phases_of_one_trouble_look_the_same(message: str) -> None:
    crashes = {
        diagnose_pod(pod(containerStatuses=[ended(1, message=message, phase=phase)]), NEEDS)
        for phase in ("waiting", "running", "terminated")
    }
    pulls = {
        diagnose_pod(pod(containerStatuses=[waiting(reason)]), NEEDS) for reason in ("ErrImagePull", "ImagePullBackOff")
    }
    assert len(crashes) == len(pulls) == 1


def test_the_worst_trouble_is_told_whatever_the_order() -> None:
    pods = [
        pod(**NO_GPU),
        pod(containerStatuses=[ended(1, message="ValueError: b")]),
        pod(containerStatuses=[ended(1, message="ValueError: a")]),
        pod(containerStatuses=[waiting("ErrImagePull")]),
    ]
    found: set[Trouble | None] = set()
    for _ in range(10):
        random.Random(len(found)).shuffle(pods)
        found.add(find_trouble(pods, NEEDS))
    assert {trouble.reason for trouble in found if trouble} == {"ImagePullFailed"}
    assert find_trouble(pods[:0]) is None
    crashes = [one for one in pods if "ValueError" in str(one)]
    assert find_trouble(crashes) == find_trouble(crashes[::-1])


def test_pods_that_wait_for_stopping_ones_are_no_fault() -> None:
    trouble = find_trouble([pod(**NO_GPU), pod(is_leaving=True), pod(is_leaving=True)], NEEDS)
    assert trouble is not None
    assert trouble.reason == "WaitingForStoppingPods"
    assert trouble.message == "a pod waits for 2 stopping pods of the role to free what it needs"
    assert not trouble.is_fault
    # Nobody frees a label.
    selector = unschedulable("0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector.")
    trouble = find_trouble([pod(**selector), pod(is_leaving=True)], NEEDS)
    assert trouble is not None
    assert trouble.reason == "Unschedulable"


def test_stages() -> None:
    scheduled = {"type": "PodScheduled", "status": "True"}
    pods = [
        pod(conditions=[{"type": "Ready", "status": "True"}]),
        pod(),
        pod(conditions=[scheduled]),
        pod(conditions=[scheduled], containerStatuses=[{"name": "engine", "state": {"running": {}}}]),
        pod(conditions=[scheduled], containerStatuses=[{"name": "engine", "state": {"running": {}}}]),
        pod(is_leaving=True),
    ]
    expected = (
        "1 gets its images and volumes, 2 have not answered their probes yet, 1 is not scheduled yet, 1 is stopping"
    )
    assert describe_stages(pods) == describe_stages(pods[::-1]) == expected
    assert describe_stages(pods[:1]) == ""


# --- scheduling -------------------------------------------------------------------------------------------------------
def test_what_a_pod_needs() -> None:
    spec = {
        "nodeSelector": {"a": "b"},
        "containers": [
            {
                "name": "engine",
                "resources": {
                    "limits": {"nvidia.com/gpu": "4", "vpc.amazonaws.com/efa": "8", "hugepages-2Mi": "5Gi"},
                    "requests": {"nvidia.com/gpu": "4", "cpu": "1"},
                },
            },
            {"name": "sidecar", "resources": {"requests": {"nvidia.com/gpu": "1", "cpu": "100m"}}},
            {"name": "plain"},
        ],
        "volumes": [{"name": "model", "persistentVolumeClaim": {"claimName": "models"}}, {"name": "x", "emptyDir": {}}],
    }
    needs = compute_needs(spec)
    assert str(needs) == "5 nvidia.com/gpu, 8 vpc.amazonaws.com/efa, 5Gi hugepages-2Mi, 1 cpu"
    assert needs.node_selector == {"a": "b"}
    assert needs.claims == ("models",)
    assert str(compute_needs({})) == ""


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (
            "0/3 nodes are available: 1 Insufficient nvidia.com/gpu, 2 Insufficient vpc.amazonaws.com/efa. "
            "preemption: 0/3 nodes are available: 3 No preemption victims found for incoming pod.",
            f"a pod needs {EXPECTED}; of 3 nodes: 1 without free nvidia.com/gpu, 2 without free vpc.amazonaws.com/efa; "
            "add GPU nodes",
        ),
        (
            "0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector. no new claims to deallocate"
            ", preemption: 0/1 nodes are available: 1 Preemption is not helpful for scheduling.",
            "of 1 node: 1 without the labels that it selects (node.kubernetes.io/instance-type=p5en.48xlarge); add",
        ),
        (
            "0/2 nodes are available: 1 node(s) had untolerated taint {nvidia.com/gpu: present}, 1 node(s) were "
            "unschedulable.",
            "1 with a taint that it does not tolerate {nvidia.com/gpu: present}, 1 cordoned",
        ),
        (
            "0/4 nodes are available: 4 node(s) didn't match pod affinity rules.",
            "4 in another zone (or domain of scheduling.topologyKey) than the other engines",
        ),
        (
            "0/1 nodes are available: 1 Insufficient hugepages-2Mi.",
            "spec.fabric.hugePagesMebibytes",
        ),
        ("0/1 nodes are available: 1 cannot allocate all claims.", "spec.fabric.deviceClasses"),
        ("0/1 nodes are available: 1 node(s) did something new.", "ruled out (did something new)"),
        (
            '0/1 nodes are available: persistentvolumeclaim "models" not found. not found',
            "PersistentVolumeClaim models does not exist; create it",
        ),
        (
            "0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims. not helpful",
            "PersistentVolumeClaim models is not bound to a volume yet",
        ),
        ("no nodes available to schedule pods", "a pod cannot be scheduled: no nodes available to schedule pods"),
        ("", "the scheduler gave no reason"),
    ],
)
def test_why_no_node_takes_a_pod(message: str, words: str) -> None:
    told = explain_unschedulable(message, NEEDS)
    assert words in told
    assert "reemption" not in told
