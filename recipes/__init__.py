"""How models that come with this repository were made. Runs from a checkout; not installed."""

from pathlib import Path
from typing import Any

import jinja2


def model_card(name: str, **values: Any) -> str:
    """Return the card of the recipe `name` as Markdown.

    Args:
      values: the variables of its template. The filter `shown` writes a share in two places.
    """
    environment = jinja2.Environment(
        trim_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["shown"] = "{:.2f}".format
    path = Path(__file__).with_name(name) / "card.md.jinja"
    return environment.from_string(path.read_text(encoding="utf-8")).render(values)
