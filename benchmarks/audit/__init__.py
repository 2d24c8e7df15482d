"""Audit: random interleavings of everything an engine does, compared with plain decoding.

A seed and a case number determine a setup (models and a plan, `models.py`) and a scenario (requests
and events, `scenario.py`). `runner.py` decodes every request alone without drafting, then runs the
scenario, and compares the answers.
`python -m benchmarks.audit` runs many cases.

Fixed scenarios are grids of plans and drafters and load on an engine (`fixed.py`), and load on a
server (`server.py`).
"""
