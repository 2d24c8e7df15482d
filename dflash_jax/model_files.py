"""Files beside a model's weights, of its tokenizer and templates."""

from collections.abc import Iterable
from pathlib import Path

from dflash_jax.config.fields import has_file
from dflash_jax.errors import CheckpointError

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",  # templates of multimodal processors
)
MORE_TEMPLATES = "additional_chat_templates"  # a folder of named templates


def files_in(directory: Path, names: Iterable[str] = FILES) -> dict[str, str | Path]:
    """Return the paths of files beside a model's weights by name, and those of its templates.

    Whoever reads or copies such files gets them here.

    Args:
      directory: folder of the model.
      names: names of the files; those that are missing are left out.

    Raises:
      CheckpointError: one of them is no file, or a link to another file outside of the model.
    """
    more = directory.glob(f"{MORE_TEMPLATES}/*.jinja")
    paths = [*filter(has_file, (*(directory / name for name in names), *more))]
    for path in paths:
        _check_link(path, directory.resolve())
    return {path.relative_to(directory).as_posix(): path for path in paths}


def _check_link(path: Path, directory: Path) -> None:
    """Refuse a link to another file elsewhere: servers show templates, and conversions copy all.

    Links to templates, to files of the same name and those of Hugging Face's cache are followed.
    """
    file = path.resolve()
    cached = file.parent.name == "blobs" and file.parent.parent in directory.parents
    alike = file.suffix == path.suffix if path.suffix == ".jinja" else file.name == path.name
    if not (cached or alike or file.is_relative_to(directory)):
        expected = ".jinja file" if path.suffix == ".jinja" else path.name
        raise CheckpointError(
            f"{path} is a link to {file}, which is no {expected}; put a copy of the model's file in"
            " its place"
        )
