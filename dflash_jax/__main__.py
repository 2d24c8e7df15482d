"""`python -m dflash_jax`."""

if __name__ == "__main__":
    try:
        from dflash_jax.cli import main
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    raise SystemExit(main())
