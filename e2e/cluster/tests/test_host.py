"""Parts that touch the host, against folders that stand for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from e2e.cluster.cgroups import apply_cgroup, observe_hierarchies
from e2e.cluster.network import find_route_conflict
from e2e.cluster.nodes import find_problem, parse_node_states, wait_until_fine
from e2e.cluster.paths import Paths, exempt_from_proxy, find_external_kubeconfig, find_paths, find_tool
from e2e.cluster.progress import ClusterError, run_logged
from e2e.cluster.sysctls import restore_sysctls, save_sysctls


@pytest.fixture
def cgroup_v1(tmp_path: Path) -> Path:
    for controller in ("cpu", "cpuset", "memory", "unified"):
        (tmp_path / controller).mkdir()
        (tmp_path / controller / "cgroup.procs").write_text("")
    (tmp_path / "cpuset" / "cpuset.cpus").write_text("0-1\n")
    (tmp_path / "cpuset" / "cpuset.mems").write_text("0\n")
    (tmp_path / "cpuacct").symlink_to("cpu")
    return tmp_path


def test_hierarchies_of_the_hybrid_layout(cgroup_v1: Path) -> None:
    assert [path.name for path in observe_hierarchies(cgroup_v1)] == ["cpu", "cpuset", "memory"]


def test_hierarchy_of_cgroup_v2(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpu memory\n")
    (tmp_path / "system.slice").mkdir()
    assert observe_hierarchies(tmp_path) == [tmp_path]


def test_a_leaf_for_the_daemons_in_each_hierarchy(cgroup_v1: Path) -> None:
    leaves = apply_cgroup("bidikv-a", cgroup_v1)
    assert leaves == [str(cgroup_v1 / name / "bidikv-a" / "daemons") for name in ("cpu", "cpuset", "memory")]
    assert all(Path(leaf).is_dir() for leaf in leaves)


@pytest.mark.parametrize(
    ("route", "conflict"),
    [
        ({"dst": "default", "dev": "eth0"}, None),
        ({"dst": "10.212.0.0/16", "dev": "eth0"}, None),
        ({"dst": "10.0.0.0/8", "dev": "tun0"}, "10.0.0.0/8"),
        ({"dst": "10.213.7.1", "dev": "wg0"}, "10.213.7.1"),
        ({"dst": "10.213.64.0/24", "dev": "bidikv0"}, None),
    ],
)
def test_route_conflicts(route: dict[str, str], conflict: str | None) -> None:
    assert find_route_conflict([route], "10.213.0.0/16") == conflict


def node(name: str, ready: str = "True", gpus: str | None = "8") -> dict[str, object]:
    allocatable = {} if gpus is None else {"nvidia.com/gpu": gpus}
    conditions = [{"type": "Ready", "status": ready, "message": "container runtime is down"}]
    return {"metadata": {"name": name}, "status": {"conditions": conditions, "allocatable": allocatable}}


@pytest.mark.parametrize(
    ("nodes", "problem"),
    [
        ([node("b"), node("a")], None),
        ([node("a")], "node b has not registered"),
        ([node("a"), node("b", ready="False")], "node b is not Ready: container runtime is down"),
        ([node("a"), node("b", gpus="0")], "node b offers 0 nvidia.com/gpu instead of 8"),
        ([node("a"), node("b", gpus=None)], "node b offers 0 nvidia.com/gpu instead of 8"),
        ([node("a"), node("b"), node("c")], "node c is not one of this cluster"),
    ],
)
def test_problems_of_nodes(nodes: list[dict[str, object]], problem: str | None) -> None:
    assert find_problem(parse_node_states({"items": nodes}), ["a", "b"], {"nvidia.com/gpu": 8}) == problem


def test_waiting_ends_with_the_last_problem() -> None:
    problems = iter(["first", "second"])
    with pytest.raises(ClusterError, match="second"):
        wait_until_fine(lambda: next(problems, "second"), limit_seconds=0.3)


def test_paths_follow_the_cache_variable(tmp_path: Path) -> None:
    paths = find_paths({"BIDIKV_CACHE": str(tmp_path)})
    assert paths.kubeconfig == tmp_path / "cluster" / "kubeconfig"


def test_a_cache_too_deep_for_sockets_is_refused() -> None:
    with pytest.raises(ClusterError, match=r"BIDIKV_CACHE: .* is too long"):
        find_paths({"BIDIKV_CACHE": "/" + "x" * 90})


@pytest.mark.parametrize(
    ("environment", "external"),
    [
        ({}, None),
        ({"KUBECONFIG": ""}, None),
        ({"KUBECONFIG": "/cache/cluster/kubeconfig"}, None),
        ({"KUBECONFIG": "/home/me/.kube/config"}, "/home/me/.kube/config"),
    ],
)
def test_external_clusters(environment: dict[str, str], external: str | None) -> None:
    assert find_external_kubeconfig(Paths(Path("/cache")), environment) == external


def test_a_missing_tool_is_named(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="no-such-tool is neither in"):
        find_tool("no-such-tool", Paths(tmp_path))


def test_no_proxy_is_extended_once() -> None:
    environment = {"NO_PROXY": "localhost"}
    for _ in range(2):
        exempt_from_proxy("10.213.0.0/16", environment)
    assert environment == {"NO_PROXY": "localhost,10.213.0.0/16", "no_proxy": "10.213.0.0/16"}


def test_sysctls_come_back(tmp_path: Path) -> None:
    root, file = tmp_path / "sys", tmp_path / "saved.json"
    (root / "kernel").mkdir(parents=True)
    (root / "kernel" / "panic").write_text("1\n")
    save_sysctls(file, root)
    (root / "kernel" / "panic").write_text("10\n")
    save_sysctls(file, root)  # a second start before the values are back must not take the cluster's for the host's
    assert json.loads(file.read_text()) == {"kernel/panic": "1"}
    restore_sysctls(file, root)
    assert (root / "kernel" / "panic").read_text() == "1"
    assert not file.exists()


def test_a_failed_command_shows_the_end_of_its_log(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"Trying: exit status 3; the end of .*log:\n    broken"):
        run_logged(["sh", "-c", "echo broken; exit 3"], what="Trying", log=tmp_path / "log", limit_seconds=60)


def test_a_missing_program_is_named(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="the program no-such-program is not installed"):
        run_logged(["no-such-program"], what="Trying", log=tmp_path / "log", limit_seconds=60)
