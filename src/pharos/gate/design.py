"""Who is held out with whom, and which labels may be exchanged."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pharos.errors import InputError
from pharos.gate.null import shuffled

MOST_CLASSES = 20
MOST_REDRAWS = 1000

Integers = npt.NDArray[np.int64]
Labels = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Design:
    """A corpus without its texts: n lines in k clusters.

    ``groups`` and ``clusters`` number each line's; ``labels`` numbers each cluster's class.
    Labels may be exchanged among clusters of the same ``strata`` number: among those within one
    group, and among those that span groups, of which there are ``spanning``.
    """

    ids: tuple[str, ...]
    group_names: tuple[str, ...]
    class_names: tuple[bool | str, ...]
    groups: Integers
    clusters: Integers
    labels: Integers
    strata: Integers
    spanning: int

    @property
    def judged(self) -> tuple[int, ...]:
        """The classes told from the rest: of two, the second (true, of true and false)."""
        return (1,) if len(self.class_names) == 2 else tuple(range(len(self.class_names)))

    def of_lines(self, labels: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """What clusters have, for each line."""
        return np.asarray(labels[self.clusters])

    def usable(self, labels: Integers, kind: int) -> tuple[int, ...]:
        """Groups that hold a class and others, and whose removal leaves both.

        ``labels`` are the clusters'.
        """
        of_class = self.of_lines(labels) == kind
        inside = np.bincount(self.groups, minlength=len(self.group_names))
        positive = np.bincount(self.groups[of_class], minlength=len(self.group_names))
        negative = inside - positive
        good = (positive > 0) & (negative > 0)
        good &= (positive < positive.sum()) & (negative < negative.sum())
        return tuple(int(group) for group in np.flatnonzero(good))


def read_design(lines: Sequence[Mapping[str, Any]]) -> Design:
    """Read who belongs to what from corpus lines; labels may be booleans or text.

    Raises
    ------
    InputError
        If there is one group or one class only, or more than 20 classes.
    """
    group_names = tuple(sorted({line["group"] for line in lines}))
    class_names = tuple(sorted({line["label"] for line in lines}, key=shown))
    if len(group_names) < 2:
        raise InputError(
            f"shortcut gate: one group only ({group_names[0]!r}); at least two are needed, "
            "one to hold out"
        )
    if len(class_names) < 2:
        raise InputError(
            f"shortcut gate: one class only, every label is {shown(class_names[0])}; "
            "at least two are needed"
        )
    if len(class_names) > MOST_CLASSES:
        some = ", ".join(shown(name) for name in class_names[:4])
        raise InputError(
            f"shortcut gate: {len(class_names)} different labels ({some}, ...) are no classes; "
            f"there may be {MOST_CLASSES}"
        )
    group_index = {name: k for k, name in enumerate(group_names)}
    class_index = {name: k for k, name in enumerate(class_names)}
    first: dict[str, Mapping[str, Any]] = {}
    members: dict[str, set[int]] = {}
    for line in lines:
        first.setdefault(line["cluster"], line)
        members.setdefault(line["cluster"], set()).add(group_index[line["group"]])
    cluster_index = {name: k for k, name in enumerate(first)}
    spans = len(group_names)
    strata = [min(groups) if len(groups) == 1 else spans for groups in members.values()]
    return Design(
        ids=tuple(line["id"] for line in lines),
        group_names=group_names,
        class_names=class_names,
        groups=np.array([group_index[line["group"]] for line in lines]),
        clusters=np.array([cluster_index[line["cluster"]] for line in lines]),
        labels=np.array([class_index[line["label"]] for line in first.values()]),
        strata=np.array(strata),
        spanning=strata.count(spans),
    )


def shown(label: bool | str) -> str:
    """A class's name: true, false, or its text."""
    return str(label).lower() if isinstance(label, bool) else label


def usable_folds(design: Design) -> dict[int, tuple[int, ...]]:
    """The groups that can be held out, for each judged class that has any.

    Raises
    ------
    InputError
        If no class has any.
    """
    folds = {kind: design.usable(design.labels, kind) for kind in design.judged}
    folds = {kind: groups for kind, groups in folds.items() if groups}
    if not folds:
        raise InputError(
            "shortcut gate: no group can be held out: each needs lines of both classes, "
            "inside and outside of it"
        )
    return folds


def shuffles(
    design: Design, folds: Mapping[int, Sequence[int]], seed: int, count: int
) -> npt.NDArray[np.int8]:
    """Labels of the clusters, shuffled ``count`` times, (k, count).

    Where clusters span groups, a shuffle may leave a fold without a class; it is drawn again,
    so that every shuffle can be judged as the real labels are.
    """
    result = np.empty((len(design.labels), count), dtype=np.int8)
    for number in range(count):
        for redraw in range(MOST_REDRAWS):
            labels = shuffled(design.labels, design.strata, f"shuffle {seed}/{number}/{redraw}")
            if not design.spanning or all(
                set(groups) <= set(design.usable(labels, kind)) for kind, groups in folds.items()
            ):
                break
        else:
            raise InputError(
                "shortcut gate: the groups are too small: shuffled labels leave one of them "
                f"with a single class, {MOST_REDRAWS} times in a row"
            )
        result[:, number] = labels
    return result


def concerns_of(
    design: Design, folds: Mapping[int, Sequence[int]], lines: Sequence[Mapping[str, Any]]
) -> list[str]:
    """What a reader should know about a corpus before trusting a number made from it."""
    concerns = []
    if design.spanning:
        concerns.append(
            f"{design.spanning} of {len(design.labels)} clusters span groups: lines of one "
            "cluster are on both sides of a fold, which may raise the surface baseline (p stays "
            "right, the shuffles have the same)"
        )
    for kind in design.judged:
        name, usable = shown(design.class_names[kind]), folds.get(kind, ())
        left = [group for k, group in enumerate(design.group_names) if k not in usable]
        if not usable:
            concerns.append(f"class {name} was not judged: no group can be held out for it")
        elif left:
            concerns.append(
                f"class {name}: {len(left)} of {len(design.group_names)} groups could not be "
                f"held out, for want of a class inside or outside of them: {', '.join(left[:5])}"
            )
    clusters_with: dict[str, set[str]] = {}
    for line in lines:
        clusters_with.setdefault(line["text"], set()).add(line["cluster"])
    repeated = sum(len(clusters) > 1 for clusters in clusters_with.values())
    if repeated:
        concerns.append(
            f"{repeated} texts occur in more than one cluster: their labels can be remembered"
        )
    return concerns
