"""An installed package adds a target family and a kind of drafter, without a line of ours."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import dflash_jax as dj
from dflash_jax import families

PACKAGE = Path(__file__).with_name("toy_models")
ENTRY_POINTS = """
[dflash_jax.targets]
toy = toy_models.toy

[dflash_jax.drafters]
toy_drafter = toy_models.toy_drafter
"""


def install(site: Path) -> None:
    """Put the package into a folder as an installer does."""
    shutil.copytree(PACKAGE, site / "toy_models", ignore=shutil.ignore_patterns("__pycache__"))
    about = site / "toy_models-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-models\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(ENTRY_POINTS)


@pytest.mark.exhaustive
def test_a_package_adds_a_family_and_a_kind_that_load_generate_convert_and_train(
    tmp_path: Path,
) -> None:
    install(tmp_path / "site")
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    places = os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")])
    (tmp_path / "work").mkdir()
    case = PACKAGE.with_name("outside_case.py")
    run = subprocess.run(
        [sys.executable, str(case), str(tmp_path / "work")],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": places},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout.splitlines()[-1])
    forms = ["huggingface", "gguf"]
    ways = [f"{form}{way}" for form in forms for way in ("", "-converted", "-orbax")]
    ways[3] = "gguf.gguf"
    assert found["forms"]["target"] == ways
    ways += ["speculators", "speculators-converted", "speculators-orbax"]
    assert found["forms"]["drafter"] == ways
    for way in ("one", "gguf", "two"):
        assert found[way]["drafted"] == found[way]["plain"] == found["one"]["plain"], way
        assert len(found[way]["plain"]) == 12
        assert found[way]["rounds"] > 0
    assert (found["one"]["kind"], found["int8"]["kind"]) == ("", "int8")  # as declared
    assert found["int8"]["drafted"] == found["int8"]["plain"]
    assert (found["one"]["share"], found["two"]["share"]) == (1, 0.5)
    assert "model_type 'unheard' is not a target this version runs" in found["error"]
    assert "smollm3, toy" in found["error"]
    assert "toy" in found["exported"]
    assert found["trained"]["kind"] == "toy_drafter"
    assert found["trained"]["equal"]
    assert found["served"]["drafter"] == "toy_drafter"


def test_a_registered_family_is_known_until_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(PACKAGE.parent)
    try:
        dj.register("toy", "toy_models.toy")
        toy = families.family("toy")
        assert families.gguf_architectures()["toy-lm"] == "toy"
        with pytest.raises(dj.ConfigError, match="there is a family or kind 'toy' already"):
            dj.register("toy", toy)
        with pytest.raises(dj.ConfigError, match="'toy' and 'again' both claim"):
            dj.register("again", toy)
        with pytest.raises(dj.ConfigError, match="which another package provides for 'absent'"):
            dj.register("absent", "no_such_package")
        with pytest.raises(dj.ConfigError, match="has neither FAMILY nor DRAFTER"):
            dj.register("empty", "json")
        with pytest.raises(dj.ConfigError, match="'number' is 5; expected a Family"):
            dj.register("number", 5)  # type: ignore[arg-type]
        assert families.family_of("toy") == "toy"
        assert not {"again", "absent", "empty", "number"} & {*families.target_families()}
    finally:
        families._unregister("toy")
    with pytest.raises(dj.ConfigError, match="model_type 'toy' is not a target"):
        families.family_of("toy")


def test_the_table_of_families_says_what_their_files_declare() -> None:
    for name, claim in families.BUILT_IN.items():
        family = families.target_families()[name]
        architectures = family.gguf.architectures if family.gguf is not None else ()
        assert claim == (family.model_types, architectures), name
    for name, claim in families.BUILT_IN_KINDS.items():
        kind = families.drafter_kinds()[name]
        assert claim == (kind.architectures, kind.projector_types), name
        assert kind.config.kind == name
