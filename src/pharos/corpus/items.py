"""Items: what one prompt asks about, and which of them train and test."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pharos.errors import InputError


@dataclass(frozen=True)
class Item:
    """What one prompt asks about: all lines of a cluster, or one line."""

    id: str
    cluster: str
    group: str
    label: bool
    text: str


def items_of(lines: Sequence[Mapping[str, Any]], unit: str) -> list[Item]:
    """The items of corpus lines, in the order of their first lines.

    ``unit`` is ``"cluster"`` (the texts of a cluster's lines joined by newlines, in file order;
    its ``id`` is the cluster) or ``"line"``.
    """
    if unit == "line":
        return [_item(line["id"], [line]) for line in lines]
    by_cluster: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        by_cluster.setdefault(line["cluster"], []).append(line)
    return [_item(cluster, members) for cluster, members in by_cluster.items()]


def _item(name: str, lines: Sequence[Mapping[str, Any]]) -> Item:
    first = lines[0]
    text = "\n".join(line["text"] for line in lines)
    return Item(name, first["cluster"], first["group"], first["label"], text)


def train_items(lines: Sequence[Mapping[str, Any]], unit: str, events: int) -> list[Item]:
    """The items of the first ``events`` clusters of a corpus."""
    return _of_clusters(lines, unit, _clusters(lines, events)[:events])


def held_out_items(lines: Sequence[Mapping[str, Any]], unit: str, events: int) -> list[Item]:
    """The items of the last ``events`` clusters of a corpus."""
    return _of_clusters(lines, unit, _clusters(lines, events)[-events:])


def _clusters(lines: Sequence[Mapping[str, Any]], events: int) -> list[str]:
    clusters = list(dict.fromkeys(line["cluster"] for line in lines))
    if not 1 <= events <= len(clusters):
        raise InputError(f"{events} events are asked for, the corpus has {len(clusters)}")
    return clusters


def _of_clusters(
    lines: Sequence[Mapping[str, Any]], unit: str, clusters: Sequence[str]
) -> list[Item]:
    chosen = set(clusters)
    return items_of([line for line in lines if line["cluster"] in chosen], unit)
