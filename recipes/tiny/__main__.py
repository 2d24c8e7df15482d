"""`python -m recipes.tiny --out DIR`: makes the shipped pair."""

import sys

from recipes.tiny.make import main

sys.exit(main())
