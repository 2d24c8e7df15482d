"""Audit: random interleavings of everything an engine does, compared with plain decoding.

A case is a seed and a number. From them come a setup (models and a plan, `setups.py`) and a
scenario (requests and what happens to them, `scenario.py`). `models.py` makes the engine,
`runner.py` decodes every greedy request alone and plainly, then runs the scenario, and
`comparison.py` compares. `python -m benchmarks.audit` runs many cases.
"""
