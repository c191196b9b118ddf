"""The torch ops, one folder each, and what they share."""

from fastattn.ops._op import BackendStatus, Explanation, backend_table

__all__ = ["BackendStatus", "Explanation", "backend_table"]
