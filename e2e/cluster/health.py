"""Whether the cluster that runs is the wanted one in good health, and how it is in words."""

from __future__ import annotations

import json
from pathlib import Path

from e2e.cluster import namespaces
from e2e.cluster.nodes import NodeState, find_problem, parse_node_states
from e2e.cluster.paths import Paths, find_tool
from e2e.cluster.topology import CONTROL_PLANE, DEVICES, Topology, build_topology
from e2e.cluster.unit import observe_ready
from e2e.kubectl import Kubectl, KubectlError


def build_kubectl(paths: Paths) -> Kubectl:
    """kubectl of the local cluster, whatever KUBECONFIG says."""
    return Kubectl(find_tool("kubectl", paths), str(paths.kubeconfig))


def observe_problem(paths: Paths, topology: Topology, fingerprint: str | None = None) -> str | None:
    """Why the running cluster is not the one of ``topology`` (and ``fingerprint``) in good health; None when it is."""
    return observe_missing_part(paths, topology, fingerprint) or observe_api_problem(paths, topology)


def observe_missing_part(paths: Paths, topology: Topology, fingerprint: str | None = None) -> str | None:
    """Why what runs cannot become the wanted cluster by itself: another one was started, or a machine is missing."""
    try:
        written = paths.fingerprint.read_text()
    except FileNotFoundError:
        return "the cluster is not up; run `make cluster-up`"
    if fingerprint is not None and written != fingerprint:
        return "the cluster was made from another configuration"
    running = namespaces.observe_units()
    for machine in topology.machines:
        if machine.name not in running:
            return f"{machine.name} does not run; see {paths.unit(machine.name)}/log and run `make cluster-up`"
    return None


def observe_api_problem(paths: Paths, topology: Topology) -> str | None:
    """Why API, DNS or nodes are not as they should be; None when they are."""
    kubectl = build_kubectl(paths)
    if problem := observe_unready_api(kubectl):
        return problem
    if not observe_ready(topology.dns_ready_url):
        return f"CoreDNS does not answer at {topology.dns_ready_url}"
    try:
        states = observe_nodes(kubectl)
    except KubectlError as failure:
        return str(failure)
    return find_problem(states, [node.name for node in topology.nodes], DEVICES)


def observe_unready_api(kubectl: Kubectl) -> str | None:
    """The API server's own words while it is not ready."""
    try:
        kubectl.run("get", "--raw=/readyz", "--request-timeout=5s")
    except KubectlError as failure:
        return str(failure)
    return None


def observe_nodes(kubectl: Kubectl) -> list[NodeState]:
    """The nodes as the API lists them; ``KubectlError`` when it does not answer."""
    return parse_node_states(json.loads(kubectl.run("get", "nodes", "--output=json", "--request-timeout=5s")))


def observe_server_version(kubeconfig: str, paths: Paths) -> str:
    """The version of the user's own cluster; ``KubectlError`` when its API does not answer."""
    kubectl = Kubectl(find_tool("kubectl", paths), kubeconfig)
    version = json.loads(kubectl.run("version", "--output=json", "--request-timeout=20s"))
    return str(version["serverVersion"]["gitVersion"])


def find_running_topology(paths: Paths, wanted: Topology) -> Topology:
    """The topology that was started, which may have another number of nodes; ``wanted`` when none was."""
    started = [Path(file).parent.name for file in paths.run.glob("*/unit.json")]
    count = len([name for name in started if name != CONTROL_PLANE])
    return build_topology(count, wanted.network) if count else wanted


def describe(paths: Paths, topology: Topology, problem: str | None) -> list[str]:
    """Lines for ``status``."""
    running = namespaces.observe_units()
    lines = [
        f"API         {topology.api_url}",
        f"kubeconfig  {paths.kubeconfig}",
        f"kubectl     {paths.binaries}/kubectl",
        f"helm        {paths.binaries}/helm",
        f"audit log   {paths.audit_log}",
        f"logs        {paths.run}/<machine>/log",
    ]
    for machine in topology.machines:
        process = f"process {running[machine.name]}" if machine.name in running else "does not run"
        lines.append(f"machine     {machine.name} {machine.address} {process}")
    try:
        states = observe_nodes(build_kubectl(paths))
    except KubectlError:
        states = []  # the problem says so already
    for state in states:
        devices = ", ".join(f"{state.allocatable.get(name, '0')} {name}" for name in DEVICES)
        ready = "Ready" if state.ready else "not Ready"
        lines.append(f"node        {state.name} {ready}, zone {state.zone}, {state.instance_type}, {devices}")
    lines.append(f"health      {problem or 'fine'}")
    return lines
