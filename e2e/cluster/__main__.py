"""``python -m e2e.cluster up|status|kubeconfig|down``."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Final

from e2e.cluster import lifecycle, namespaces
from e2e.cluster.api import Kubectl, parse_node_states
from e2e.cluster.paths import Paths, find_external_kubeconfig, find_paths, find_tool
from e2e.cluster.progress import ClusterError, say
from e2e.cluster.topology import DEFAULT_NETWORK, DEVICES, NETWORK_VARIABLE, Topology, build_topology

NODES_VARIABLE: Final = "BIDIKV_NODES"
DEFAULT_NODES: Final = 2


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m e2e.cluster", description="A genuine Kubernetes on this machine.")
    commands = parser.add_subparsers(dest="command", required=True)
    start = commands.add_parser("up", help="build what is missing and start the cluster; nothing when it is up")
    start.add_argument("--nodes", type=int, help=f"number of nodes (default: ${NODES_VARIABLE} or {DEFAULT_NODES})")
    commands.add_parser("status", help="how the cluster is; exit status 1 when it is not healthy")
    commands.add_parser("kubeconfig", help="print the path of the kubeconfig")
    commands.add_parser("down", help="stop the cluster and remove its data; builds stay cached")
    return parser.parse_args(arguments)


def _build_topology(nodes: int | None) -> Topology:
    configured = os.environ.get(NODES_VARIABLE) or str(DEFAULT_NODES)
    try:
        count = int(configured) if nodes is None else nodes
    except ValueError:
        raise ClusterError(f"{NODES_VARIABLE}: {configured!r} is not a number of nodes") from None
    try:
        return build_topology(count, os.environ.get(NETWORK_VARIABLE) or DEFAULT_NETWORK)
    except ValueError as invalid:
        raise ClusterError(str(invalid)) from None


def _say_external(paths: Paths, kubeconfig: str, command: str) -> int:
    if command == "kubeconfig":
        say(kubeconfig)
        return 0
    if command == "down":
        say(f"KUBECONFIG names {kubeconfig}, not the local cluster: nothing was started here and nothing is stopped.")
        return 0
    version = lifecycle.check_external(paths, kubeconfig)
    say(
        f"KUBECONFIG names {kubeconfig}: its API answers (Kubernetes {version}); the local cluster is neither needed nor started."
    )
    return 0


def _say_status(paths: Paths, wanted: Topology) -> int:
    topology = lifecycle.find_running_topology(paths, wanted)
    problem = lifecycle.observe_problem(paths, topology)
    if problem and not paths.fingerprint.exists():
        say(problem)
        return 1
    say(f"API         {topology.api_url}")
    say(f"kubeconfig  {paths.kubeconfig}")
    say(f"kubectl     {paths.binaries}/kubectl")
    say(f"helm        {paths.binaries}/helm")
    say(f"audit log   {paths.audit_log}")
    say(f"logs        {paths.run}/<machine>/log")
    running = namespaces.observe_units()
    for machine in topology.machines:
        say(f"machine     {machine.name} {machine.address} process {running.get(machine.name, '(does not run)')}")
    try:
        states = parse_node_states(
            Kubectl(find_tool("kubectl", paths), str(paths.kubeconfig)).get("nodes", "--request-timeout=5s")
        )
    except ClusterError:
        states = []
    for state in states:
        devices = ", ".join(f"{state.allocatable.get(name, '0')} {name}" for name in DEVICES)
        ready = "Ready" if state.ready else "not Ready"
        say(f"node        {state.name} {ready}, zone {state.zone}, {state.instance_type}, {devices}")
    say(f"health      {problem or 'fine'}")
    return 1 if problem else 0


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    try:
        paths = find_paths()
        external = find_external_kubeconfig(paths)
        if external is not None:
            return _say_external(paths, external, options.command)
        topology = _build_topology(getattr(options, "nodes", None))
        if options.command == "up":
            lifecycle.up(paths, topology)
            return _say_status(paths, topology)
        if options.command == "status":
            return _say_status(paths, topology)
        if options.command == "kubeconfig":
            say(str(paths.kubeconfig))
            return 0
        lifecycle.down(paths)
        say("The cluster is down.")
        return 0
    except ClusterError as failure:
        print(f"error: {failure}", file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
