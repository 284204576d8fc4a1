"""The local cluster is what the other tests take it for: two zones, counted devices, DNS, Services, an audit log."""

from __future__ import annotations

import json
import os
import signal
import urllib.error
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster.network import observe_processes
from e2e.cluster.nodes import parse_node_states
from e2e.cluster.paths import find_external_kubeconfig, find_paths
from e2e.cluster.topology import DEVICES, INSTANCE_TYPE
from e2e.images.catalog import ENGINE_STABLE_NAME
from e2e.kubectl import Kubectl, KubectlError, Manifest, eventually

PATHS = find_paths()

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(
        find_external_kubeconfig(PATHS) is not None, reason="KUBECONFIG names another cluster than the local one"
    ),
]

POD_SECONDS = 60.0


def build_pod(name: str, node: str | None = None, limits: dict[str, str] | None = None) -> Manifest:
    """A pod that serves an empty folder over HTTP, ready when it does."""
    spec = {
        "nodeName": node,
        "terminationGracePeriodSeconds": 0,
        "containers": [
            {
                "name": "main",
                "image": ENGINE_STABLE_NAME,
                "imagePullPolicy": "Never",
                "command": ["/usr/bin/python3", "-m", "http.server", "8000", "--directory", "/media"],
                "readinessProbe": {"httpGet": {"path": "/", "port": 8000}, "periodSeconds": 1},
                "resources": {"limits": limits or {}},
            }
        ],
    }
    if node is None:
        del spec["nodeName"]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {"test": "pod"}}, "spec": spec}


def build_service(selector: dict[str, str]) -> Manifest:
    spec = {"selector": selector, "ports": [{"port": 80, "targetPort": 8000}]}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web"}, "spec": spec}


def wait_ready(kubectl: Kubectl, *pods: str) -> None:
    names = [f"pod/{pod}" for pod in pods]
    kubectl.run("wait", "--for=condition=Ready", f"--timeout={POD_SECONDS:.0f}s", *names, timeout=POD_SECONDS + 10)


def fetch_from(kubectl: Kubectl, pod: str, url: str) -> int | None:
    """HTTP status of ``url`` as the pod sees it; None while the connection is refused.

    A Service refuses until kube-proxy has learnt of its endpoints, which is shortly after the pod is ready.
    """
    code = f"import urllib.request; print(urllib.request.urlopen({url!r}, timeout=10).status)"
    try:
        return int(kubectl.run("exec", pod, "--", "/usr/bin/python3", "-c", code))
    except KubectlError as failure:
        if "Connection refused" in str(failure):
            return None
        raise


def fetch(url: str) -> int | None:
    """The same from this host."""
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.URLError as failure:
        if isinstance(failure.reason, ConnectionRefusedError):
            return None
        raise


@pytest.fixture
def node_names(cluster: Kubectl) -> list[str]:
    names = [node["metadata"]["name"] for node in cluster.find("nodes")]
    if len(names) < 2:
        pytest.skip("the cluster has one node")
    return sorted(names)


def test_nodes_are_ready_in_different_zones_with_counted_devices(cluster: Kubectl, node_names: list[str]) -> None:
    states = parse_node_states(json.loads(cluster.run("get", "nodes", "--output=json")))
    assert all(state.ready for state in states)
    assert len({state.zone for state in states}) == len(node_names)
    for state in states:
        assert state.instance_type == INSTANCE_TYPE
        assert {name: state.allocatable.get(name) for name in DEVICES} == {
            "nvidia.com/gpu": "8",
            "vpc.amazonaws.com/efa": "16",
        }


def test_pods_of_different_nodes_reach_each_other(namespace: Kubectl, node_names: list[str]) -> None:
    namespace.apply(build_pod("one", node_names[0]), build_pod("two", node_names[1]), build_service({"test": "pod"}))
    wait_ready(namespace, "one", "two")
    addresses = {pod["metadata"]["name"]: pod["status"]["podIP"] for pod in namespace.find("pods")}
    assert addresses["one"].rsplit(".", 1)[0] != addresses["two"].rsplit(".", 1)[0]
    for pod, other in (("one", "two"), ("two", "one")):
        assert fetch_from(namespace, pod, f"http://{addresses[other]}:8000/") == 200
        for name in ("web", f"web.{namespace.namespace}", f"web.{namespace.namespace}.svc.cluster.local"):
            answer = partial(fetch_from, namespace, pod, f"http://{name}/")
            assert eventually(answer, f"an answer of {name}", POD_SECONDS) == 200


def test_a_pod_reaches_itself_through_its_service(namespace: Kubectl) -> None:
    namespace.apply(build_pod("one"), build_service({"test": "pod"}))
    wait_ready(namespace, "one")
    answer = eventually(lambda: fetch_from(namespace, "one", "http://web/"), "an answer", POD_SECONDS)
    assert answer == 200


def test_the_host_reaches_a_service(namespace: Kubectl, node_names: list[str]) -> None:
    # On the last node: the first one translates the address, so the answer must come back through it.
    namespace.apply(build_pod("one", node_names[-1]), build_service({"test": "pod"}))
    wait_ready(namespace, "one")
    service = namespace.get("service", "web")
    assert service is not None
    url = f"http://{service['spec']['clusterIP']}/"
    assert eventually(lambda: fetch(url), "an answer", POD_SECONDS) == 200


def test_nothing_leads_out_of_the_cluster(namespace: Kubectl) -> None:
    namespace.apply(build_pod("one"))
    wait_ready(namespace, "one")
    # 192.0.2.1 is reserved for documentation: it would time out behind a default route, and has no route here.
    code = "import socket; socket.create_connection(('192.0.2.1', 80), timeout=10)"
    with pytest.raises(KubectlError, match="Network is unreachable"):
        namespace.run("exec", "one", "--", "/usr/bin/python3", "-c", code)
    code = "import socket; socket.getaddrinfo('example.com', 80)"
    with pytest.raises(KubectlError, match="Name or service not known"):
        namespace.run("exec", "one", "--", "/usr/bin/python3", "-c", code)


def test_exec_logs_and_port_forward(namespace: Kubectl) -> None:
    namespace.apply(build_pod("one"))
    wait_ready(namespace, "one")
    assert namespace.run("exec", "one", "--", "cat", "/proc/1/comm") == "python3\n"
    with namespace.port_forward("pod/one", 8000) as port:
        assert fetch(f"http://127.0.0.1:{port}/") == 200
    assert eventually(lambda: '"GET / HTTP/1.1" 200' in namespace.run("logs", "one"), "the request's log line", 30)


def test_devices_are_allocated_to_containers(namespace: Kubectl) -> None:
    namespace.apply(build_pod("one", limits={"nvidia.com/gpu": "3", "vpc.amazonaws.com/efa": "5"}))
    wait_ready(namespace, "one")
    listed = namespace.run("exec", "one", "--", "env").splitlines()
    environment = dict(line.split("=", 1) for line in listed if "=" in line)
    assert len(environment["BIDIKV_FAKE_NVIDIA_COM_GPU"].split(",")) == 3
    assert len(environment["BIDIKV_FAKE_VPC_AMAZONAWS_COM_EFA"].split(",")) == 5


def test_more_devices_than_a_node_has_leave_a_pod_pending(namespace: Kubectl) -> None:
    namespace.apply(build_pod("greedy", limits={"vpc.amazonaws.com/efa": "17"}))
    condition = eventually(
        lambda: namespace.condition("pod", "greedy", "PodScheduled") or None, "the scheduler's word", 30
    )
    assert condition["reason"] == "Unschedulable"
    assert "Insufficient vpc.amazonaws.com/efa" in condition["message"]


def test_a_host_folder_behind_a_link_is_mounted_read_only(namespace: Kubectl, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "file").write_text("content")
    (tmp_path / "link").symlink_to("real")
    pod = build_pod("one")
    pod["spec"]["volumes"] = [{"name": "host", "hostPath": {"path": str(tmp_path / "link"), "type": "Directory"}}]
    pod["spec"]["containers"][0]["volumeMounts"] = [{"name": "host", "mountPath": "/media", "readOnly": True}]
    namespace.apply(pod)
    wait_ready(namespace, "one")
    assert namespace.run("exec", "one", "--", "cat", "/media/file") == "content"
    with pytest.raises(KubectlError, match="Read-only file system"):
        namespace.run("exec", "one", "--", "touch", "/media/other")


def read_audit_log() -> list[dict[str, Any]]:
    events = []
    for line in PATHS.audit_log.read_text().splitlines():
        try:
            events.append(json.loads(line))
        except ValueError:
            continue  # the last line, while it is being written
    return events


def test_writes_are_in_the_audit_log_and_reads_are_not(namespace: Kubectl) -> None:
    namespace.run("create", "configmap", "written")
    namespace.run("get", "configmap", "written")

    def find() -> list[dict[str, Any]]:
        wanted = {"resource": "configmaps", "namespace": namespace.namespace, "name": "written"}
        return [event for event in read_audit_log() if wanted.items() <= event.get("objectRef", {}).items()]

    # An event is written before the request is answered: a logged read would be there as well.
    events = eventually(lambda: find() or None, "the audit event", 30)
    assert [(event["verb"], event["level"]) for event in events] == [("create", "Metadata")]
    assert events[0]["user"]["username"] == "kubernetes-admin"
    assert str(events[0]["userAgent"]).startswith("kubectl/")


def find_process(node: str, program: str) -> int:
    """Process id (of the host) of one of a node's programs."""
    for pid in observe_processes(node):
        if program.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:2]:
            return pid
    raise AssertionError(f"{node} runs no {program}")


def test_a_killed_kubelet_comes_back_with_its_devices(cluster: Kubectl, namespace: Kubectl) -> None:
    node = sorted(found["metadata"]["name"] for found in cluster.find("nodes"))[-1]
    registered = PATHS.unit(node) / "log" / "fake-devices.log"
    before = registered.read_text().count("Registered")
    os.kill(find_process(node, "kubelet"), signal.SIGKILL)
    eventually(
        lambda: registered.read_text().count("Registered") >= before + len(DEVICES),
        "the devices of a new kubelet",
        60,
    )
    # A kubelet that did not know the devices would refuse the pod for good: UnexpectedAdmissionError.
    namespace.apply(build_pod("one", node, {"nvidia.com/gpu": "1", "vpc.amazonaws.com/efa": "1"}))
    wait_ready(namespace, "one")
