"""The product's connector with faults on demand, loaded into an engine by its ``kv_connector_module_path``."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from bidikv_runtime.connector import connector
from bidikv_runtime.connector.lookup_client import Question
from bidikv_runtime.connector.metadata import VerifiedReadMetadata
from bidikv_runtime.connector.reads import Part
from bidikv_runtime.connector.worker import VerifiedReadWorker
from e2e.engine.faults import FAULTS_FILE, Faults, events_file

HOLD_SECONDS = 90.0
"""A hold ends after this at the latest: a test that died must not hang the engine."""


class FaultyWorker(VerifiedReadWorker):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._path = Path(os.environ[FAULTS_FILE])
        self._held: dict[str, tuple[float, Any, Any]] = {}
        self._announced: dict[str, float] = {}

    def start_load_kv(self, metadata: VerifiedReadMetadata) -> None:
        now, hold = time.monotonic(), self._faults().hold_reads
        for request_id in list(metadata.reqs_to_recv) if hold else ():
            self._held[request_id] = (now, metadata.reqs_to_recv.pop(request_id), metadata.tickets.pop(request_id))
            self._announce("read", request_id)
        for request_id, (since, request, ticket) in list(self._held.items()):
            if not hold or now - since > HOLD_SECONDS:
                del self._held[request_id]
                metadata.reqs_to_recv[request_id], metadata.tickets[request_id] = request, ticket
        super().start_load_kv(metadata)

    def _read_blocks_for_req(self, part_id: str, meta: Any) -> None:
        super()._read_blocks_for_req(part_id, meta)
        if (group := self._faults().freeze_on_read) and self._recving_transfers.get(part_id):
            os.killpg(group, signal.SIGSTOP)
            self._announce("frozen", part_id)

    def _ask(self, part: Part) -> Question | None:
        if part.question is None and self._faults().hold_validations:
            key = f"{part.ticket.request_id} {part.ticket.offset}"
            if key not in self._announced:
                self._announced[key] = time.monotonic()
                self._announce("validation", key)
            if time.monotonic() - self._announced[key] < HOLD_SECONDS:
                return None
        return super()._ask(part)

    def _conclude(self, part_id: str, part: Part, question: Question) -> None:
        if self._faults().trust_reads:
            self._reads.end(part_id, len(part.ticket.blocks))
        else:
            super()._conclude(part_id, part, question)

    def _faults(self) -> Faults:
        return Faults.read(self._path)

    def _announce(self, what: str, key: str) -> None:
        with events_file(self._path).open("a") as events:
            events.write(f"{what} {key}\n")


class NixlConnector(connector.NixlConnector):
    worker_class = FaultyWorker
