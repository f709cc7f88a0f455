"""The artifacts a report is made from, and what their paths say of them."""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pharos.errors import InputError
from pharos.runtime.artifacts import digest_of, read_artifact, sha256_file

CELL = r"(?P<model>[^/]+)/(?P<task>[^/]+)/seed(?P<seed>\d+)/(?P<variant>[^/]+)"
# How each kind's path ends: what the workflow calls its files.
PATTERNS = {
    "shortcut-gate": r"(?P<task>[^/]+)/seed(?P<seed>\d+)\.json",
    "model": r"(?P<model>[^/]+)\.json",
    "evaluation": rf"{CELL}\.json",
    "training": rf"{CELL}/[^/]+\.json",
    "promotion-gate": rf"{CELL}\.json",
}


@dataclass(frozen=True)
class Source:
    """One artifact: where it is, which cell of the workflow it belongs to, and its contents."""

    path: str
    href: str
    sha256: str
    kind: str
    artifact: Mapping[str, Any]
    task: str = ""
    seed: int = 0
    model: str = ""
    variant: str = ""

    @property
    def result(self) -> Mapping[str, Any]:
        """The artifact's result."""
        result: Mapping[str, Any] = self.artifact["result"]
        return result

    @property
    def fingerprint(self) -> str:
        """The platform's fingerprint."""
        return str(self.artifact.get("platform", {}).get("fingerprint", "unknown"))

    @property
    def anchor(self) -> str:
        """A name for a place on the page that is about this artifact."""
        return f"of-{digest_of(self.href)[:12]}"

    @property
    def cell(self) -> tuple[str, int, str, bool, str]:
        """Sorts by task, seed and model; the base before its adapters."""
        return self.task, self.seed, self.model, self.variant != "base", self.variant


def load_sources(paths: Iterable[Path | str], kind: str, out_dir: Path) -> list[Source]:
    """Read the artifacts of one kind, in the order of :attr:`Source.cell`.

    Raises
    ------
    InputError
        If one cannot be read, is of another kind, or its path does not say what it belongs to.
    """
    sources = []
    for path in map(str, paths):
        match = re.search(f"(?:^|/){PATTERNS[kind]}$", Path(path).as_posix())
        if match is None:
            raise InputError(f"{path}: the path does not say what this {kind} belongs to")
        names: dict[str, Any] = match.groupdict()
        if "seed" in names:
            names["seed"] = int(names["seed"])
        artifact = read_artifact(path, kind)
        relative = Path(os.path.relpath(path, out_dir)).as_posix()
        # Never one of this machine's absolute paths.
        shown = relative if Path(path).is_absolute() else Path(path).as_posix()
        sources.append(Source(shown, quote(relative), sha256_file(path), kind, artifact, **names))
    return sorted(sources, key=lambda source: source.cell)
