"""End one request with an error before its first token, from the connector's place in vLLM's scheduler.

vLLM gives a connector no way to fail a request, and no reference to its scheduler. But it hands the connector the
request itself, and there is one state from which a request ends with an error and nothing else is touched: waiting for
a grammar that did not compile. ``refuse`` puts the request there. vLLM does all the rest, as for any such request: its
next scheduling pass counts it among ``grammar_compile_error_reqs``, and the end of that step frees it, tells the
connector (``request_finished``) and answers the client. This needs no flag, no patch and no private object; vLLM 0.32
and 0.33 agree on every name it uses.

What the client sees, with no output before it:

- vLLM 0.32: HTTP 500 "Internal server error" (in a stream: the first event is that error). The reason stays here.
- vLLM 0.33: HTTP 400 whose message ends with the reason.

``handover_error`` makes one distinct error of both.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.request import RequestStatus
from vllm.v1.structured_output.request import StructuredOutputRequest

from bidikv_runtime import contract


class HandoverLost(Exception):
    """Stands for the grammar that did not compile; vLLM 0.33 shows its text to the client."""


def may_refuse(request: Any) -> bool:
    """Whether the request may still end with an error that its client never sees: it has produced nothing yet.

    A preempted request is asked for its external tokens again, with part of its answer already sent.
    """
    return bool(request.num_output_tokens == 0 and request.num_preemptions == 0)


def ask_again(request: Any) -> None:
    """Have vLLM call ``get_num_new_matched_tokens`` for a request whose read failed, where it may be refused.

    Call it in ``update_connector_output``, for a request in ``finished_recving`` whose read was reported as failed (by
    invalid blocks or ``failed_recving``), else vLLM keeps its blocks. What did validate is given up: it is freed
    without being cached.

    Args:
        request: a ``vllm.v1.request.Request`` that waits for its read.
    """
    request.num_computed_tokens = 0


def refuse(request: Any, reason: str) -> None:
    """End the request with an error instead of scheduling it.

    Call it in ``get_num_new_matched_tokens`` only, where the request waits and holds no blocks, and return
    ``(None, False)`` from there. vLLM asks for this request no more. Not for a request with
    ``skip_reading_prefix_cache``: vLLM overrules the return value, and its scheduler ends with an exception.

    Args:
        request: a ``vllm.v1.request.Request`` for which ``may_refuse`` holds.
        reason: one sentence.
    """
    error = HandoverLost(f"{contract.HANDOVER_LOST}: {reason}")
    request.structured_output_request = StructuredOutputRequest(params=None, _grammar=error)
    request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
