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

from pharos.config import did_you_mean
from pharos.corpus.stream import Stream
from pharos.corpus.watch import CATEGORICAL, generate_watch
from pharos.errors import InputError

Line = dict[str, Any]
COLUMNS = ("id", "text", "label", "group", "cluster")


def read_corpus(path: Path | str) -> list[Line]:
    """Read a corpus and check every line of it.

    Raises
    ------
    InputError
        In one line with file and line number: not JSON, a key missing or of the wrong type, an
        ``id`` used twice, a cluster with two labels or in two groups, an empty file.
    """
    path = Path(path)
    rows = list(read_jsonl(path))
    check_corpus(rows, path)
    return [line for _, line in rows]


def read_jsonl(path: Path) -> Iterator[tuple[int, Line]]:
    """Yield ``(line number, object)`` for every line of a JSONL file that is not blank.

    Raises
    ------
    InputError
        If the file cannot be read, holds no line, or a line is not a JSON object in UTF-8.
    """
    try:
        rows = path.read_bytes().split(b"\n")
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    found = False
    for number, row in enumerate(rows, start=1):
        if not row.strip():
            continue
        found = True
        try:
            value = json.loads(row.decode("utf-8-sig" if number == 1 else "utf-8"))
        except UnicodeDecodeError as error:
            at = f"byte {error.start + 1}"
            raise InputError(f"{path}:{number}: not UTF-8 at {at} of the line") from None
        except ValueError as error:
            raise InputError(f"{path}:{number}: not JSON: {error}") from None
        except RecursionError:
            raise InputError(f"{path}:{number}: nested too deeply for a corpus line") from None
        if not isinstance(value, dict):
            kind = type(value).__name__
            raise InputError(f"{path}:{number}: a {kind} where a JSON object is expected")
        yield number, value
    if not found:
        raise InputError(f"{path}: the file is empty; one JSON object a line is expected")


def check_corpus(rows: Sequence[tuple[int, Line]], path: Path) -> None:
    """Refuse rows, ``(line number, line)``, that are not a corpus."""
    seen: dict[str, int] = {}
    clusters: dict[str, tuple[bool, str, int]] = {}
    for number, line in rows:
        where = f"{path}:{number}"
        for key in COLUMNS:
            if key not in line:
                raise InputError(f"{where}: the key {key!r} is missing{_nearest(key, line)}")
            expected = bool if key == "label" else str
            if not isinstance(line[key], expected):
                wanted = "true or false" if key == "label" else "text"
                raise InputError(f"{where}: {key} is {line[key]!r}, expected {wanted}")
            if key != "label" and not _is_unicode(line[key]):
                raise InputError(f"{where}: {key} holds half a surrogate pair, which is no text")
        if not line["text"].strip():
            raise InputError(f"{where}: text is empty")
        if line["id"] in seen:
            raise InputError(
                f"{where}: id {line['id']!r} is used twice, first in line {seen[line['id']]}"
            )
        seen[line["id"]] = number
        label, group, first = clusters.setdefault(
            line["cluster"], (line["label"], line["group"], number)
        )
        if label != line["label"]:
            raise InputError(
                f"{where}: cluster {line['cluster']!r} has two labels, here "
                f"{_json(line['label'])} and {_json(label)} in line {first}"
            )
        if group != line["group"]:
            raise InputError(
                f"{where}: cluster {line['cluster']!r} is in two groups, here "
                f"{line['group']!r} and {group!r} in line {first}"
            )


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _nearest(key: str, line: Mapping[str, Any]) -> str:
    return did_you_mean(key, sorted(map(str, line)))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def import_corpus(corpus: Mapping[str, Any], seed: int) -> list[Line]:
    """Bring a user's own JSONL file into the shape of a corpus.

    Parameters
    ----------
    corpus
        The block ``tasks.<task>.corpus``: ``file``, ``columns`` (what the file calls ``id``,
        ``text``, ``label``, ``group`` and ``cluster``), ``positive`` (the label that counts as
        positive) and ``categorical`` (further columns to keep).
    seed
        The clusters are put into a random order of this seed, the lines of each together.

    Raises
    ------
    InputError
        As :func:`read_corpus`, or if no line or every line is positive.
    """
    path = Path(corpus["file"])
    columns = {key: corpus["columns"].get(key, key) for key in COLUMNS}
    rows: list[tuple[int, Line]] = []
    labels: Counter[str] = Counter()
    for number, row in read_jsonl(path):
        for column in [*columns.values(), *corpus["categorical"]]:
            if column not in row:
                raise InputError(
                    f"{path}:{number}: the column {column!r} is missing{_nearest(column, row)}"
                )
        line: Line = {
            key: _as_text(row[column], f"{path}:{number}: {column}")
            for key, column in columns.items()
            if key != "label"
        }
        label = row[columns["label"]]
        if label is None or isinstance(label, dict | list):
            raise InputError(f"{path}:{number}: {columns['label']} is {_json(label)}, not a label")
        labels[_json(label)] += 1
        # true is not 1 here: the label and `positive` must be of one type.
        line["label"] = _json(label) == _json(corpus["positive"])
        for column in corpus["categorical"]:
            line[column] = _as_text(row[column], f"{path}:{number}: {column}")
        rows.append((number, {key: line[key] for key in (*COLUMNS, *corpus["categorical"])}))
    check_corpus(rows, path)
    positive = _json(corpus["positive"])
    if labels[positive] in (0, len(rows)):
        how_many = "no line" if labels[positive] == 0 else "every line"
        raise InputError(
            f"{path}: {how_many} has the label {positive} that counts as positive; "
            f"found {', '.join(sorted(labels)[:8])}"
        )
    by_cluster: dict[str, list[Line]] = {}
    for _, line in rows:
        by_cluster.setdefault(line["cluster"], []).append(line)
    order = Stream("import", seed).shuffled(list(by_cluster))
    return [line for cluster in order for line in by_cluster[cluster]]


def _as_text(value: Any, where: str) -> str:
    """Text as it is; a number or boolean as JSON writes it."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool | int | float):
        return _json(value)
    raise InputError(f"{where} is {_json(value)}, expected text")


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
