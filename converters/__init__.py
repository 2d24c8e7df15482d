"""Read, write and compare weights: safetensors and GGUF files, reports. Never imports jax.

The import name is `dflash_jax.converters`, a symbolic link to this folder. From a checkout,
`python -m converters` runs its command line.
"""

import sys

if __name__ == "converters":  # the folder at the top of a checkout
    if sys.argv[:1] != ["-m"]:  # runpy's, while it locates the module of `python -m converters`
        raise ImportError(
            "converters is a folder of the checkout; import dflash_jax.converters instead"
        )
    sys.modules[__name__] = __import__("dflash_jax.converters").converters
