"""A genuine Kubernetes on one Linux machine: etcd, the control plane and one or more nodes, from packages.

Each machine of the cluster (the control plane, each node) is one unit: a process tree in network, mount, PID, UTS and
IPC namespaces of its own, joined to one bridge that has no way out. Ending a unit's first process ends all of it.
"""
