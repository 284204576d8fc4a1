"""``python -m e2e.cluster up|status|kubeconfig|down``."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Final

from e2e.cluster import health, lifecycle
from e2e.cluster.paths import Paths, exempt_from_proxy, find_external_kubeconfig, find_paths
from e2e.cluster.progress import ClusterError, say
from e2e.cluster.topology import DEFAULT_NETWORK, NETWORK_VARIABLE, Topology, build_topology
from e2e.kubectl import KubectlError

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
    version = health.observe_server_version(kubeconfig, paths)
    say(f"KUBECONFIG names {kubeconfig}: its API answers (Kubernetes {version}). Nothing is started here.")
    return 0


def _say_status(paths: Paths, wanted: Topology) -> int:
    topology = health.find_running_topology(paths, wanted)
    problem = health.observe_problem(paths, topology)
    if not paths.run.exists():
        say(f"{problem}")
    else:
        for line in health.describe(paths, topology, problem):
            say(line)
    return 1 if problem else 0


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    try:
        paths = find_paths()
        external = find_external_kubeconfig(paths)
        if external is not None:
            return _say_external(paths, external, options.command)
        topology = _build_topology(getattr(options, "nodes", None))
        exempt_from_proxy(topology.network)
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
    except (ClusterError, KubectlError) as failure:
        print(f"error: {str(failure).removeprefix('error: ')}", file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
