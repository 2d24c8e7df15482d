"""`python -m converters`: the commands about weight files, without the engine."""

import sys

from dflash_jax.converters.cli import main

sys.exit(main())
