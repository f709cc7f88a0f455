"""``pharos models``: what the cache holds, whether it is whole, and how large it is."""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pharos.config import did_you_mean
from pharos.errors import InputError
from pharos.models.cache import cache_root, hub_folder
from pharos.models.check import damaged_since
from pharos.models.describe import WEIGHTS, wanted_files
from pharos.models.fetch import Published, snapshot_folder
from pharos.models.hub import read_listings
from pharos.models.sources import RECORD
from pharos.runtime.artifacts import read_artifact


@dataclass(frozen=True)
class Cached:
    """One model of the cache."""

    key: str
    name: str
    bytes: int
    damaged: list[str]


def add_parser(subparsers: Any) -> None:
    """Add the command to the ``pharos`` command line."""
    parser = subparsers.add_parser(
        "models",
        help="list the models of the cache: whole or damaged, and how large",
        description="List the models of the cache. Exit status: 0, or 1 if one is damaged.",
    )
    parser.add_argument(
        "--verify", action="store_true", help="read every file in full, also those unchanged"
    )
    parser.add_argument(
        "--update", nargs="+", default=[], metavar="MODEL",
        help="forget which commit the branch or tag of these models (or MODEL/ADAPTER) was",
    )  # fmt: skip
    parser.add_argument("--results", type=Path, default=Path("results"), help="default: results")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print one line a model; return 1 if one is damaged."""
    if arguments.update:
        return _update(arguments.results, arguments.update)
    used = _names_by_key(arguments.results)
    models = list(cached_models(arguments.verify))
    print(f"cache: {cache_root()} ({len(models)} models, {_size(sum(m.bytes for m in models))})")
    for model in models:
        state = f"DAMAGED: {', '.join(model.damaged)}" if model.damaged else "whole"
        names = f"  used as {', '.join(used[model.key])}" if model.key in used else ""
        print(f"{_size(model.bytes):>10}  {state:<8}  {model.name}{names}")
    return int(any(model.damaged for model in models))


def cached_models(in_full: bool = False) -> Iterator[Cached]:
    """Every model of the cache; with ``in_full``, files that did not change are read, too."""
    hub = hub_folder()
    for listing in read_listings():
        folder = snapshot_folder(hub, listing.repository, listing.commit)
        names = [name for name in listing.files if (folder / name).exists()]
        if any(name.endswith(WEIGHTS) for name in names):
            names = wanted_files(listing.files)
        files = {name: listing.files[name] for name in names}
        if files:
            name = f"hub {listing.repository} at {listing.commit[:12]}"
            yield _checked(listing.key, name, folder, files, in_full)
    for folder in sorted((cache_root() / "models").glob("[0-9a-f]*")):
        name = f"converted from GGUF {folder.name[:12]}"
        try:
            record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
            files = {file: Published(**facts) for file, facts in record["files"].items()}
        except (OSError, ValueError, KeyError, TypeError):
            yield Cached(folder.name, name, 0, [RECORD])
            continue
        yield _checked(folder.name, name, folder, files, in_full)


def _checked(
    key: str, name: str, folder: Path, files: dict[str, Published], in_full: bool
) -> Cached:
    damaged = damaged_since(folder, files, key, in_full)
    paths = [folder / file for file in files]
    size = sum(path.stat().st_size for path in paths if path.exists())
    return Cached(key, name, size, damaged)


def _names_by_key(results: Path) -> dict[str, list[str]]:
    """What the models of the results are called here, by the cache's key."""
    names: dict[str, list[str]] = {}
    for path in sorted((results / "models").glob("*.json")):
        try:
            key = read_artifact(path, "model")["result"]["key"]
        except (InputError, KeyError):
            continue
        names.setdefault(str(key), []).append(path.stem)
    return names


def _update(results: Path, models: list[str]) -> int:
    pins = results / "pins"
    known = sorted(
        path.relative_to(pins).as_posix().removesuffix(".json") for path in pins.rglob("*.json")
    )
    for name in models:
        if name not in known:
            raise InputError(f"{name}: no pinned model of {results}{did_you_mean(name, known)}")
    for name in models:
        (pins / f"{name}.json").unlink()
        made = f"adapters/{name}/adapter.json" if "/" in name else f"models/{name}.json"
        (results / made).unlink(missing_ok=True)
        print(f"{name}: the next run asks the hub for its commit")
    return 0


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
