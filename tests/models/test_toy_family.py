"""A family and a drafter kind are added by adding files, without editing any table."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOY = Path(__file__).with_name("toy")
PLACES = {"config": "config", "families": "converters/families", "models": "models"}


def test_a_toy_family_is_loaded_decoded_converted_and_sharded(tmp_path: Path) -> None:
    package = tmp_path / "site" / "dflash_jax"
    skip = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "dflash_jax", package, ignore=skip, copy_function=os.symlink)
    for file in TOY.rglob("*.py"):
        place = package / PLACES[file.parent.name] / file.name
        assert not place.exists()
        shutil.copy(file, place)
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    places = os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")])
    (tmp_path / "work").mkdir()
    run = subprocess.run(
        [sys.executable, str(TOY.with_name("toy_case.py")), str(tmp_path / "work")],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": places},
        capture_output=True,
        text=True,
        timeout=300,
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
    assert (found["one"]["share"], found["two"]["share"]) == (1, 0.5)
    assert "model_type 'unheard' is not a target this version runs" in found["error"]
    assert "qwen3_moe, toy" in found["error"]
    assert "toy" in found["exported"]
