"""Compilation of our steps for devices that are not here; `python -m benchmarks.compile_for`.

`devices.py` makes the devices, `hlo.py` reads what is compiled, and `hosts.py` has the cases of
models over several hosts.
"""
