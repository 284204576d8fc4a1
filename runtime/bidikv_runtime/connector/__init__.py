"""The KV connector: verified one-sided reads between vLLM engines, in both directions.

Runs inside a stock vLLM image, so it imports the standard library, msgspec, zmq, vllm (with NIXL) and
``bidikv_runtime.contract`` only. ``connector``, ``scheduler``, ``worker``, ``metadata`` and ``stats`` import vllm;
every other module is free of it and is tested without it.
"""
