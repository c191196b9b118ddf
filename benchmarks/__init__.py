"""Throughput of every op and the whole model: correct before timed, beside every peer at hand.

`python -m benchmarks.run` is the plain runner, `pytest benchmarks` the same through
pytest-benchmark, `python -m benchmarks.report` turns rows of results into tables and plots, and
`python -m benchmarks.tune` searches tilings. Reading order: `cases` (what is measured),
`implementations` and `peers` (by whom), `subject` (inputs, oracle, gate of an op), `model` and
`generation` (the same of whole models), `worker` (the process that measures), `runner` (the process
that watches it), `rows` (what is written down), `grids`, `plots` and `report` (what is shown).
"""
