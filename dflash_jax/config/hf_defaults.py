"""Fields of a config.json whose absence transformers fills in, by `model_type`."""

from dflash_jax.config.family import Family, model_types, target_families
from dflash_jax.config.fields import Fields


def family_entry(f: Fields) -> Family | None:
    """Return the family of a file's `model_type`, or None if no family has it."""
    name = model_types().get(str(f.values.get("model_type")))
    return None if name is None else target_families()[name]


def integer(f: Fields, name: str, null: int | None = None) -> int:
    """Read an integer, or what its absence means to the file's `model_type`.

    Args:
      null: what null means, and absence where the family has no default; None refuses both.
    Raises:
      ConfigError: the field is no 32-bit integer, or is absent without a default.
    """
    family = family_entry(f)
    defaults = family.defaults.get(str(f.values.get("model_type")), {}) if family else {}
    return f.integer(name, null if name in f.values else defaults.get(name, null))
