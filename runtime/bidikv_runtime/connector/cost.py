"""Whether to read a match from its sources or to compute it here: whatever is estimated to be over earlier.

Both estimates are learnt from what this engine does anyway: its own steps give the speed of prefill, its reads the
speed of each peer. A wrong estimate heals: prefill is observed all the time, reads while they are chosen; while
recomputing is chosen, a match is read all the same now and then (``explore``), ever more rarely while that does not
pay.

Until ``MINIMUM_STEPS`` steps with prefill were seen, matches are read: the prior of prefill is a GPU's, and wrong by
orders of magnitude on other machines.

Pure: no clock, no I/O. Bounded: ``MAXIMUM_PEERS`` peers. Belongs to the scheduler's thread.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final, NamedTuple

from bidikv_runtime.connector.fit import Features, Fit

PULL: Final = "pull"
RECOMPUTE: Final = "recompute"
EXPLORE: Final = "explore"
DECISIONS: Final = (PULL, RECOMPUTE, EXPLORE)
REGRETS: Final = (PULL, RECOMPUTE)

PREFILL_PRIOR: Final[Features] = (5e-3, 2.7e-5, 1.3e-9, 5e-5)
"""Seconds per step, per new token, per new token and token of context, per decoding request. 27 us a token is what
vLLM's published benchmark of bidirectional transfer implies for Qwen3-32B on eight H200 (744 - 153 ms for 22,000
tokens); the third makes attention cost as much as the rest at 20,000 tokens of context."""
READ_PRIORS: Final[dict[str, Features]] = {
    "LIBFABRIC": (20e-3, 2.4e-6, 1 / 7.3e9),
    "UCX": (2e-3, 2.4e-6, 1 / 1e9),
}
"""By NIXL backend: seconds per read, per descriptor, per byte of one rank. LIBFABRIC: the same benchmark read 2,000
tokens in 30 and 24,000 in 130 ms, at 32 KiB per token and rank. UCX: over TCP 8 MB took 12-14 ms between two processes.
Descriptors: 118 of them were posted in 0.46 ms, 18,880 in 46 ms (vLLM, discussion of pull request 35264)."""

PREFILL_HALF_LIFE: Final = 96.0
PREFILL_LEAST_WEIGHT: Final = 0.05
"""Where reuse works, large prefills are rare, but they alone tell the cost of a token from that of a step."""
READ_HALF_LIFE: Final = 8.0
MINIMUM_STEPS: Final = 8
RECENT_STEPS: Final = 9
MAXIMUM_PEERS: Final = 256
FIRST_PATIENCE: Final = 4
LAST_PATIENCE: Final = 1024
"""So many matches in a row are recomputed before one is read to find out; the number doubles each time."""
DESCRIBED_PEERS: Final = 16


class Part(NamedTuple):
    """What would be read from one peer."""

    peer: str
    bytes: int
    """Of one rank."""
    descriptors: int
    """Of one rank: contiguous pieces of memory."""


@dataclass(frozen=True)
class Decision:
    kind: str
    """One of ``DECISIONS``; PULL and EXPLORE read."""
    read_seconds: float
    recompute_seconds: float


@dataclass
class _Peer:
    fit: Fit
    skipped: int = 0
    """Matches recomputed in a row."""
    patience: int = FIRST_PATIENCE


@dataclass
class CostModel:
    """Learns both costs and chooses.

    Args:
        backend: NIXL's, for the prior of reads.
        step_tokens: the most tokens of one engine step (``max_num_batched_tokens``).
    """

    backend: str
    step_tokens: int
    decisions: Counter[str] = field(default_factory=Counter, init=False)
    regrets: Counter[str] = field(default_factory=Counter, init=False)
    """Decisions that took longer than the other choice was estimated to."""

    def __post_init__(self) -> None:
        self._prefill = Fit(PREFILL_PRIOR, PREFILL_HALF_LIFE, PREFILL_LEAST_WEIGHT)
        self._reads = Fit(READ_PRIORS.get(self.backend, READ_PRIORS["UCX"]), READ_HALF_LIFE)
        self._peers: OrderedDict[str, _Peer] = OrderedDict()
        self._steps: deque[float] = deque(maxlen=RECENT_STEPS)

    # --- learn --------------------------------------------------------------------------------------------------------

    def record_step(self, prefills: Sequence[tuple[int, int]], decodes: int, seconds: float) -> None:
        """One engine step has ended.

        Args:
            prefills: per request with more than one token in the step: tokens of context before, new tokens.
            decodes: requests with one token.
            seconds: how long the engine was busy with the step, and with no other.
        """
        if seconds > 0:
            self._steps.append(seconds)
        new = sum(tokens for _, tokens in prefills)
        if new:
            attended = sum(tokens * (context + tokens / 2) for context, tokens in prefills)
            self._prefill.observe((1.0, float(new), float(attended), float(decodes)), seconds)

    def record_read(self, peer: str, bytes: int, descriptors: int, seconds: float) -> None:
        """One rank has read one part from ``peer``, from the start of the transfer to its end."""
        features = (1.0, float(descriptors), float(bytes))
        self._reads.observe(features, seconds)
        self._find(peer).fit.observe(features, seconds)

    def record_outcome(self, decision: Decision, seconds: float) -> None:
        """How long it took from the decision until the match's tokens were there, read or computed."""
        if decision.kind == PULL and seconds > decision.recompute_seconds:
            self.regrets[PULL] += 1
        elif decision.kind == RECOMPUTE and seconds > decision.read_seconds:
            self.regrets[RECOMPUTE] += 1

    # --- estimate -----------------------------------------------------------------------------------------------------

    def estimate_read(self, peer: str, bytes: int, descriptors: int) -> float:
        """Seconds of one read from a peer."""
        fit = self._find(peer).fit
        self._reads.estimate((1.0, 0.0, 0.0))
        fit.rebase(self._reads.coefficients)
        return fit.estimate((1.0, float(descriptors), float(bytes)))

    def estimate_prefill(self, context: int, tokens: int) -> float:
        """Seconds by which computing ``tokens`` after ``context`` tokens lengthens a request's prefill."""
        return self._prefill.estimate((tokens / self.step_tokens, float(tokens), tokens * (context + tokens / 2), 0.0))

    def estimate_prefill_speed(self) -> float:
        """Tokens per second of full steps at the beginning of a prompt; 0 while too few steps were seen."""
        if self._prefill.count < MINIMUM_STEPS:
            return 0.0
        seconds = self._prefill.estimate((1.0, float(self.step_tokens), self.step_tokens**2 / 2, 0.0))
        return self.step_tokens / seconds if seconds > 0 else 0.0

    @property
    def step_seconds(self) -> float:
        """Usual duration of the engine's last steps."""
        return median(self._steps) if self._steps else 0.0

    # --- choose -------------------------------------------------------------------------------------------------------

    def choose(self, parts: Sequence[Part], context: int, tokens: int, busy: bool) -> Decision:
        """Read or compute ``tokens`` that follow ``context`` tokens.

        A read parks the request. An idle engine takes it up again at once; one that is ``busy`` with others only after
        the step in which the read ends, hence half a step later on average. Several parts are taken one after another,
        which is the most they can take.
        """
        read = sum(self.estimate_read(*part) for part in parts) + (self.step_seconds / 2 if busy else 0.0)
        recompute = self.estimate_prefill(context, tokens)
        decision = Decision(self._choose(parts, read, recompute), read, recompute)
        self.decisions[decision.kind] += 1
        return decision

    def _choose(self, parts: Sequence[Part], read: float, recompute: float) -> str:
        peers = [self._find(part.peer) for part in parts]
        if self._prefill.count < MINIMUM_STEPS or read <= recompute:
            for peer in peers:
                peer.skipped, peer.patience = 0, FIRST_PATIENCE
            return PULL
        if all(peer.skipped >= peer.patience for peer in peers):
            for peer in peers:
                peer.skipped, peer.patience = 0, min(LAST_PATIENCE, 2 * peer.patience)
            return EXPLORE
        for peer in peers:
            peer.skipped += 1
        return RECOMPUTE

    def _find(self, name: str) -> _Peer:
        peer = self._peers.get(name)
        if peer is None:
            peer = self._peers[name] = _Peer(Fit(self._reads.coefficients, READ_HALF_LIFE))
            if len(self._peers) > MAXIMUM_PEERS:
                self._peers.popitem(last=False)
        self._peers.move_to_end(name)
        return peer

    def describe(self) -> dict[str, Any]:
        """For the JSON state: what the last estimates were made of, of the peers used last. Any thread may call it."""
        step, token, attended, decode = self._prefill.coefficients
        recent = list(self._peers.items())[-DESCRIBED_PEERS:]
        return {
            "prefill": {
                "observed_steps": self._prefill.count,
                "step_milliseconds": _round(step * 1e3),
                "token_microseconds": _round(token * 1e6),
                "token_and_context_nanoseconds": _round(attended * 1e9),
                "decode_microseconds": _round(decode * 1e6),
            },
            "reads": {
                "all": _describe_read(self._reads),
                **{name: _describe_read(peer.fit) for name, peer in reversed(recent)},
            },
            "decisions": {kind: self.decisions[kind] for kind in DECISIONS},
            "regrets": {kind: self.regrets[kind] for kind in REGRETS},
        }


def _describe_read(fit: Fit) -> dict[str, Any]:
    latency, descriptor, byte = fit.coefficients
    return {
        "observed_reads": fit.count,
        "latency_milliseconds": _round(latency * 1e3),
        "descriptor_microseconds": _round(descriptor * 1e6),
        "gigabytes_per_second": _round(1e-9 / byte) if byte else None,
    }


def _round(value: float) -> float:
    return float(f"{value:.3g}")
