"""Read JSON objects without ignoring any field silently, with the defaults of transformers."""

import contextlib
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dflash_jax.errors import CheckpointError, ConfigError

GGUF_MAGIC = b"GGUF"
LFS_START = b"version https://git-lfs.github.com/spec/"
LONGEST_POINTER = 1024  # bytes of a file of Git LFS that stands for a large one
SHOWN = 8  # files of a folder in a message
# Fields of training, generation defaults and packaging, which do not change what a model computes;
# more of them are told by a word of their name.
HARMLESS = frozenset(
    str.split("""
    add_cross_attention architectures auto_map bad_words_ids begin_suppress_tokens bos_token_id
    chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id diversity_penalty
    do_sample early_stopping encoder_no_repeat_ngram_size eos_token_id
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id
    id2label is_decoder is_encoder_decoder is_llama_config label2id length_penalty max_length
    max_position_embeddings max_sequence_length min_length model_max_length name_or_path
    no_repeat_ngram_size num_beam_groups num_beams num_labels num_return_sequences
    output_attentions output_hidden_states output_scores pad_token_id prefix pretraining_tp
    problem_type pruned_heads remove_invalid_values repetition_penalty return_dict
    return_dict_in_generate sep_token_id suppress_tokens task_specific_params temperature
    tie_encoder_decoder tie_word_embeddings tokenizer_class top_k top_p torch_dtype torchscript
    transformers.js_config typical_p unsloth_fixed use_bfloat16 use_cache
    """)
)
HARMLESS_WORDS = frozenset(
    str.split("""
    checkpointing dropout flash implementation init initializer jitter loss neftune pdrop version
    """)
)
# Fields that change what a model computes, with the values, besides neutral ones, by which they do
# not. Families read those that they apply, so one that is left is not applied.
COMPUTED: dict[str, tuple[Any, ...]] = {
    "normalization_function": ("rmsnorm",),
    "position_embedding_type": ("rope", "rotary"),
    "rope_type": ("default",),
} | dict.fromkeys(
    str.split("""
    activation_sparsity_pattern adapter alibi altup_num_inputs attention_chunk_size
    attention_multiplier attention_out_bias attention_sink_bias attention_sinks
    attention_value_scale attn_gate
    attn_logit_softcapping attn_output_gate attn_temperature_tuning bias clip_qkv
    compression_config conv_L_cache dim_model_base embedding_multiplier final_logit_softcapping
    first_k_dense_replace gru_hidden_dim hidden_size_per_layer_input index_topk
    interleave_moe_layer_step kv_lora_rank laurel_rank llama_4_scaling_beta lm_head_bias
    lm_head_multiplier logit_scale logits_scaling logits_soft_cap markov_rank mlp_bias
    mlp_layer_types mlp_multipliers moe_intermediate_size n_group n_routed_experts
    n_shared_experts no_rope_layer_interval no_rope_layers norm_before_fc num_experts
    num_kv_shared_layers num_local_experts output_gate_type output_multiplier parallel_attn
    q_lora_rank qk_layer_norms qk_layernorm qk_norm qkv_bias quantization quantization_config
    query_pre_attn_scalar residual_multiplier rope_interleave rope_interleaved
    rope_local_base_freq rope_ratio rotary_dim rotary_pct rotation routed_scaling_factor
    scale_depth scale_emb shared_expert_intermediate_size sliding_window_pattern sparsity_config
    swiglu_alpha swiglu_limit topk_group transform_config use_alibi use_bias
    use_bidirectional_attention use_double_wide_mlp use_dynamic_ntk use_logn_attn
    use_parallel_residual use_qk_norm use_qkv_bias v_head_dim
    """),
    (),
)


def whole(value: Any) -> Any:
    """Return an integer if it was written as 8.0; any other value unchanged."""
    exact = isinstance(value, float) and value.is_integer() and abs(value) < 2**53
    return int(value) if exact else value


def neutral(value: Any) -> bool:
    """Return whether a value switches its field off: none, false, nothing, or a factor of 1."""
    if isinstance(value, dict):
        return all(neutral(inner) for inner in value.values())
    return value is None or value is False or (value is not True and value in (0, 1, "", []))


def harmless(name: str) -> bool:
    """Return whether a field is known not to change what a model computes."""
    words = name.split("_")
    return name in HARMLESS or name.startswith("_") or not HARMLESS_WORDS.isdisjoint(words)


class Fields:
    """Reader of a JSON object that records which fields were read, to judge the others.

    Args:
      defaults: by `model_type`, the integers that transformers takes for absent fields.
      optional_window: whether `sliding_window` counts only with `use_sliding_window`.
    """

    def __init__(
        self,
        values: dict[str, Any],
        where: str,
        *,
        defaults: Mapping[str, Mapping[str, int]] = MappingProxyType({}),
        optional_window: bool = False,
    ):
        self.values = values
        self.where = where
        self.defaults = defaults
        self.optional_window = optional_window
        self.used: set[str] = set()

    def over(self, values: dict[str, Any], where: str = "") -> "Fields":
        """Return a reader of other values, whose absent fields have the same defaults.

        Args:
          where: name of what has these values, for errors; by default that of this reader.
        """
        return Fields(
            values,
            where or self.where,
            defaults=self.defaults,
            optional_window=self.optional_window,
        )

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field, or the default if it is absent or null."""
        self.used.add(name)
        value = self.values.get(name)
        return default if value is None else value

    def integer(self, name: str, default: int | None = None) -> int:
        """Return an integer.

        Raises:
          ConfigError: the field is absent without a default, or no 32-bit integer.
        """
        value = whole(self.get(name, default))
        if value is None:
            raise ConfigError(f"{self.where} lacks {name!r}; add it as an integer")
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= 2**31:
            raise ConfigError(f"{self.where}: {name} is {value!r}; expected a 32-bit integer")
        return value

    def number(self, name: str, default: float) -> float:
        """Return a finite number.

        Raises:
          ConfigError: the field is none.
        """
        value = self.get(name, default)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not abs(value) < 1e300:
            raise ConfigError(f"{self.where}: {name} is {value!r}; expected a finite number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """Return true or false.

        Raises:
          ConfigError: the field is neither.
        """
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{self.where}: {name} is {value!r}; expected true or false")
        return value

    def must_be(self, name: str, *allowed: Any) -> None:
        """Check that a field has an allowed value; the first is that of an absent field.

        Raises:
          ConfigError: it has another value.
        """
        value = self.get(name, allowed[0])
        if value not in allowed:
            names = ", ".join(map(repr, allowed))
            raise ConfigError(f"{self.where}: {name} is {value!r}; only {names} is supported")

    def inner(self, name: str) -> "Fields":
        """Return a reader of an inner object, which is empty if absent.

        Raises:
          ConfigError: the field is no object.
        """
        value = self.get(name, {})
        if not isinstance(value, dict):
            raise ConfigError(f"{self.where}: {name} is {value!r}; expected an object")
        return self.over(value, f"{self.where}: {name}")

    def check_rest(self) -> None:
        """Judge the fields that were not read; those that nobody knows are ignored with a warning.

        Raises:
          ConfigError: one is known to change what the model computes.
        """
        unread = {k: v for k, v in self.values.items() if k not in self.used and not neutral(v)}
        if changing := [k for k, v in unread.items() if k in COMPUTED and v not in COMPUTED[k]]:
            listed = ", ".join(f"{name} {unread[name]!r}" for name in sorted(changing))
            raise ConfigError(
                f"{self.where} asks for what this version does not apply to such a model: {listed}."
                " It would change the output; use a model without it"
            )
        if unknown := sorted(k for k in unread if k not in COMPUTED and not harmless(k)):
            warnings.warn(
                f"{self.where} has fields that this version does not know and ignores:"
                f" {', '.join(unknown)}; make sure that none changes what the model computes",
                stacklevel=2,
            )

    def refuse_rest(self) -> None:
        """Check that all fields that are not neutral were read, where each one computes something.

        Raises:
          ConfigError: a field was not read.
        """
        rest = {k for k, v in self.values.items() if not neutral(v)}
        if unread := sorted(rest - self.used):
            raise ConfigError(
                f"{self.where} has fields this version does not understand: {', '.join(unread)}."
                " They could change the output, so they are not ignored"
            )


MLX = "mlx"  # our name for a method that its files do not name


def take_quantization(fields: dict[str, Any]) -> Any:
    """Take the quantisation settings, which are read with the weights, out of a config.

    MLX has them as `quantization`, and repeats them under the usual name, without a method.
    """
    text = fields.get("text_config")  # where some multimodal files have them
    places = [fields, *([text] if isinstance(text, dict) else [])]
    keys = ("quantization_config", "compression_config")
    candidates = [place.pop(key, None) for place in places for key in (*keys, "quantization")]
    settings = next((value for value in candidates if value is not None), None)
    if isinstance(settings, dict) and "quant_method" not in settings and "group_size" in settings:
        return settings | {"quant_method": MLX}
    return settings


def is_gguf(path: Path) -> bool:
    """Return whether a path is a GGUF file, by its first bytes or by its name.

    Ollama and download caches name files by a digest.
    """
    if path.suffix.lower() == ".gguf":
        return not path.is_dir()
    if not path.is_file():  # opening a pipe would wait for a writer
        return False
    try:
        with path.open("rb") as file:
            return file.read(len(GGUF_MAGIC)) == GGUF_MAGIC
    except OSError:
        return False


def gguf_advice(folder: Path) -> str:
    """Return what to do with a folder of GGUF files; "" if it has none."""
    files = sorted(p.name for p in folder.iterdir() if is_gguf(p)) if folder.is_dir() else []
    more = f" and {len(files) - SHOWN} more" if len(files) > SHOWN else ""
    listed = ", ".join(files[:SHOWN])
    return f"holds GGUF files; give one of them: {listed}{more}" if files else ""


def check_content(path: Path, start: bytes) -> None:
    """Check by its first bytes that a file is not what Git LFS puts in place of a large one.

    Raises:
      CheckpointError: it is.
    """
    if start.startswith(LFS_START):
        raise CheckpointError(
            f"{path} is a pointer of Git LFS, not the file itself; run `git lfs pull` in the"
            " repository, or fetch the file"
        )


def has_file(path: Path) -> bool:
    """Return whether the path is a file, or a link to one.

    Raises:
      CheckpointError: it is something else, such as a folder, a pipe, a broken link or a pointer
        of Git LFS.
    """
    if path.is_file():
        with contextlib.suppress(OSError):  # whoever reads it gets the error
            if path.stat().st_size < LONGEST_POINTER:
                check_content(path, path.read_bytes())
        return True
    if not os.path.lexists(path):
        return False
    if path.is_dir():
        kind = "a folder"
    else:
        kind = "a link to no file" if path.is_symlink() else "neither a file nor a folder"
    raise CheckpointError(
        f"{path} is {kind}; expected a file; fetch the model's files again, or remove it"
    )


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
      CheckpointError: the file does not exist.
      ConfigError: it holds no JSON object.
    """
    if not has_file(path):
        if advice := gguf_advice(path.parent):
            raise CheckpointError(f"{path.parent} {advice}")
        raise CheckpointError(f"{path} does not exist; give a folder that holds {path.name}")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON ({error}); fetch the file again") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a {type(value).__name__}; expected a JSON object")
    return value


def integer(f: Fields, name: str, null: int | None = None) -> int:
    """Read an integer, or what its absence means to the file's `model_type`.

    Args:
      null: what null means, and absence where the family has no default; None refuses both.
    Raises:
      ConfigError: the field is no 32-bit integer, or is absent without a default.
    """
    defaults = f.defaults.get(str(f.values.get("model_type")), {})
    return f.integer(name, null if name in f.values else defaults.get(name, null))
