"""Measures decoding with and without drafts, in process or over HTTP: `dflash-jax bench`."""
