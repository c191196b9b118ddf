"""Checks of implementations from elsewhere. Code shared by tests, benchmarks and `fastattn check`:
samples, the error budget, poisoned results, the dropout mask.
"""

from fastattn.testing.check import check_implementation
from fastattn.testing.compare import Comparison, compare
from fastattn.testing.dropout import dropout_mask
from fastattn.testing.implementation import dense_mask
from fastattn.testing.judge import KINDS
from fastattn.testing.poison import poisoned_results
from fastattn.testing.report import Report
from fastattn.testing.spec import OpSpec, Sample, Workload, all_specs

__all__ = [
    "KINDS",
    "Comparison",
    "OpSpec",
    "Report",
    "Sample",
    "Workload",
    "all_specs",
    "check_implementation",
    "compare",
    "dense_mask",
    "dropout_mask",
    "poisoned_results",
]
