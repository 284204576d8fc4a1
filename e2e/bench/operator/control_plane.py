"""An API server and its etcd for one bench, on the loopback of a network namespace of their own.

No controllers and no nodes: nothing becomes ready and no pod runs, so what is measured is the operator and the API
server. etcd does not sync to disk (as the local cluster's), and every request is audited, reads too.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from e2e.bench.processes import Guard
from e2e.cluster.paths import find_paths
from e2e.cluster.toolchain import KUBE, apply_programs
from e2e.cluster.unit import observe_ready

HOST: Final = "127.0.0.1"
PORT: Final = 6443
URL: Final = f"https://{HOST}:{PORT}"
ADVERTISED: Final = "192.0.2.1"
"""An address for documents (RFC 5737) on the loopback device: the API server will not advertise 127.0.0.1."""
START_LIMIT_SECONDS: Final = 90.0
STOP_LIMIT_SECONDS: Final = 20.0
POLL_SECONDS: Final = 0.2
AUDIT_MEGABYTES: Final = 2000
SERVICE_NETWORK: Final = "10.64.0.0/12"
"""Each resource has a Service with an address of its own."""


@dataclass(frozen=True)
class ControlPlane:
    kubeconfig: Path
    token: str
    authority: Path
    audit_log: Path
    api_server: int
    """Process ids."""
    etcd: int


def enter_network(arguments: Sequence[str]) -> None:
    """Run this program again inside a network namespace of its own, in which only loopback is up. Never returns.

    The ports are fixed, so two benches, or a bench and a cluster, would meet otherwise.
    """
    if os.geteuid() != 0:
        raise SystemExit("the bench needs root for a network namespace of its own: run as root")
    script = f'ip link set lo up && ip address add {ADVERTISED}/32 dev lo && exec "$@"'
    command = ["unshare", "--net", "sh", "-c", script, "sh", sys.executable, *arguments]
    os.execvp(command[0], command)


@contextmanager
def run_control_plane(folder: Path, guard: Guard, *flags: str, audit_bodies: bool = False) -> Iterator[ControlPlane]:
    """A fresh, empty control plane while the context lasts; ``guard`` ends it when this process is killed.

    Args:
        flags: further ones of the API server.
        audit_bodies: whether the audit log holds what was sent, which costs.

    Raises:
        RuntimeError: a part did not become ready; the message names its log.
    """
    folder.mkdir(parents=True)
    kube = str(apply_programs(find_paths(), (KUBE,))[KUBE.name])
    pki, audit_log, token = folder / "pki", folder / "audit.log", secrets.token_hex(16)
    tokens, policy, kubeconfig = folder / "tokens.csv", folder / "audit-policy.json", folder / "kubeconfig"
    accounts = folder / "accounts.key"
    accounts.write_bytes(_make_key())
    tokens.write_text(f'{token},bench,bench,"system:masters"\n')
    policy.write_text(json.dumps(_build_audit_policy("Request" if audit_bodies else "Metadata")))
    kubeconfig.write_text(json.dumps(_build_kubeconfig(token, pki / "apiserver.crt")))
    for file in (tokens, kubeconfig, accounts):
        file.chmod(0o600)
    api_server = [
        f"--bind-address={HOST}",
        f"--advertise-address={ADVERTISED}",
        f"--secure-port={PORT}",
        f"--cert-dir={pki}",  # the API server makes and signs its own certificate
        f"--token-auth-file={tokens}",
        "--authorization-mode=RBAC",
        "--etcd-servers=http://127.0.0.1:2379",
        f"--audit-log-path={audit_log}",
        f"--audit-policy-file={policy}",
        f"--audit-log-maxsize={AUDIT_MEGABYTES}",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={accounts}",
        f"--service-account-signing-key-file={accounts}",
        f"--service-cluster-ip-range={SERVICE_NETWORK}",
        *flags,
    ]
    with ExitStack() as stack:
        etcd = _start(stack, guard, folder / "etcd.log", [kube, "etcd", f"--data-dir={folder / 'etcd'}"])
        _wait(etcd, "tcp:127.0.0.1:2379", folder / "etcd.log")
        server = _start(stack, guard, folder / "kube-apiserver.log", [kube, "kube-apiserver", *api_server])
        authority = pki / "apiserver.crt"
        _wait(server, f"{URL}/readyz", folder / "kube-apiserver.log", authority)
        yield ControlPlane(kubeconfig, token, authority, audit_log, server.pid, etcd.pid)


def _start(stack: ExitStack, guard: Guard, log: Path, command: list[str]) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, start_new_session=True
        )
    guard(process.pid)
    stack.callback(_stop, process)
    return process


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait(process: subprocess.Popen[bytes], check: str, log: Path, authority: Path | None = None) -> None:
    deadline = time.monotonic() + START_LIMIT_SECONDS
    while not (authority is None or authority.exists()) or not observe_ready(check, str(authority or "")):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{check} did not become ready within {START_LIMIT_SECONDS:.0f} s; see {log}")
        time.sleep(POLL_SECONDS)


def _make_key() -> bytes:
    """The key that signs tokens of service accounts; without one the API server does not start."""
    return ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )


def _build_audit_policy(level: str) -> dict[str, object]:
    return {
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "omitStages": ["RequestReceived"],
        "rules": [{"level": level}],
    }


def _build_kubeconfig(token: str, authority: Path) -> dict[str, object]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "bench", "cluster": {"server": URL, "certificate-authority": str(authority)}}],
        "users": [{"name": "bench", "user": {"token": token}}],
        "contexts": [{"name": "bench", "context": {"cluster": "bench", "user": "bench"}}],
        "current-context": "bench",
    }
