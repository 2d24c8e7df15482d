"""Names of dtypes and layouts that the commands accept. Imports nothing."""

AUTO = "auto"  # the dtype of the published weights
SAFETENSORS, ORBAX = "safetensors", "orbax"  # what `convert` writes
FORMS = (SAFETENSORS, ORBAX)
HUGGING_FACE, SPECULATORS, GGUF = "huggingface", "speculators", "gguf"  # what `export` writes
LAYOUTS = (HUGGING_FACE, SPECULATORS, GGUF)
