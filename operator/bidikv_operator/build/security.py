"""What pods may do: the ``restricted`` pod security standard, less what the fabric's hardware needs.

- On TCP an engine meets the standard in full: a user of its own, no capability, the runtime's seccomp profile.
- EFA pins memory (``ibv_reg_mr``), which the kernel allows within RLIMIT_MEMLOCK or with CAP_IPC_LOCK. A pod cannot set
  the limit, it comes from the container runtime (EKS' AMIs set it to infinity), hence IPC_LOCK. Kubernetes has no
  ambient capabilities: what a container adds has no effect in a process that is not root. So EFA engines keep the
  image's user, root in vLLM's images, without any other capability.
- ``privileged`` is for nodes where registering GPU memory is refused even so; everything else would be without meaning.
"""

from __future__ import annotations

from typing import Any, Final

from bidikv_operator.build.meta import Manifest
from bidikv_operator.resolved import Resolved

UNPRIVILEGED_USER: Final = 65532
HOME_DIR: Final = "/var/lib/bidikv/home"
"""Home of an engine that runs as ``UNPRIVILEGED_USER``: an emptyDir for the caches of vLLM, Triton and the hub."""
_SECCOMP: Final = {"seccompProfile": {"type": "RuntimeDefault"}}


def has_own_user(resolved: Resolved) -> bool:
    """Whether engines run as ``UNPRIVILEGED_USER`` instead of the image's user."""
    return resolved.security.restricted and resolved.fabric.type == "TCP"


def build_engine_pod_security(resolved: Resolved) -> Manifest:
    """``securityContext`` of the engine's pod; empty for none."""
    if not resolved.security.restricted or resolved.fabric.privileged:
        return {}
    if not has_own_user(resolved):
        return dict(_SECCOMP)
    return {
        "runAsNonRoot": True,
        "runAsUser": UNPRIVILEGED_USER,
        # Makes a cache on a PersistentVolumeClaim writable; a claim that is mounted read-only is left as it is.
        "fsGroup": UNPRIVILEGED_USER,
        "fsGroupChangePolicy": "OnRootMismatch",
        **_SECCOMP,
    }


def build_engine_container_security(resolved: Resolved) -> Manifest:
    """``securityContext`` of the engine's container; empty for none."""
    if resolved.fabric.privileged:
        return {"privileged": True}
    context: Manifest = {}
    capabilities: dict[str, Any] = {}
    if resolved.security.restricted:
        context["allowPrivilegeEscalation"] = False
        capabilities["drop"] = ["ALL"]
    if resolved.fabric.type == "EFA":
        capabilities["add"] = ["IPC_LOCK"]
    if capabilities:
        context["capabilities"] = capabilities
    return context


def build_engine_user_env(resolved: Resolved) -> dict[str, str]:
    """Environment of a user that the image's /etc/passwd does not know: ``getpass.getuser`` fails without a name."""
    if not has_own_user(resolved):
        return {}
    return {"HOME": HOME_DIR, "USER": "bidikv", "LOGNAME": "bidikv"}


def build_unprivileged_container_security(*, own_user: bool) -> Manifest:
    """Of our own containers, which write nothing; ``own_user`` where the pod's context names no user."""
    context: Manifest = {
        "readOnlyRootFilesystem": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    if own_user:
        context = {"runAsNonRoot": True, "runAsUser": UNPRIVILEGED_USER, **context, **_SECCOMP}
    return context


def build_router_pod_security() -> Manifest:
    return {"runAsNonRoot": True, "runAsUser": UNPRIVILEGED_USER, **_SECCOMP}
