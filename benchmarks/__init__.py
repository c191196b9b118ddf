"""Throughput of every op and the whole model: checked before timed, next to every installed peer.

`python -m benchmarks.run` measures, `pytest benchmarks` measures through pytest-benchmark,
`python -m benchmarks.report` converts result rows to tables and plots,
`python -m benchmarks.tune` searches tilings, and `python -m benchmarks.conformance` checks
implementations of other projects. Reading order: `cases` (what is measured),
`implementations` and `peers` (the candidates), `op_benchmark` (inputs, oracle and check of an op),
`model` and `generation` (the same for whole models), `worker` (the measuring process), `runner`
(the process that supervises it), `rows` (the results), `grids`, `plots` and `report` (the report).
"""
