"""Names of dtypes and layouts that the commands accept. Imports nothing."""

AUTO = "auto"  # the dtype of the published weights
# Forms that `convert` writes.
SAFETENSORS = "safetensors"
ORBAX = "orbax"
FLAX = ("maxtext", "maxtext_scanned", "tunix")  # checkpoints of other Flax libraries
MLX = "mlx"  # a folder with weights as MLX quantises them
GPTQ = "gptq"  # a folder with weights in GPTQ's format
# Forms that `export` writes.
HUGGING_FACE = "huggingface"
SPECULATORS = "speculators"
GGUF = "gguf"
FORMS = (SAFETENSORS, ORBAX, GGUF, MLX, GPTQ, *FLAX)
LAYOUTS = (HUGGING_FACE, SPECULATORS, GGUF)
# Types of a GGUF file, and the value of general.file_type for each. Those that end in a size are
# mixtures; MXFP4 has llama.cpp's number of experts in that type.
FILE_TYPES = {
    "f32": 0, "f16": 1, "bf16": 32, "q8_0": 7, "q6_k": 18, "q5_k_m": 17, "q5_k_s": 16, "q5_1": 9,
    "q5_0": 8, "q4_k_m": 15, "q4_k_s": 14, "q4_1": 3, "q4_0": 2, "iq4_nl": 25, "iq4_xs": 30,
    "mxfp4": 38, "q3_k_l": 13, "q3_k_m": 12, "q3_k_s": 11, "q2_k": 10,
}  # fmt: skip
GGUF_TYPES = tuple(FILE_TYPES)
DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
# Types of one tensor of a GGUF file.
TENSOR_TYPES = (
    "f32", "f16", "bf16", "q8_0", "q6_k", "q5_k", "q5_1", "q5_0", "q4_k", "q4_1", "q4_0", "iq4_nl",
    "iq4_xs", "mxfp4", "q3_k", "q2_k",
)  # fmt: skip
