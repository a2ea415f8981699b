"""Files of rollouts: lines of JSON, JSON documents, Parquet, and folders of them, as objects.

Nothing here imports torch: a command line with a bad file ends at once.
"""

from __future__ import annotations

import codecs
import gzip
import json
import os
import re
import reprlib
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from dualkv.data.forms import ByteTokenizer, Tokenizer, kind

# Files that a folder is read for: those of the first row of which there are any.
IN_FOLDERS = (("*.traj", "*.traj.json"), ("*.jsonl", "*.jsonl.gz"))


class File(NamedTuple):
    """A file of rollouts that :func:`load` has read: as the functions that take a path take it, too."""

    name: str
    objects: list[tuple[str, dict[str, Any]]]


Source = str | os.PathLike[str] | File


def name_of(path: Source) -> str:
    """The path of a file, or `-`."""
    return path.name if isinstance(path, File) else os.fspath(path)


def load(path: str | os.PathLike[str], parse: Callable[[dict[str, Any], Tokenizer], object]) -> File:
    """A file whose errors come now, before anything is imported that takes seconds. `parse` will read its objects
    later; text is checked as bytes.

    Raises:
        ValueError: the first error, as `file:line: message`.
        OSError: a file that cannot be read.
    """
    file, tokenizer = File(name_of(path), []), ByteTokenizer()
    for where, data in objects(path):
        with errors_at(where):
            parse(data, tokenizer)
        file.objects.append((where, data))
    if not file.objects:
        raise ValueError(f"{file.name}: no rollouts in it, expected one JSON object a line")
    return file


@contextmanager
def errors_at(where: str) -> Iterator[None]:
    """Put a place of a file before the message of a ValueError or a TypeError."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: {error}") from None


def objects(path: Source) -> Iterator[tuple[str, dict[str, Any]]]:
    """The JSON objects of a file, each with the place `file:line`.

    Args:
        path: JSON lines, whose blank lines are skipped; a JSON document, an object or a list of them (`.json`, `.traj`,
            or a first line that is a lone bracket); either of them compressed (`.gz`); `-` for standard input; rows of
            Parquet (`.parquet`, which takes pyarrow); a folder of `.traj` or `.traj.json` files, as SWE-agent and
            mini-SWE-agent leave them, or else of `.jsonl` files, as veRL's `rollout_data_dir` is, in the order of
            their names (2 before 10); or what :func:`load` has read.

    Raises:
        ValueError: not JSON, not UTF-8, no object, or an object that has a key twice, as `file:line: message`; a folder
            without such files.
        OSError: a file that cannot be read.
    """
    if isinstance(path, File):
        yield from path.objects
        return
    if os.path.isdir(path):
        for each in _files_in(Path(path)):
            yield from objects(each)
        return
    name = os.fspath(path)
    if name.endswith(".parquet"):
        yield from _rows(name)
        return
    with ExitStack() as stack:
        opened = gzip.open if name.endswith(".gz") else open
        file = sys.stdin.buffer if name == "-" else stack.enter_context(opened(name, "rb"))
        document = name.removesuffix(".gz").endswith((".json", ".traj"))
        begins = True
        for number, line in enumerate(_lines(name, file), start=1):
            if not line.strip():
                continue
            if document or (begins and line.strip() in (b"{", b"[")):
                yield from _document(name, line + b"".join(_lines(name, file)), number)
                return
            begins = False
            # Behind a line break columns begin anew.
            yield _object(f"{name}:{number}", _json(name, line.rstrip(b"\r\n"), number))


def _files_in(folder: Path) -> list[Path]:
    """The files of rollouts in a folder and in those below it; numbers in their names count as numbers."""
    for patterns in IN_FOLDERS:
        if found := {path for pattern in patterns for path in folder.rglob(pattern)}:
            return sorted(found, key=_by_numbers)
    raise ValueError(
        f"{folder}: no .traj and no .jsonl files in this folder, expected some (other files are read one by one)"
    )


def _by_numbers(path: Path) -> list[int | str]:
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", str(path))]


def _lines(name: str, file: Iterable[bytes]) -> Iterator[bytes]:
    try:
        yield from file
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{name}: not a whole file of gzip ({error})") from None


def _rows(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    from pyarrow import ArrowException, parquet

    try:
        rows = parquet.read_table(name).to_pylist()
    except ArrowException as error:
        raise ValueError(f"{name}: not Parquet ({' '.join(str(error).split())})") from None
    for i, row in enumerate(rows):
        yield f"{name}[{i}]", {key: value for key, value in row.items() if value is not None}


def _document(name: str, text: bytes, line: int) -> Iterator[tuple[str, dict[str, Any]]]:
    data = _json(name, text, line)
    several = isinstance(data, list)
    for i, each in enumerate(data if several else [data]):
        yield _object(f"{name}[{i}]" if several else name, each)


def _json(name: str, text: bytes, line: int) -> Any:
    """The value of some JSON of a file; `line` is the number of its first line."""
    if text.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ValueError(f"{name}:{line}: not UTF-8 but UTF-16")
    try:
        return json.loads(text, object_pairs_hook=_without_repeats)
    except json.JSONDecodeError as error:
        at = f"{name}:{line + error.lineno - 1}"
        lines = error.msg == "Extra data" and error.lineno > 1
        hint = "; if each line is a value of its own, name the file .jsonl" if lines else ""
        raise ValueError(f"{at}: not valid JSON ({error.msg} at column {error.colno}){hint}") from None
    except RecursionError:
        raise ValueError(f"{name}:{line}: lists or objects are nested too deep") from None
    except UnicodeDecodeError as error:
        above, begun = text[: error.start].count(b"\n"), text[: error.start].rpartition(b"\n")[2]
        raise ValueError(f"{name}:{line + above}: not UTF-8 (byte {len(begun)} of the line)") from None
    except ValueError as error:  # a repeated key, or an integer with more digits than Python reads
        raise ValueError(f"{name}:{line}: {str(error).partition(';')[0]}") from None


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of some keys and values; JSON's own reader would take the last value of a key."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"an object has the key {reprlib.repr(repeated)} more than once, expected it once")
    return found


def _object(where: str, data: Any) -> tuple[str, dict[str, Any]]:
    if not isinstance(data, dict):
        raise ValueError(f"{where}: expected a JSON object, got {kind(data)}")
    return where, data
