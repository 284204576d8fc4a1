"""The local cluster, the local engines, the demo and the end-to-end tests. Not part of the wheel."""
