"""A package outside dflash_jax that adds a target family and a kind of drafter."""
