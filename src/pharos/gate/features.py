"""What can be seen of a text without reading it."""

import fnmatch
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pharos.config import did_you_mean
from pharos.errors import InputError

PUNCTUATION = frozenset(".,;:()/-")
MOST_VALUES = 20  # values of a categorical column with an indicator of their own


@dataclass(frozen=True)
class Features:
    """Shape features of corpus lines.

    ``names`` has d entries; ``values`` is float64 of shape (n, d), each a count or the quotient
    of two counts, so the same bits everywhere.
    """

    names: tuple[str, ...]
    values: npt.NDArray[np.float64]
    constant: tuple[str, ...]


@dataclass(frozen=True)
class _Text:
    """The counts of one text from which its features are made."""

    text: str
    words: list[str]
    sentences: int
    characters: Counter[str]

    def share(self, wanted: Callable[[str], bool]) -> float:
        count = sum(n for character, n in self.characters.items() if wanted(character))
        return count / len(self.text)


def _is_other(character: str) -> bool:
    return not (character.isalnum() or character.isspace() or character in PUNCTUATION)


def _is_clock(word: str) -> bool:
    return word.endswith("Z") and word[:-1].isdigit()


TEXT_FEATURES: dict[str, Callable[[_Text], float]] = {
    "characters": lambda t: len(t.text),
    "words": lambda t: len(t.words),
    "sentences": lambda t: t.sentences,
    "lines": lambda t: len(t.text.splitlines()),
    "words_per_sentence": lambda t: len(t.words) / max(1, t.sentences),
    "characters_per_word": lambda t: len(t.text) / max(1, len(t.words)),
    "digit_share": lambda t: t.share(str.isdigit),
    "upper_share": lambda t: t.share(str.isupper),
    "punctuation_share": lambda t: t.share(PUNCTUATION.__contains__),
    "other_share": lambda t: t.share(_is_other),
    "clock": lambda t: any(map(_is_clock, t.words)),
}

# Names that do not say what is measured, as a sentence says it.
IN_WORDS = {
    "characters": "number of characters",
    "words": "number of words",
    "sentences": "number of sentences",
    "lines": "number of lines",
    "words_per_sentence": "words per sentence",
    "characters_per_word": "characters per word",
    "digit_share": "share of digits",
    "upper_share": "share of capitals",
    "punctuation_share": "share of punctuation",
    "other_share": "share of other signs",
    "clock": "presence of a clock time",
    "copies": "number of copies of the text",
    "cluster_lines": "number of lines in the cluster",
}


def feature_in_words(name: str) -> str:
    """What a feature measures, for a sentence; a column's name stands for itself."""
    return f"the {IN_WORDS[name]}" if name in IN_WORDS else name


def shape_features(
    lines: Sequence[Mapping[str, Any]],
    categorical: Sequence[str] = (),
    leave_out: Sequence[str] = (),
) -> Features:
    """Measure the shape of every line.

    Parameters
    ----------
    lines
        Corpus lines.
    categorical
        Columns to use beside the text. Each gives its values' index in sorted order (named as
        the column) and an indicator for each of its 20 most frequent values
        (``column=value``).
    leave_out
        Features not to use; ``*`` stands for any characters (``channel=*``).

    Returns
    -------
    The features that vary; those that are the same in every line are only named.

    Raises
    ------
    InputError
        If a name in ``leave_out`` or ``categorical`` fits nothing, or nothing is left.
    """
    texts = [_measure(line["text"]) for line in lines]
    columns: dict[str, list[float]] = {
        name: [float(feature(text)) for text in texts] for name, feature in TEXT_FEATURES.items()
    }
    for name, values in (
        ("copies", [line["text"] for line in lines]),
        ("cluster_lines", [line["cluster"] for line in lines]),
    ):
        counts = Counter(values)
        columns[name] = [float(counts[value]) for value in values]
    for name in categorical:
        columns |= _categorical(name, lines, f"{name} (column)" if name in columns else name)
    kept = _keep(columns, leave_out)
    varying = [name for name in kept if min(columns[name]) < max(columns[name])]
    if not varying:
        raise InputError("shortcut gate: every feature is the same in all lines or left out")
    return Features(
        names=tuple(varying),
        values=np.array([columns[name] for name in varying], dtype=np.float64).T.copy(),
        constant=tuple(name for name in kept if name not in varying),
    )


def _measure(text: str) -> _Text:
    sentences = sum(1 for part in text.split(".") if part.strip())
    return _Text(text, text.split(), sentences, Counter(text))


def _categorical(
    name: str, lines: Sequence[Mapping[str, Any]], shown: str
) -> dict[str, list[float]]:
    for number, line in enumerate(lines, start=1):
        if name not in line:
            known = sorted(map(str, line))
            raise InputError(
                f"shortcut gate: line {number} has no column {name!r}{did_you_mean(name, known)}"
            )
    values = [str(line[name]) for line in lines]
    counts = Counter(values)
    index = {value: float(k) for k, value in enumerate(sorted(counts))}
    columns = {shown: [index[value] for value in values]}
    # Two values are told apart by the index alone.
    if len(counts) > 2:
        frequent = sorted(counts, key=lambda value: (-counts[value], value))[:MOST_VALUES]
        for value in sorted(frequent):
            columns[f"{shown}={value}"] = [float(other == value) for other in values]
    return columns


def _keep(columns: Mapping[str, Any], leave_out: Sequence[str]) -> list[str]:
    left_out: set[str] = set()
    for pattern in leave_out:
        fitting = [
            name for name in columns if name == pattern or fnmatch.fnmatchcase(name, pattern)
        ]
        if not fitting:
            raise InputError(
                f"shortcut gate: leave_out: no feature {pattern!r}"
                f"{did_you_mean(pattern, sorted(columns))}"
            )
        left_out.update(fitting)
    return [name for name in columns if name not in left_out]
