"""`python -m converters`: the verbs about weight files, without the engine."""

import sys

from dflash_jax.converters.cli import main

sys.exit(main())
