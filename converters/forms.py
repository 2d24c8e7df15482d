"""Names of dtypes and layouts that the commands accept. Imports nothing."""

AUTO = "auto"  # the dtype of the published weights
SAFETENSORS, ORBAX = "safetensors", "orbax"  # what `convert` writes
HUGGING_FACE, SPECULATORS, GGUF = "huggingface", "speculators", "gguf"  # what `export` writes
FORMS = (SAFETENSORS, ORBAX, GGUF)
LAYOUTS = (HUGGING_FACE, SPECULATORS, GGUF)
GGUF_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1")  # of the matrices in a GGUF file
