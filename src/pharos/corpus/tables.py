"""Rows of a user's own file: JSONL (also gzipped), CSV or Parquet."""

import csv
import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pharos.errors import InputError
from pharos.runtime.artifacts import jsonl_rows

Row = dict[str, Any]
FORMATS = ".jsonl, .jsonl.gz, .csv, .csv.gz or .parquet"


def read_rows(path: Path | str) -> Iterator[tuple[int, Row]]:
    """Yield ``(line number, columns)`` for every row of a file, by the ending of its name.

    A Parquet row's number counts from 1. CSV needs a header line; all its values are text.

    Raises
    ------
    InputError
        In one line with file and line number: an unknown ending, an unreadable or empty file,
        bytes that are not UTF-8, a line that is not a JSON object, a CSV line with more or fewer
        fields than the header.
    """
    path = Path(path)
    name = path.name.lower()
    zipped = name.endswith(".gz")
    kind = Path(name.removesuffix(".gz")).suffix
    if kind == ".parquet" and not zipped:
        rows = _parquet_rows(path)
    elif kind in (".jsonl", ".ndjson"):
        rows = jsonl_rows(_content(path, zipped), path)
    elif kind == ".csv":
        rows = _csv_rows(path, _content(path, zipped))
    else:
        raise InputError(f"{path}: unknown kind of file; the name must end in {FORMATS}")
    empty = True
    for number, row in rows:
        empty = False
        yield number, row
    if empty:
        raise InputError(f"{path}: the file is empty; rows with a text and a label are expected")


def _content(path: Path, zipped: bool) -> bytes:
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if zipped else content
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise InputError(f"{path}: not a whole gzip file") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None


def _csv_rows(path: Path, content: bytes) -> Iterator[tuple[int, Row]]:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = content.count(b"\n", 0, error.start) + 1
        raise InputError(f"{path}:{number}: not UTF-8") from None
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    csv.field_size_limit(2**31 - 1)
    header: list[str] | None = None
    started = 1
    try:
        for fields in reader:
            number, started = started, reader.line_num + 1
            if not any(field.strip() for field in fields):
                continue
            if header is None:
                header = fields
                twice = sorted({name for name in header if header.count(name) > 1})
                if twice:
                    raise InputError(f"{path}:{number}: the header names {twice[0]!r} twice")
            elif len(fields) != len(header):
                raise InputError(
                    f"{path}:{number}: {len(fields)} fields, the header has {len(header)}"
                )
            else:
                yield number, dict(zip(header, fields, strict=True))
    except csv.Error as error:
        raise InputError(f"{path}:{started}: not CSV: {error}") from None


def _parquet_rows(path: Path) -> Iterator[tuple[int, Row]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise InputError(f"{path}: reading Parquet needs pyarrow: pip install pyarrow") from None
    try:
        with parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    except pyarrow.ArrowException as error:
        first = str(error).splitlines()[0]
        raise InputError(f"{path}: not a Parquet file: {first}") from None
