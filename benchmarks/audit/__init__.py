"""Audit: random interleavings of everything an engine does, compared with plain decoding.

A seed and a case number determine a setup (models and a plan, `setups.py`) and a scenario (requests
and events, `scenario.py`). `models.py` builds the engine, `runner.py` decodes every greedy request
alone without drafting and then runs the scenario, and `comparison.py` compares the answers.
`python -m benchmarks.audit` runs many cases.

Fixed scenarios are grids of plans and drafters (`lossless.py`), and load on an engine (`load.py`)
and on a server (`server.py`).
"""
