"""Names of dtypes and layouts that the commands accept. Imports nothing."""

AUTO = "auto"  # the dtype of the published weights
SAFETENSORS, ORBAX = "safetensors", "orbax"  # what `convert` writes
FLAX = ("maxtext", "maxtext_scanned", "tunix")  # checkpoints of other Flax libraries
HUGGING_FACE, SPECULATORS, GGUF = "huggingface", "speculators", "gguf"  # what `export` writes
FORMS = (SAFETENSORS, ORBAX, GGUF, *FLAX)
LAYOUTS = (HUGGING_FACE, SPECULATORS, GGUF)
# Types of the matrices in a GGUF file, and the value of general.file_type for each.
FILE_TYPES = {"f32": 0, "f16": 1, "bf16": 32, "q8_0": 7, "q4_0": 2, "q4_1": 3}
GGUF_TYPES = tuple(FILE_TYPES)
