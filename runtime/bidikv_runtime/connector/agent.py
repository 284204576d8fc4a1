"""The NIXL agent: three corrections around vLLM's own construction of it, and what vLLM's code sees of it afterwards.

Measured with NIXL 1.5.1 (its Python layer sets both values itself and offers no parameter for the first):

- Its progress thread spins (``pthrDelay = 0``): 0.5-0.7 of a core per engine, idle or not. With a delay the thread
  waits on events: 0.015 of a core, and reads are no slower. Without the thread, a first read from an idle engine never
  completes.
- Its synchronisation mode is "none", although vLLM calls the agent from its handshake thread and its main thread.

Before the backend UCX is made, UCX is kept from ending this process when a reader's ends (``ucx_requests``).
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bidikv_runtime.connector.coalesce import sort_pairs
from bidikv_runtime.connector.ucx_requests import zero_requests

logger = logging.getLogger("vllm.bidikv.agent")


class BackendError(RuntimeError):
    """A NIXL backend cannot be loaded in this image."""


class _Bindings:
    """The binding module with another configuration class and another agent class."""

    def __init__(self, bindings: Any, config_class: type, agent_class: type) -> None:
        self._bindings = bindings
        self.nixlAgentConfig = config_class
        self.nixlAgent = agent_class

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bindings, name)


@contextmanager
def agent_settings(agent_class: Any, progress_delay_us: int) -> Iterator[None]:
    """Agents built inside get the progress delay, strict synchronisation, and a UCX that survives its readers.

    Args:
        agent_class: NIXL's ``nixl_agent``, in whose module the binding is replaced for the time being.
        progress_delay_us: microseconds between polls of the progress thread.
    """
    module: Any = sys.modules[agent_class.__module__]
    bindings = module.nixlBind
    base = bindings.nixlAgentConfig
    strict = bindings.NIXL_THREAD_SYNC_STRICT

    def fixed(name: str, value: Any) -> property:
        descriptor = getattr(base, name)
        return property(descriptor.__get__, lambda config, _ignored: descriptor.__set__(config, value))

    config_class = type(
        "nixlAgentConfig",
        (base,),
        {"pthrDelay": fixed("pthrDelay", progress_delay_us), "syncMode": fixed("syncMode", strict)},
    )

    def create_backend(agent: Any, backend: str, parameters: Any) -> Any:
        if backend == "UCX" and (reason := _zero_requests(agent_class)) is not None:
            logger.warning("A peer that ends while it reads from this engine may end it, too: %s", reason)
        return bindings.nixlAgent.createBackend(agent, backend, parameters)

    inner_class = type("nixlAgent", (bindings.nixlAgent,), {"createBackend": create_backend})
    module.nixlBind = _Bindings(bindings, config_class, inner_class)
    try:
        yield
    finally:
        module.nixlBind = bindings


def _find_plugin(agent_class: Any, backend: str) -> Path:
    """Where NIXL looks for a backend."""
    package = Path(str(sys.modules[agent_class.__module__].__file__)).parent
    folder = Path(os.environ.get("NIXL_PLUGIN_DIR") or package.with_name(package.name + ".libs") / "nixl")
    return folder / f"libplugin_{backend}.so"


def _zero_requests(agent_class: Any) -> str | None:
    """Correct the UCX that NIXL is about to use; why not, as one sentence, if that fails."""
    try:
        library = ctypes.CDLL(str(_find_plugin(agent_class, "UCX")))
    except OSError as error:
        return str(error)
    return zero_requests(library)


def explain_missing_backend(agent_class: Any, backends: Sequence[str]) -> str | None:
    """Why one of ``backends`` cannot be loaded, as one sentence; None when all can (the failure is another).

    NIXL itself says ``NIXL_ERR_NOT_FOUND`` and no more, also when the plugin is there and a library it needs is not.
    """
    for backend in backends:
        plugin = _find_plugin(agent_class, backend)
        if not plugin.exists():
            return f"NIXL's backend {backend} is not in this image ({plugin} is missing): use an image that has it"
        try:
            ctypes.CDLL(str(plugin))
        except OSError as error:
            return (
                f"NIXL's backend {backend} cannot be loaded ({error}): use an image that has this library (for "
                "LIBFABRIC, the EFA software), or the TCP fabric"
            )
    return None


class ReadingAgent:
    """The NIXL agent as a reader wants it, for vLLM's code to use in place of its own.

    It sends no notifications (a source holds nothing for its readers, and an idle one never polls), puts the
    descriptors of a read in an order that NIXL can join (``coalesce``), keeps the telemetry of a transfer that has
    ended for the one who started it (vLLM reads it and forgets which transfer it was), and knows how long the
    descriptors of a prepared list are.
    """

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._telemetry: dict[Any, Any] = {}
        self._shapes: dict[Any, tuple[int, int]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def prep_xfer_dlist(self, agent_name: str, descriptors: Any, **options: Any) -> Any:
        """Prepare a list of descriptors, all of one length."""
        handle = self._agent.prep_xfer_dlist(agent_name, descriptors, **options)
        if hasattr(descriptors, "descCount"):  # vLLM 0.33 passes arrays
            self._shapes[handle] = (descriptors[0][1], descriptors.descCount())
        return handle

    def release_dlist_handle(self, handle: Any) -> None:
        """Forget a list."""
        self._shapes.pop(handle, None)
        self._agent.release_dlist_handle(handle)

    def shape_of(self, handle: Any) -> tuple[int, int] | None:
        """Bytes of each descriptor of a prepared list, and how many there are; None if that is not known."""
        return self._shapes.get(handle)

    def make_prepped_xfer(
        self,
        operation: str,
        local_side: Any,
        local_indices: Any,
        remote_side: Any,
        remote_indices: Any,
        notif_msg: bytes = b"",
        **options: Any,
    ) -> Any:
        """Prepare a transfer, its pairs sorted, without its completion notification."""
        local, remote = sort_pairs(local_indices, remote_indices)
        return self._agent.make_prepped_xfer(operation, local_side, local, remote_side, remote, **options)

    def get_xfer_telemetry(self, handle: Any) -> Any:
        """NIXL's telemetry of a transfer that has ended."""
        self._telemetry[handle] = telemetry = self._agent.get_xfer_telemetry(handle)
        return telemetry

    def take_telemetry(self, handles: Iterable[Any]) -> list[Any]:
        """What ``get_xfer_telemetry`` has said of these transfers, which is forgotten now."""
        taken = (self._telemetry.pop(handle, None) for handle in handles)
        return [telemetry for telemetry in taken if telemetry is not None]

    def send_notif(self, *arguments: Any, **options: Any) -> None:
        """Send nothing."""
