"""Audit: random interleavings of everything an engine does, compared with plain decoding.

A seed and a case number determine a setup (models and a plan, `models.py`) and a scenario (requests
and events, `scenario.py`). `runner.py` decodes every request alone without drafting, then runs the
scenario, and compares the answers.
`python -m benchmarks.audit` runs many cases.

`presets.py` has fixed grids of them, and load on an engine; `serve.py` has load on a server, and
`attacks.py` a table of attacks on one.
"""
