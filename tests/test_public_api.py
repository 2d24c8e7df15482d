"""The public names of the package: documented, annotated, and nothing else in `dir`."""

import inspect
import pydoc
from pathlib import Path

import pytest

import dflash_jax as dj
from dflash_jax.errors import ConfigError
from dflash_jax.testing import tiny_drafter, tiny_target

PUBLIC = [name for name in dj.__all__ if name != "__version__"]


def test_dir_shows_public_names_alone() -> None:
    assert dir(dj) == sorted(dj.__all__)
    assert (Path(dj.__file__).parent / "py.typed").is_file()


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_documented_and_annotated(name: str) -> None:
    given = getattr(dj, name)
    assert (inspect.getdoc(given) or "").strip()
    members = [(name, given)]
    if inspect.isclass(given):
        members = [(n, f) for n, f in vars(given).items() if inspect.isroutine(f)]
        members += [(n, p.fget) for n, p in vars(given).items() if isinstance(p, property)]
    for member, function in members:
        function = getattr(function, "__func__", function)
        public = not member.startswith("_") or member == "__init__"
        if not (public and inspect.isfunction(function)):
            continue
        if function.__code__.co_filename.startswith("<"):  # made by dataclasses
            continue
        signature = inspect.signature(function)
        bare = [
            p.name
            for p in list(signature.parameters.values())[inspect.isclass(given) :]
            if p.annotation is p.empty
        ]
        assert not bare, f"{name}.{member}"
        if member != "__init__":
            assert signature.return_annotation is not signature.empty, f"{name}.{member}"
            assert (function.__doc__ or "").strip(), f"{name}.{member}"


def test_help_renders_with_names_of_arguments() -> None:
    text = pydoc.render_doc(dj.load, renderer=pydoc.plaintext)
    assert "Args:\n      target: " in text
    for given in (dj, dj.Engine, dj.Plan, dj.SamplingParams, dj.random_engine):
        assert pydoc.render_doc(given, renderer=pydoc.plaintext)


def test_an_engine_with_random_weights_is_made_of_a_configuration(tmp_path: Path) -> None:
    target = tiny_target(num_layers=2)
    one = {"num_layers": 1, "windows": (None,), "causal": (False,)}
    drafter = tiny_drafter(target, target_layer_ids=(0,), **one)
    plan = dj.Plan(max_length=32, chunk=16, block=4)
    first, again, other = (
        dj.random_engine(target, drafter, plan=plan, seed=seed) for seed in (3, 3, 4)
    )
    assert (first.graph.config, first.plan.block) == (target, 4)
    sums = [float(abs(engine.params["drafter"]["norm"]).sum()) for engine in (first, again, other)]
    assert sums[0] == sums[1] != sums[2]


def test_the_configuration_may_be_a_folder(oracle: Path) -> None:
    folder = oracle / "targets" / "llama3"
    for given in (folder, str(folder / "config.json")):
        engine = dj.random_engine(given, plan=dj.Plan(max_length=32))
        assert engine.graph.config.model_type == "llama"
        assert engine.graph.drafter_config is None


def test_what_is_no_configuration_is_refused(oracle: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected a dj\.TargetConfig"):
        dj.random_engine(7)  # pyrefly: ignore
    with pytest.raises(dj.DFlashError, match=r"config\.json"):
        dj.random_engine(tmp_path)
    other = tiny_drafter(tiny_target(hidden_size=64), target_layer_ids=(0,))
    with pytest.raises(ConfigError, match="hidden size 64"):
        dj.random_engine(tiny_target(), other)
