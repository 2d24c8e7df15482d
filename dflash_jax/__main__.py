"""`python -m dflash_jax`."""

from dflash_jax.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
