"""Peers, one small file each, with a tuple `PEERS` of `benchmarks.implementations.Implementation`.

A missing package is no error: its peer gives the reason. `--peer FILE` adds a file from elsewhere.
"""
