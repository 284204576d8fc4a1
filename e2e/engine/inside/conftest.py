"""Tests for the engine's interpreter, which has vLLM; ``e2e/tests/test_engine_scheduling.py`` runs them there."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("vllm") else ["*"]
