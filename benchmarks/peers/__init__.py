"""Peers, one small file each, with a tuple `PEERS` of `benchmarks.implementations.Implementation`.

Absent packages are no error: a peer says why it is absent. A file elsewhere joins by `--peer
FILE`.
"""
