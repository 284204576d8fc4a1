"""``make bench-operator``: the operator with many resources on a real API server."""
