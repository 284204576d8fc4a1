"""How much the retention policy saves: agent traces replayed against the real free queue and the real policy.

``python -m e2e.bench.retention`` prints a table and writes build/bench/retention.json. No engine is started.
"""
