"""The manual of the configuration, made from its schema: ``python -m pharos.config_manual``."""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from pharos.config import resolve

INTRODUCTION = """\
# Configuration

`config.yaml` is the embedded default; `cluster.yaml` is the sweep that needs a cluster. Name
another file with `--configfile`: it is read instead of the default, not on top of it. Every file
is checked against `workflow/schemas/config.schema.yaml` before anything runs, and an unknown key
is an error that names the nearest known one.

Site settings (partitions, accounts, memory) are not here but in `profiles/`.

This page is made from the schema by `make format`; a test holds the two together.

| key | meaning | values | default |
|---|---|---|---|
"""


def config_manual(schema: Mapping[str, Any]) -> str:
    """The manual as Markdown: one row a key, in the schema's order."""
    rows = [
        _row(f"`{key}`", _one_line(part.get("description", "")), _values(part), _default(part))
        for key, part in _keys(schema, schema, "")
    ]
    return INTRODUCTION + "\n".join(rows) + "\n"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _keys(
    schema: Mapping[str, Any], root: Mapping[str, Any], prefix: str
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name, part in schema.get("properties", {}).items():
        part = resolve(part, root)
        key = f"{prefix}{name}"
        yield key, part
        yield from _keys(part, root, f"{key}.")
        entry = part.get("additionalProperties")
        if isinstance(entry, dict):
            entry = resolve(entry, root)
            yield f"{key}.<name>", entry
            yield from _keys(entry, root, f"{key}.<name>.")


def _values(part: Mapping[str, Any]) -> str:
    if "enum" in part:
        return ", ".join(f"`{value}`" for value in part["enum"])
    if part.get("type") == "array":
        inner = _values(part.get("items", {}))
        return f"list of {inner}" if inner else "list"
    if part.get("type") == "object":
        return ""
    kind = part.get("type", "")
    text = " or ".join(kind) if isinstance(kind, list) else kind
    bounds = [
        f"{sign} {part[key]:g}"
        for key, sign in (
            ("minimum", "≥"),
            ("exclusiveMinimum", ">"),
            ("maximum", "≤"),
            ("exclusiveMaximum", "<"),
        )
        if key in part
    ]
    return " ".join([text, ", ".join(bounds)]).strip()


def _default(part: Mapping[str, Any]) -> str:
    if "default" not in part or part.get("type") == "object":
        return ""
    return f"`{json.dumps(part['default'], ensure_ascii=False)}`"


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(config_manual(yaml.safe_load(Path(sys.argv[1]).read_text(encoding="utf-8"))))
