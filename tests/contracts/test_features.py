"""Every feature that users see has a test that shows it: `features.toml` names them."""

import functools
import re
import tomllib
from pathlib import Path

from dflash_jax import Recovery

ROOT = Path(__file__).parents[2]
FEATURES: dict[str, dict[str, str]] = tomllib.loads(
    Path(__file__).with_name("features.toml").read_text(encoding="utf-8")
)


@functools.cache
def names_of_tests(path: str) -> frozenset[str]:
    """Return the names of the tests of a file; parsing all files would take a second."""
    text = (ROOT / path).read_text(encoding="utf-8")
    return frozenset(re.findall(r"^def (test_\w+)\(", text, re.MULTILINE))


def test_every_feature_has_a_test_that_exists() -> None:
    missing = []
    for area, tests in FEATURES.items():
        for feature, test in tests.items():
            path, _, name = test.partition("::")
            if not (ROOT / path).is_file() or name not in names_of_tests(path):
                missing.append(f"{area}: {feature}: {test}")
    assert not missing


def test_every_setting_of_recovery_is_a_feature() -> None:
    assert not Recovery.fields().keys() - FEATURES["recovery"].keys()
