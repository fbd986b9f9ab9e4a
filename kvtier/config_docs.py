"""Documentation of the settings, all of it from Settings itself.

python -m kvtier.config_docs          README's table, between its markers
python -m kvtier.config_docs toml     deploy/kvtier.toml
"""

from __future__ import annotations

import sys
import textwrap
from typing import NamedTuple

from kvtier.config import Settings, env_name, flag_name, toml_value, unit, value_text

_TOML_HEAD = """\
# Every setting of `kvtier serve`, at its default. Sizes: bytes, or text such as "4GiB".
# Written by `python -m kvtier.config_docs toml`.
# How it was checked: a test compares this file with that command's output, and loads it with
# every setting uncommented.
"""


class SettingDoc(NamedTuple):
    """One setting as documentation shows it."""

    name: str
    default: str
    unit: str
    meaning: str


def document() -> list[SettingDoc]:
    """All settings, in the order of their definition."""
    return [
        SettingDoc(name, _default(name), unit(name), field.description or "")
        for name, field in Settings.model_fields.items()
    ]


def _default(name: str) -> str:
    field = Settings.model_fields[name]
    extra = field.json_schema_extra
    if isinstance(extra, dict):
        return str(extra["shown_default"])
    return value_text(name, field.default)


def markdown_table() -> str:
    """README's table of settings."""
    lines = [
        "| name | environment | flag | default | unit | meaning |",
        "|---|---|---|---|---|---|",
    ]
    for doc in document():
        names = f"`{doc.name}` | `{env_name(doc.name)}` | `{flag_name(doc.name)}`"
        default = f"`{doc.default}`" if doc.default else "(empty)"
        lines.append(f"| {names} | {default} | {doc.unit} | {doc.meaning} |")
    return "\n".join(lines) + "\n"


def example_toml() -> str:
    """A TOML file of every setting, commented out, at its default."""
    lines = [_TOML_HEAD]
    for doc in document():
        field = Settings.model_fields[doc.name]
        default = doc.default if field.default_factory else field.default
        lines += textwrap.wrap(doc.meaning, 96, initial_indent="# ", subsequent_indent="# ")
        lines += [f"# {doc.name} = {toml_value(doc.name, default)}", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(example_toml() if sys.argv[1:] == ["toml"] else markdown_table())
