"""Reading, checking, importing and writing corpora; the manifest.

A corpus line has ``id``, ``text``, ``label`` (bool), ``group`` and ``cluster``, then named
categorical columns. A user's own file is brought into that shape by :func:`import_corpus`.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pharos.config import did_you_mean, nearest
from pharos.corpus.stream import Stream
from pharos.corpus.tables import read_rows
from pharos.corpus.watch import CATEGORICAL, generate_watch
from pharos.errors import InputError
from pharos.runtime.log import warn

Line = dict[str, Any]
MOST_CATEGORIES = 50
COLUMNS = ("id", "text", "label", "group", "cluster")
MEANINGS = {
    "id": "its unique name",
    "text": "what is read",
    "label": "its class",
    "group": "what the shortcut gate holds out together: a site, a year, an author",
    "cluster": "the lines that share one label, as those of one event",
}
# YAML 1.1 reads these words as true and false where they stand without quotes.
YAML_WORDS = {True: ("yes", "on"), False: ("no", "off")}


def read_corpus(path: Path | str) -> list[Line]:
    """Read a corpus and check every line of it.

    Raises
    ------
    InputError
        In one line with file and line number: not JSON, a key missing or of the wrong type, an
        ``id`` used twice, a cluster with two labels, an empty file.
    """
    path = Path(path)
    rows = list(read_rows(path))
    for number, line in rows:
        for key in COLUMNS:
            if key not in line:
                raise InputError(f"{path}:{number}: the key {key!r} is missing{_near(key, line)}")
            if not isinstance(line[key], bool if key == "label" else str):
                wanted = "true or false" if key == "label" else "text"
                raise InputError(f"{path}:{number}: {key} is {line[key]!r}, expected {wanted}")
    _check(rows, path)
    return [line for _, line in rows]


def read_labelled(
    path: Path | str,
    columns: Mapping[str, str],
    categorical: Sequence[str] | None,
    *,
    options: bool = False,
) -> list[tuple[int, Line]]:
    """Read any labelled file, and call its columns by the names that corpora use.

    Parameters
    ----------
    path
        JSONL, CSV or Parquet, see :func:`~pharos.corpus.tables.read_rows`.
    columns
        What the file calls ``id``, ``text``, ``label``, ``group`` and ``cluster``, where it is
        something else. A file without ids gets line numbers for them. In a file without a
        column ``id``, ``cluster: id`` means the ids of the lines, whatever they are called.
    categorical
        Further columns to keep, as text; a missing value becomes empty text. ``None`` for every
        further column of text with at most 50 different values.
    options
        Columns are named by options (``--cluster``), and not in a configuration: so errors say it.

    Returns
    -------
    ``(line number, line)``; labels are true, false, or the text of what the file has.

    Raises
    ------
    InputError
        In one line with file and line number: what :func:`~pharos.corpus.tables.read_rows`
        refuses, a column missing or misspelt, a text, label, group or cluster missing, an
        ``id`` used twice, a cluster with two labels.
    """
    path = Path(path)
    names = {key: columns.get(key, key) for key in COLUMNS}
    found = list(read_rows(path))
    if categorical is None:
        taken = {*names.values(), *COLUMNS}
        categorical = _categorical_columns([row for _, row in found], taken)
    for column in categorical:
        if column in COLUMNS:
            raise InputError(
                f"{path}: the categorical column {column!r} has a name that every corpus uses for "
                "something else; rename it"
            )
    rows = []
    unlabelled = []
    has_id = any("id" in row for _, row in found)
    for number, row in found:
        where = f"{path}:{number}"
        known = sorted(map(str, row))
        if names["id"] == "id":
            row = {"id": str(number), **row}
        elif not has_id and names["id"] in row:
            row = {**row, "id": row[names["id"]]}
        for key, column in names.items():
            if column not in row:
                raise InputError(f"{where}: {_no_column(key, column, known, options)}")
        for column in categorical:
            if column not in row:
                near = did_you_mean(column, known)
                raise InputError(f"{where}: the column {column!r} is missing{near}")
        line: Line = {
            key: _as_text(row[names[key]], f"{where}: {names[key]}")
            for key in COLUMNS
            if key != "label"
        }
        line["label"] = _as_label(row[names["label"]], f"{where}: {names['label']}")
        line |= {column: _as_category(row[column], f"{where}: {column}") for column in categorical}
        if line["label"] is None:
            unlabelled.append(number)
        for key in ("id", "group", "cluster"):
            if not line[key].strip():
                raise InputError(f"{where}: {names[key]} is empty")
        rows.append((number, {key: line[key] for key in (*COLUMNS, *categorical)}))
    if unlabelled:
        raise InputError(
            f"{path}:{unlabelled[0]}: {names['label']} is empty, in {len(unlabelled)} of "
            f"{len(rows)} lines; label them or leave them out"
        )
    _check(rows, path)
    return rows


def _categorical_columns(rows: Sequence[Mapping[str, Any]], taken: set[str]) -> list[str]:
    """Columns beside those ``taken`` that hold text of few values in all rows."""
    columns = []
    for name in rows[0]:
        values = [row.get(name) for row in rows]
        if name in taken or not all(isinstance(value, str) for value in values):
            continue
        if len(set(values)) <= MOST_CATEGORIES:
            columns.append(name)
    return columns


def _check(rows: Sequence[tuple[int, Line]], path: Path) -> None:
    """Refuse lines that contradict each other or hold no text."""
    seen: dict[str, int] = {}
    clusters: dict[str, tuple[Any, int]] = {}
    for number, line in rows:
        where = f"{path}:{number}"
        for key, value in line.items():
            if isinstance(value, str) and not _is_unicode(value):
                raise InputError(f"{where}: {key} holds half a surrogate pair, which is no text")
        if not line["text"].strip():
            raise InputError(f"{where}: text is empty")
        first = seen.setdefault(line["id"], number)
        if first != number:
            raise InputError(f"{where}: id {line['id']!r} is used twice, first in line {first}")
        label, first = clusters.setdefault(line["cluster"], (line["label"], number))
        if label != line["label"]:
            raise InputError(
                f"{where}: cluster {line['cluster']!r} has two labels, here "
                f"{_json(line['label'])} and {_json(label)} in line {first}"
            )


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _near(key: str, line: Mapping[str, Any]) -> str:
    return did_you_mean(key, sorted(map(str, line)))


def _no_column(key: str, column: str, known: list[str], options: bool) -> str:
    """What to say of a file without the column of a field: what it is for, and where to name it."""
    place = f"--{key}" if options else f"columns.{key} of the task's corpus in the configuration"
    near = nearest(column, known)
    said = f"the column {column!r} is missing"
    if near is not None:
        return f"{said}; did you mean {near}? Name it with {place}"
    own = "`--cluster id`" if options else "`cluster: id`"
    alone = f", or write {own} if every line is an event of its own" if key == "cluster" else ""
    return (
        f"{said}, and every line needs {'an' if key == 'id' else 'a'} {key} ({MEANINGS[key]}); "
        f"the file has {', '.join(known)}: name one with {place}{alone}"
    )


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _as_text(value: Any, where: str) -> str:
    """Text as it is; a number or boolean as JSON writes it."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool | int | float):
        return _json(value)
    raise InputError(f"{where} is {_shown(value)}, expected text")


def _as_category(value: Any, where: str) -> str:
    return "" if value is None else _as_text(value, where)


def _as_label(value: Any, where: str) -> bool | str | None:
    """A label as true, false or text; ``None`` where it is missing."""
    if value is None or value != value or (isinstance(value, str) and not value.strip()):
        return None
    if isinstance(value, bool):
        return value
    text = _as_text(value, where)
    # CSV has no types: what pandas writes there is True and False.
    return {"true": True, "false": False}.get(text.lower(), text)


def _shown(value: Any) -> str:
    return "missing" if value is None else repr(value)


def import_corpus(corpus: Mapping[str, Any], seed: int) -> list[Line]:
    """Bring a user's own file into the shape of a corpus.

    Parameters
    ----------
    corpus
        The block ``tasks.<task>.corpus``: ``file``, ``columns`` (what the file calls ``id``,
        ``text``, ``label``, ``group`` and ``cluster``), ``positive`` (the label that counts as
        positive) and ``categorical`` (further columns to keep).
    seed
        The clusters are put into a random order of this seed, the lines of each together.

    Where there are more than two labels, a warning names those that count as negative.

    Raises
    ------
    InputError
        As :func:`read_labelled`, or if no line or every line is positive.
    """
    path = Path(corpus["file"])
    rows = read_labelled(path, corpus["columns"], corpus["categorical"])
    positive = corpus["positive"]
    # Without types of its own (CSV) a file writes true as text.
    wanted = positive if isinstance(positive, str) else _json(positive)
    found = Counter(_label_text(line["label"]) for _, line in rows)
    if found[wanted] in (0, len(rows)):
        how_many = "no line" if found[wanted] == 0 else "every line"
        raise InputError(
            f"{path}: {how_many} has the label {wanted} that counts as positive; "
            f"found {', '.join(sorted(found)[:8])}{_quotes(positive, found)}"
        )
    if len(found) > 2:
        rest = ", ".join(
            f"{label} ({count})" for label, count in sorted(found.items()) if label != wanted
        )
        warn(f"{path}: {len(found)} labels; all but {wanted} count as negative: {rest}")
    by_cluster: dict[str, list[Line]] = {}
    for _, line in rows:
        line["label"] = _label_text(line["label"]) == wanted
        by_cluster.setdefault(line["cluster"], []).append(line)
    order = Stream("import", seed).shuffled(list(by_cluster))
    return [line for cluster in order for line in by_cluster[cluster]]


def _quotes(positive: Any, found: Mapping[str, int]) -> str:
    """A hint at the quotes that ``positive`` lacks, where a label is a word that YAML reads so."""
    if not isinstance(positive, bool):
        return ""
    word = next((label for label in found if label.lower() in YAML_WORDS[positive]), None)
    return "" if word is None else f'; in YAML that word needs quotes: positive: "{word}"'


def _label_text(label: bool | str) -> str:
    return label if isinstance(label, str) else _json(label)


def build_corpus(task: Mapping[str, Any], seed: int) -> tuple[list[Line], dict[str, Any]]:
    """Make the corpus of one task and one seed.

    Parameters
    ----------
    task
        The block ``tasks.<task>`` of a checked configuration.
    seed
        The corpus seed.

    Returns
    -------
    The corpus lines and :func:`manifest` of them.

    Raises
    ------
    InputError
        If a user's file is not a corpus, or has too few clusters for training and testing.
    """
    corpus = task["corpus"]
    if "file" not in corpus:
        lines = generate_watch(seed, corpus)
        parameters = {key: corpus[key] for key in ("events", "positive_share", "decoy_share")}
        return lines, manifest(lines, seed, "watch", parameters, CATEGORICAL)
    lines = import_corpus(corpus, seed)
    clusters = len({line["cluster"] for line in lines})
    wanted = task["train_events"] + task["test_events"]
    if clusters < wanted:
        raise InputError(
            f"{corpus['file']}: {clusters} clusters are too few for train_events "
            f"{task['train_events']} and test_events {task['test_events']}"
        )
    parameters = {key: corpus[key] for key in ("file", "columns", "positive", "categorical")}
    return lines, manifest(lines, seed, "file", parameters, corpus["categorical"])


def manifest(
    lines: Sequence[Mapping[str, Any]],
    seed: int,
    source: str,
    parameters: Mapping[str, Any],
    categorical: Sequence[str],
) -> dict[str, Any]:
    """What a corpus is: where it came from, how much of what is in it, and its digest.

    ``sha256`` is over the bytes of the JSONL file as :func:`corpus_bytes` gives them.
    """
    clusters = {line["cluster"]: line for line in lines}
    labels = Counter(line["label"] for line in clusters.values())
    return {
        "source": source,
        "seed": seed,
        "events": len(clusters),
        "lines": len(lines),
        "parameters": dict(parameters),
        "classes": {"positive": labels[True], "negative": labels[False]},
        "groups": _counts(line["group"] for line in clusters.values()),
        "categorical": list(categorical),
        "values": {name: _counts(line[name] for line in lines) for name in categorical},
        "sha256": hashlib.sha256(corpus_bytes(lines)).hexdigest(),
    }


def _counts(values: Iterator[str]) -> dict[str, int]:
    return dict(sorted(Counter(values).items()))


def corpus_bytes(lines: Sequence[Mapping[str, Any]]) -> bytes:
    """The JSONL file of a corpus, byte for byte: one object a line, keys as they stand."""
    return "".join(f"{_json(line)}\n" for line in lines).encode()
