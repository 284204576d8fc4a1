"""Names and shapes on which operator, router and connector must agree.

Standard library only: the operator, the router and a vLLM process all import it. A port, header, parameter or
configuration key that crosses a process boundary is written here and nowhere else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

# --- ports ----------------------------------------------------------------------------------------------------------
ENGINE_PORT: Final = 8000
"""vLLM's HTTP port in prefill and decode pods."""
SIDE_CHANNEL_PORT: Final = 5600
"""NIXL's handshake port (vLLM adds the data-parallel index)."""
LOOKUP_PORT: Final = 5700
"""The connector's lookup and validate port."""
STATE_PORT: Final = 5800
"""The connector's JSON state over HTTP, ``GET /state`` (plus the data-parallel index, as the lookup port)."""
ROUTER_PORT: Final = 8000
"""The router's port: OpenAI API, /health, /ready and /metrics."""

# --- request parameters ---------------------------------------------------------------------------------------------
KV_TRANSFER_PARAMS: Final = "kv_transfer_params"
"""vLLM's request field. The router removes whatever a client puts there."""
SOURCES_PARAM: Final = "bidikv_sources"
"""Key inside ``kv_transfer_params``: list of ``"address:port"`` (IP addresses, IPv6 in brackets) of lookup ports whose
engines may hold this prompt's KV."""
SESSION_PARAM: Final = "bidikv_session"
"""Key inside ``kv_transfer_params``: opaque name of the session, at most ``MAXIMUM_SESSION_LENGTH`` characters."""
MAXIMUM_SESSION_LENGTH: Final = 128
EXPECT_PARAM: Final = "bidikv_expect"
"""Key inside ``kv_transfer_params``: what is known of the session's next turn, one of ``EXPECT_RETURN`` (the request
offers tools, or the client says so) and ``EXPECT_OVER`` (this was the last turn)."""
EXPECT_RETURN: Final = "return"
EXPECT_OVER: Final = "over"
HANDOVER_PARAM: Final = "bidikv_handover"
"""Key inside ``kv_transfer_params`` of a prefill leg: true when a decode engine will read the result at once."""
PREFILLED_PARAM: Final = "bidikv_prefilled_tokens"
"""Key inside ``kv_transfer_params`` of a decode leg: how many tokens of the prompt prefill reported to have computed. A
decode engine that finds far less refuses the request (``HANDOVER_LOST``) instead of computing a long prompt itself."""
BODY_BYTES_PARAM: Final = "bidikv_body_bytes"
"""Key inside ``kv_transfer_params`` of both legs: bytes of the client's request body. The decode engine keeps it with
the session and reports it (``SessionReport``), so that any router replica can tell how much a turn has grown."""
COMPUTE_LIMIT_PARAM: Final = "bidikv_compute_limit_tokens"
"""Key inside ``kv_transfer_params`` of a decode leg that was sent without a prefill leg: the engine computes at most
this many tokens of the prompt, or refuses the request (``HANDOVER_LOST``)."""
TOKEN_IDS_PARAM: Final = "prompt_token_ids"
"""Key inside ``kv_transfer_params`` of a chat's decode leg: the prompt's tokens as prefill has computed them. vLLM's
own name: with it, decode neither renders nor tokenises the messages again."""
HANDOVER_LOST: Final = "bidikv_handover_lost"
"""Type of the error with which a decode engine refuses a request whose hand-over it cannot find: HTTP 503, before the
first token. Retriable after another prefill."""
HANDOVER_HEADER: Final = "x-bidikv-handover"
"""On a decode leg with ``PREFILLED_PARAM`` or ``COMPUTE_LIMIT_PARAM``: ``HANDOVER_GUARDED``. On the answer that is
``HANDOVER_LOST``: ``HANDOVER_ANSWERED_LOST``. The router passes it on neither from clients nor to them."""
HANDOVER_GUARDED: Final = "guarded"
HANDOVER_ANSWERED_LOST: Final = "lost"

# --- sessions -------------------------------------------------------------------------------------------------------
SESSION_HEADERS: Final = (
    "x-session-id",
    "x-conversation-id",
    "session-id",  # Codex
    "session_id",  # Codex before 2026
    "x-claude-code-session-id",
    "x-opencode-session",
    "x-session-affinity",
)
"""Request headers that name the session, first match wins (lower case)."""
SESSION_PART_HEADERS: Final = ("thread-id", "x-claude-code-agent-id")
"""Headers that name one conversation of several within the session: Codex's thread, Claude Code's subagent."""
SESSION_BODY_KEYS: Final = ("prompt_cache_key", "conversation_id", "session_id")
"""Body keys that name the session when no header does; ``router/api/session.py`` knows some more that need reading."""

RANK_HEADER: Final = "x-data-parallel-rank"
"""vLLM's own: which data-parallel rank behind its API a request is for. Only the router sets it."""
PATH_HEADER: Final = "x-bidikv-path"
"""With the router's ``debug``: a request with it takes this path (local, bidirectional or plain); every answer names
its path in it."""

# --- the connector inside vLLM --------------------------------------------------------------------------------------
CONNECTOR_CLASS: Final = "NixlConnector"
"""Class name: vLLM 0.32 compares the *name* in several checks (config/vllm.py, platforms/cpu.py)."""
CONNECTOR_MODULE: Final = "bidikv_runtime.connector.connector"
ENGINE_MIDDLEWARE: Final = "bidikv_runtime.connector.handover_error.HandoverErrors"
"""For vLLM's ``--middleware``: turns vLLM's own error for a refused request into ``HANDOVER_LOST``."""
HASH_ALGORITHM: Final = "sha256_cbor"
"""vLLM prefix-cache hash that is equal in every process for equal tokens."""
HASH_SEED: Final = "0"
"""PYTHONHASHSEED of every engine: vLLM seeds the first block hash with it."""
CONNECTOR_INSTALL_DIR: Final = "/opt/bidikv/connector"
"""Where the init container copies the package; on PYTHONPATH of the engine container."""
ENV_LOOKUP_HOST: Final = "BIDIKV_LOOKUP_HOST"
"""Address on which the lookup port listens (the pod's IP)."""
ENV_TOKEN_FILE: Final = "BIDIKV_TOKEN_FILE"
"""File with the tokens that authenticate peers, one per line: the first one signs, every one is accepted. It is read
again when it changes, so a token rotates without a restart. Unset: peers are not authenticated."""
TOKEN_DIR: Final = "/etc/bidikv-token"
"""Where engines and routers mount the Secret with the tokens."""
TOKEN_KEY: Final = "tokens"
"""Key of that Secret, and so the file's name."""
MINIMUM_TOKEN_LENGTH: Final = 16
"""In printable ASCII characters."""
MAXIMUM_TOKENS: Final = 8
"""In one file. A rotation needs two; each further one costs a pass over messages that the first ones do not fit."""
DRAIN_MODULE: Final = "bidikv_runtime.drain"
"""``python3 -m``: what an engine's preStop hook runs; returns when nothing would be lost, or at its deadline."""

# --- what an engine reports to routers ------------------------------------------------------------------------------
REPORT_PATH: Final = "/report"
"""On ``STATE_PORT``: ``GET /report?epoch=<epoch>&since=<sequence>`` gives an ``EngineReport`` as JSON, with the
sessions that changed after ``since`` (all of them when the epoch is another or missing); ``&sessions=0`` leaves them
out. ``&reads=1``: the router that asks will have others read the engine's sessions. It wants a token if there is a
file."""
REACH_SECONDS: Final = 90.0
"""What an engine reports of its peers is no older. Of a silent one that requests name it asks again once a minute."""
MAXIMUM_REPORTED_SESSIONS: Final = 4096
"""In one report: the most recently changed ones."""


@dataclass(frozen=True)
class SessionReport:
    """The last turn of a session that ended on the engine, and what is left of its KV."""

    name: str
    """``SESSION_PARAM`` of its requests."""
    prompt_tokens: int
    """Of that turn's prompt."""
    total_tokens: int
    """With the answer."""
    held_tokens: int
    """Of these, from the front: tokens whose KV was still cached when this was reported."""
    body_bytes: int
    """``BODY_BYTES_PARAM`` of that turn; 0 when unknown."""


@dataclass(frozen=True)
class TransportReport:
    """What has moved an engine's KV since its start, over all ranks and peers. For the operator's verification."""

    backend: str
    """NIXL's, as LIBFABRIC or UCX."""
    provider: str
    """What the backend moves bytes with: efa, cxi, rdma, tcp or unknown."""
    warning: str = ""
    """One sentence when KV moves slower than the configuration makes one expect."""
    read_bytes: int = 0
    failed_reads: int = 0
    bandwidth: float = 0.0
    """Bytes a second, the least that was measured with a peer; 0 before any was."""


@dataclass(frozen=True)
class EngineReport:
    """What a router replica learns from an engine about once a second; replicas share no other state."""

    engine: str
    epoch: str
    """Another one after each start of the engine."""
    sequence: int
    """For the next ``since``."""
    compatibility: str
    """Engines with equal values may read each other's KV (model, weights, dtype, layout, block size, release)."""
    requests: int
    """Unfinished requests, waiting and running."""
    queued_tokens: int
    """Prompt tokens of these that are neither cached nor computed yet."""
    prefill_tokens_per_second: float
    """As learnt from its own steps; 0 when not known yet."""
    free_blocks: float
    """Share of KV blocks that no unfinished request uses, 0 to 1."""
    sessions: tuple[SessionReport, ...] = ()
    unread_sessions: int = 0
    """Sessions whose next turn is expected and whose KV no other engine has read since their last turn ended here:
    what would be lost with this engine."""
    unread_handovers: int = 0
    """Finished prefills that decode has not read yet."""
    held_sessions: int = 0
    """Sessions whose last turn ended here and of whose KV some is still cached."""
    prompt_tokens: int = 0
    """Of all requests that have ended since the start."""
    reused_tokens: int = 0
    """Of these, tokens whose KV was read from other engines."""
    unreachable: tuple[str, ...] = ()
    """Lookup addresses of peers that were asked, lately within ``REACH_SECONDS`` and for at least half a minute, and
    never answered or never could be read; longest unreachable first."""
    reached: tuple[str, ...] = ()
    """Lookup addresses of peers that have answered within ``REACH_SECONDS``, the last question among them."""
    transport: TransportReport | None = None
    """None before the workers have told."""
    version: int = 1


# --- metrics of the connector, in vLLM's own /metrics ---------------------------------------------------------------
METRIC_LOOKUPS: Final = "bidikv_lookups_total"
"""Requests that asked sources, by ``result``: hit, miss, silent, refused."""
METRIC_LOOKUP_SECONDS: Final = "bidikv_lookup_seconds"
"""Histogram: from the first question of a request to its decision."""
METRIC_LOOKUP_WAIT_SECONDS: Final = "bidikv_lookup_wait_seconds"
"""Histogram: how long the scheduler waited in place for the answers of one request."""
METRIC_REUSED_TOKENS: Final = "bidikv_reused_tokens_total"
"""Tokens whose KV was read from a source and validated, by ``source`` (address) and ``direction``."""
METRIC_DISCARDED_TOKENS: Final = "bidikv_discarded_tokens_total"
"""Tokens found at a source whose KV did not arrive or did not validate; they were recomputed."""
METRIC_READ_BYTES: Final = "bidikv_read_bytes_total"
METRIC_READ_SECONDS: Final = "bidikv_read_seconds"
"""Histogram: from the start of a read (first handshake included) to its validation, per rank."""
METRIC_VALIDATE_SECONDS: Final = "bidikv_validate_seconds"
"""Histogram: from the question whether a read is valid to its answer, per rank."""
METRIC_VALIDATE_FAILURES: Final = "bidikv_validate_failures_total"
"""Reads not valid in full, by ``reason``: reallocated, restarted, silent, read_failed, overdue; per rank."""
METRIC_PUBLISHED_BLOCKS: Final = "bidikv_published_blocks"
"""Gauge: KV blocks of this engine that other engines may read."""
METRIC_HELD_BLOCKS: Final = "bidikv_held_blocks"
"""Gauge: cached blocks that are evicted after all others, by ``reason``: session, handover."""
METRIC_HOLDS_ENDED: Final = "bidikv_holds_ended_total"
"""Holds by ``reason`` (session, handover) and how they ``ended``: used, expired, pressure, budget, over."""
METRIC_HANDOVERS_LOST: Final = "bidikv_handovers_lost_total"
"""Requests refused with ``HANDOVER_LOST`` for want of what ``PREFILLED_PARAM`` announced."""
METRIC_COMPUTE_LIMIT_EXCEEDED: Final = "bidikv_compute_limit_exceeded_total"
"""Requests refused with ``HANDOVER_LOST`` for want of what ``COMPUTE_LIMIT_PARAM`` presumed."""
METRIC_COST_DECISIONS: Final = "bidikv_cost_decisions_total"
"""What the cost model chose for a match, by ``decision``: pull, recompute, explore."""
METRIC_COST_REGRETS: Final = "bidikv_cost_regrets_total"
"""Decisions that turned out slower than the estimate of the other choice, by ``decision``: pull, recompute."""
METRIC_QUARANTINED_BLOCKS: Final = "bidikv_quarantined_blocks"
"""Gauge: blocks kept out of use because an abandoned transfer may still write to them."""
METRIC_TRANSPORT_INFO: Final = "bidikv_transport_info"
"""Gauge, always 1: NIXL ``backend`` and ``provider`` that this engine really uses."""
METRIC_PEER_BANDWIDTH: Final = "bidikv_peer_bandwidth_bytes_per_second"
"""Gauge: bandwidth measured at the first contact with a ``peer`` (address)."""

DIRECTION_FROM_DECODE: Final = "decode_to_prefill"
DIRECTION_FROM_PREFILL: Final = "prefill_to_decode"
DIRECTION_UNKNOWN: Final = "unknown"
"""``direction`` of reused tokens: by the leg that the request was, see ``HANDOVER_PARAM`` and ``PREFILLED_PARAM``."""

# --- the router's metrics that others read --------------------------------------------------------------------------
METRIC_TIME_TO_FIRST_TOKEN: Final = "bidikv_router_time_to_first_token_seconds"
"""Histogram by ``path``: from a streamed request fully received to the first byte of its answer's body."""

METRIC_OBJECTIVE: Final = "bidikv_router_objective_seconds"
"""Gauge by ``objective`` (ttft, itl): what the resource asks of the 90th percentile; absent without an objective."""
METRIC_OBJECTIVE_TURNS: Final = "bidikv_router_objective_turns_total"
"""Streamed answers by ``objective`` and whether they ``met`` it: yes, no."""

# --- the router's configuration -------------------------------------------------------------------------------------
ENV_ROUTER_CONFIG: Final = "BIDIKV_ROUTER_CONFIG"
"""Variable of the router: its configuration, as ``RouterConfig.to_json`` writes it."""

ReuseMode = Literal["Bidirectional", "OneWay"]
"""Bidirectional: prefill reads the history from decode. OneWay: KV moves from prefill to decode only."""
MissingPrefill = Literal["Decode", "Fail"]
Fabric = Literal["EFA", "TCP"]
BACKENDS: Final[dict[str, str]] = {"EFA": "LIBFABRIC", "TCP": "UCX"}
"""NIXL backend per fabric. UCX over EFA silently falls to emulation speed, hence LIBFABRIC."""


@dataclass(frozen=True)
class RouterConfig:
    """The configuration of the router; written by the operator, read by the router."""

    namespace: str
    prefill_service: str
    """Headless Service whose EndpointSlices list the prefill pods."""
    decode_service: str
    served_model_name: str
    reuse: ReuseMode = "Bidirectional"
    source_count: int = 2
    """How many decode pods of a session's ranking are offered to prefill as sources."""
    engine_port: int = ENGINE_PORT
    lookup_port: int = LOOKUP_PORT
    state_port: int = STATE_PORT
    """Of the engines' reports; 0 asks for none."""
    prefill_ranks: int = 1
    """Data-parallel ranks of each prefill pod: engines of their own, whose lookup and state ports count up by one."""
    decode_ranks: int = 1
    ttft_objective_seconds: float = 0.0
    """What the 90th percentile of the time to first token should be; 0: no objective."""
    itl_objective_seconds: float = 0.0
    """The same of the time between two tokens."""
    local_limit_tokens: int = 512
    """A turn of which decode has to compute at most this much may go to it alone; 0 for never. Decode's other streams
    wait while it computes."""
    missing_prefill: MissingPrefill = "Decode"
    """What to do when prefill's answer does not say what it computed: decode computes what it does not find, or the
    turn fails with 502."""
    continue_streams: bool = False
    """When decode dies within a stream, go on from the text already sent on another engine."""
    cache_salt_by_tenant: bool = False
    """Keep tenants' (Authorization header) prefix caches apart with vLLM's ``cache_salt``."""
    tls_dir: str = ""
    """Folder with ``tls.crt`` and ``tls.key`` (a mounted ``kubernetes.io/tls`` Secret): serve HTTPS. Empty: HTTP."""
    access_log: bool = False
    """One JSON line per request on standard output."""
    trace_endpoint: str = ""
    """OTLP/HTTP endpoint of OpenTelemetry traces, as ``http://collector:4318/v1/traces``. Empty: no traces."""
    trace_ratio: float = 1.0
    """Share of new traces that are sampled, 0 to 1. A client's trace keeps the client's decision."""
    debug: bool = False
    """Serve /debug/sessions and obey the header ``x-bidikv-path``."""
    version: int = 1
    """Schema version; the router refuses one that it does not know."""

    def to_json(self) -> str:
        """Stable text: equal configurations give equal bytes (a checksum of it rolls the router)."""
        return json.dumps(asdict(self), indent=2, sort_keys=True) + "\n"


def kv_transfer_config(
    *, fabric: Fabric, lookup_port: int = LOOKUP_PORT, options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The value of vLLM's ``--kv-transfer-config`` for an engine of either role.

    ``options`` are further ``bidikv_*`` keys of the connector's ``settings.py``.

    ``kv_both`` on both sides: a reading ``kv_producer`` lacks deferred block freeing (vLLM 0.32 scheduler). The failure
    policy is a top-level field; vLLM ignores it inside the extra config.
    """
    return {
        "kv_connector": CONNECTOR_CLASS,
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "backends": [BACKENDS[fabric]],
            "bidikv_lookup_port": lookup_port,
            **(options or {}),
        },
    }
