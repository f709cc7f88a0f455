"""Reading and checking a configuration before anything runs."""

import copy
import difflib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError

from pharos.errors import InputError

LONGEST_VALUE = 60
# What JSON, and every library behind it, holds exactly.
LARGEST_INTEGER = 2**53
# What a value that does not match a pattern of the schema lacks.
PATTERNS_IN_WORDS = {
    r"\{text\}": "has no {text}, the place where the text of the item goes",
    r"\S": "is empty; text is expected",
    "^[0-9a-f]{64}$": "is not a SHA-256: 64 digits and letters a to f",
    r"\.gguf$": "does not end in .gguf",
}
CORPUS_KEYS = {
    "generator": ("events", "positive_share", "decoy_share"),
    "file": ("positive", "columns", "categorical"),
}


def load_config(raw: Mapping[str, Any], schema_path: Path | str) -> dict[str, Any]:
    """Check a configuration and fill in the defaults.

    Parameters
    ----------
    raw
        The configuration as read from YAML; it is not changed.
    schema_path
        The JSON schema (YAML) whose ``default`` entries are filled in.

    Raises
    ------
    InputError
        With one line that names the key and what would be right, on the first fault found.
    """
    schema = yaml.safe_load(Path(schema_path).read_text(encoding="utf-8"))
    config = copy.deepcopy(dict(raw))
    _check_numbers(config, ())
    errors = sorted(Draft202012Validator(schema).iter_errors(config), key=_depth_first)
    if errors:
        raise InputError(f"config: {_in_words(errors[0])}")
    _check_corpus_keys(config)
    _check_adapter_keys(config)
    filled: dict[str, Any] = _fill_defaults(config, schema, schema)
    _check_references(filled)
    _check_shards(filled)
    _check_corpora(filled)
    _check_one_job_per_model(filled)
    return filled


def read_config(path: Path | str, schema_path: Path | str) -> dict[str, Any]:
    """Read a configuration file, check it and fill in the defaults.

    Raises
    ------
    InputError
        As :func:`check_config_file` and :func:`load_config`.
    """
    check_config_file(path)
    return load_config(yaml.safe_load(Path(path).read_text(encoding="utf-8-sig")), schema_path)


def check_config_file(path: Path | str) -> None:
    """Refuse what a YAML reader passes over in silence or cannot read, with its line.

    Raises
    ------
    InputError
        If the file cannot be read, is not UTF-8 or not YAML, or names a key twice in one mapping
        (the first value would be lost).
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        json.loads(text, object_pairs_hook=lambda pairs: _refuse_doubles(pairs, path))
        return
    except OSError as error:
        raise InputError(f"config: {path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"config: {path}: not UTF-8 at byte {error.start + 1}") from None
    except ValueError:
        pass  # Not JSON: YAML then.
    try:
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise InputError(f"config: {path}{line}: not YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise InputError(f"config: {path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, yaml.MappingNode):
        raise InputError(f"config: {path}: keys at the top level are expected, as in models: ...")
    _check_keys(tree, path, set())


def _refuse_doubles(pairs: list[tuple[str, Any]], path: Path | str) -> dict[str, Any]:
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise InputError(f"config: {path}: the key {key!r} stands twice in one mapping")
        seen.add(key)
    return dict(pairs)


def _check_keys(node: yaml.Node, path: Path | str, visited: set[int]) -> None:
    if id(node) in visited:  # An alias may point at a mapping that holds it.
        return
    visited.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _check_keys(item, path, visited)
    elif isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in lines:
                    raise InputError(
                        f"config: {path}:{line}: the key {key.value!r} stands twice in one "
                        f"mapping, first in line {lines[key.value]}"
                    )
                lines[key.value] = line
            _check_keys(value, path, visited)


def _check_numbers(value: Any, where: tuple[str, ...]) -> None:
    """JSON schema lets NaN pass every bound; and no count or seed has twenty digits."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            _check_numbers(item, (*where, str(key)))
    elif isinstance(value, list):
        for position, item in enumerate(value):
            _check_numbers(item, (*where, str(position)))
    elif isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"config: {'.'.join(where)}: {_shown(value)} is not a finite number")
    elif isinstance(value, int) and abs(value) > LARGEST_INTEGER:
        raise InputError(
            f"config: {'.'.join(where)}: {_shown(value)} is more than {LARGEST_INTEGER}"
        )


def _shown(value: Any) -> str:
    """A value as YAML writes it, on one line, and never a page of it."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    text = repr(value)
    if len(text) > LONGEST_VALUE:
        text = f"{text[: LONGEST_VALUE - 3]}..."
    return text


def _depth_first(error: ValidationError) -> tuple[int, list[str]]:
    # An unknown key explains the "required key missing" beside it, so it comes first.
    order = {"additionalProperties": 0, "type": 1, "required": 3}
    return order.get(str(error.validator), 2), [str(part) for part in error.absolute_path]


def _in_words(error: ValidationError) -> str:
    where = ".".join(str(part) for part in error.absolute_path)
    at = f"{where}: " if where else ""
    value: Any = error.instance
    expected: Any = error.validator_value
    schema: Any = error.schema
    match error.validator:
        case "additionalProperties":
            known = sorted(schema.get("properties", {}))
            unknown = sorted(str(key) for key in value if key not in known)[0]
            key = f"{where}.{unknown}" if where else unknown
            return f"unknown key {key}{did_you_mean(unknown, known)}"
        case "required":
            missing = [key for key in expected if key not in value]
            return f"{at}the key {missing[0]!r} is missing"
        case "type":
            if schema.get("description") == "A name used in paths.":
                return f"{at}the name {value} is not text; write it in quotes"
            return f"{at}{_shown(value)} is of the wrong type, expected {_types(expected)}"
        case "enum":
            choices = [str(choice) for choice in expected]
            near = did_you_mean(str(value), choices)
            listed = "" if "known:" in near else f" (known: {', '.join(choices)})"
            return f"{at}{_shown(value)} is unknown{near}{listed}"
        case "oneOf":
            keys = [branch["required"][0] for branch in expected]
            given = [key for key in keys if key in value]
            found = f"found {' and '.join(given)}" if given else "found none"
            return f"{at}exactly one of {', '.join(keys)} is needed, {found}"
        case "pattern":
            if schema.get("description") == "A name used in paths.":
                return (
                    f"{at}the name {_shown(value)} will not do: lower-case letters, digits, "
                    "'.', '_' and '-', at most 64, starting with a letter or digit"
                )
            said = PATTERNS_IN_WORDS.get(expected, f"does not match {expected}")
            return f"{at}{_shown(value)} {said}"
        case "not":
            return f"{at}the name {value!r} is taken"
    # The library's message holds the whole value; ours, the start of it.
    return f"{at}{error.message.replace(repr(value), _shown(value))}"


def _types(value: str | list[str]) -> str:
    return " or ".join([value] if isinstance(value, str) else value)


def did_you_mean(name: str, known: list[str]) -> str:
    """``"; did you mean X?"`` for the nearest known name, else the list of known names."""
    near = nearest(name, known)
    return f"; did you mean {near}?" if near else f"; known: {', '.join(known) or 'none'}"


def nearest(name: str, known: list[str]) -> str | None:
    """The known name that ``name`` is probably a slip of; ``None`` where none is close."""
    turned = [one for one in known if sorted(one) == sorted(name)]  # tyni, tiny
    return next(iter(difflib.get_close_matches(name, known, n=1) or turned), None)


def resolve(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A part of the schema with its ``$ref`` (inside ``root``) replaced by what it names."""
    reference = schema.get("$ref")
    if reference is None:
        return schema
    target: Any = root
    for part in reference.removeprefix("#/").split("/"):
        target = target[part]
    return {**target, **{key: value for key, value in schema.items() if key != "$ref"}}


def _fill_defaults(value: Any, schema: Mapping[str, Any], root: Mapping[str, Any]) -> Any:
    schema = resolve(schema, root)
    if not isinstance(value, dict):
        return value
    properties = schema.get("properties", {})
    extra = schema.get("additionalProperties")
    for key, part in properties.items():
        part = resolve(part, root)
        if key not in value and "default" in part:
            value[key] = copy.deepcopy(part["default"])
        if key in value:
            value[key] = _fill_defaults(value[key], part, root)
    if isinstance(extra, dict):
        for key in value:
            value[key] = _fill_defaults(value[key], extra, root)
    return value


def _check_references(config: dict[str, Any]) -> None:
    """Names that must exist; adapters without a list get all models and tasks."""
    for name, adapter in config["adapters"].items():
        for section in ("models", "tasks"):
            known = list(config[section])
            chosen = adapter.setdefault(section, known)
            for item in chosen:
                if item not in known:
                    raise InputError(
                        f"config: adapters.{name}.{section}: unknown {section[:-1]} "
                        f"{item!r}{did_you_mean(item, known)}"
                    )
    for name, model in config["models"].items():
        if "dir" in model and not _is_folder_or_gguf(model["dir"]):
            shown = _shown(model["dir"])
            raise InputError(f"config: models.{name}.dir: no folder {shown}, nor such a .gguf file")


def _is_folder_or_gguf(name: str) -> bool:
    path = Path(name)
    try:
        return path.is_dir() or (path.suffix == ".gguf" and path.is_file())
    except (OSError, ValueError):  # A name that no file system takes.
        return False


def _check_corpus_keys(config: dict[str, Any]) -> None:
    """A key that the corpus's other source would read does nothing here: refuse it."""
    for name, task in config["tasks"].items():
        source = "generator" if "generator" in task["corpus"] else "file"
        for key in CORPUS_KEYS["file" if source == "generator" else "generator"]:
            if key in task["corpus"]:
                raise InputError(
                    f"config: tasks.{name}.corpus.{key}: has no meaning for a corpus from "
                    f"a {source}; known: {', '.join(CORPUS_KEYS[source])}"
                )


def _check_adapter_keys(config: dict[str, Any]) -> None:
    """An adapter that exists already is not trained: refuse settings that would do nothing."""
    for name, adapter in config.get("adapters", {}).items():
        where = f"config: adapters.{name}"
        sources = [key for key in ("hub", "dir") if key in adapter]
        if not sources:
            continue
        if len(sources) > 1:
            raise InputError(f"{where}: one of hub and dir is needed, found both")
        for key in adapter:
            if key not in (*sources, "models", "tasks"):
                raise InputError(
                    f"{where}.{key}: has no meaning for an adapter from a {sources[0]}; known: "
                    f"{sources[0]}, models, tasks"
                )
        if "dir" in adapter and not Path(adapter["dir"]).is_dir():
            raise InputError(f"{where}.dir: no folder {adapter['dir']!r}")


def _check_shards(config: dict[str, Any]) -> None:
    """Weights in shards take more than one process, and weights that are not packed into 4 bits."""
    for name, adapter in config["adapters"].items():
        if not adapter.get("shard_base"):
            continue
        where = f"config: adapters.{name}.shard_base"
        if adapter["processes"] == 1:
            raise InputError(f"{where}: needs processes: 2 or more")
        for model in adapter["models"]:
            if config["models"][model]["precision"] == "nf4":
                raise InputError(
                    f"{where}: model {model!r} has precision: nf4, which has no shards"
                )


def _check_corpora(config: dict[str, Any]) -> None:
    for name, task in config["tasks"].items():
        corpus, seeds = task["corpus"], task["seeds"]
        where = f"config: tasks.{name}"
        if len(seeds["train"]) not in (1, len(seeds["test"])):
            raise InputError(
                f"{where}.seeds: {len(seeds['train'])} train seeds for {len(seeds['test'])} test "
                "seeds; give one for all, or one for each"
            )
        answers = task["prompt"]["answers"]
        if answers["positive"].strip() == answers["negative"].strip():
            raise InputError(f"{where}.prompt.answers: positive and negative are the same")
        if "file" in corpus:
            _check_readable(f"{where}.corpus.file", Path(corpus["file"]))
            for train, test in seed_pairs(task):
                if train != test:
                    raise InputError(
                        f"{where}.seeds: train {train} and test {test} would cut the same file "
                        "in two ways, and events would be in both; give the same seed to both"
                    )
            continue
        if "events" not in corpus:
            raise InputError(f"{where}.corpus: the key 'events' is missing")
        for key in ("train_events", "test_events"):
            if task[key] > corpus["events"]:
                raise InputError(
                    f"{where}.{key}: {task[key]} is more than the corpus has "
                    f"(corpus.events: {corpus['events']})"
                )
        shared = [test for train, test in seed_pairs(task) if train == test]
        if shared and task["train_events"] + task["test_events"] > corpus["events"]:
            raise InputError(
                f"{where}: train_events {task['train_events']} and test_events "
                f"{task['test_events']} overlap in seed {shared[0]}: the corpus has "
                f"{corpus['events']} events"
            )


def _check_readable(where: str, path: Path) -> None:
    try:
        with path.open("rb") as file:
            empty = not file.read(1)
    except OSError as error:
        raise InputError(f"{where}: {_shown(str(path))} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"{where}: {_shown(str(path))} cannot be read: {error}") from None
    if empty:
        raise InputError(f"{where}: {str(path)!r} is empty")


def seed_pairs(task: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    """``(train seed, test seed)`` for every test seed of a task."""
    train, test = task["seeds"]["train"], task["seeds"]["test"]
    return zip(train * len(test) if len(train) == 1 else train, test, strict=True)


def evaluation_cells(config: Mapping[str, Any]) -> list[tuple[str, str, int, str]]:
    """``(model, task, test seed, variant)`` of every evaluation."""
    return [
        (model, task, seed, variant)
        for model in config["models"]
        for task in config["tasks"]
        for seed in config["tasks"][task]["seeds"]["test"]
        for variant in [
            "base",
            *(name for name in config["adapters"] if _is_used(config, name, model, task)),
        ]
    ]


def training_cells(config: Mapping[str, Any]) -> list[tuple[str, str, int, str]]:
    """``(model, task, train seed, adapter)`` of every training, each once."""
    cells = (
        (model, task, train, name)
        for name, adapter in config["adapters"].items()
        if adapter_origin(adapter) is None
        for model in adapter["models"]
        for task in adapter["tasks"]
        for train, _ in seed_pairs(config["tasks"][task])
    )
    return list(dict.fromkeys(cells))


def _check_one_job_per_model(config: Mapping[str, Any]) -> None:
    """The trainings of one job share its processes, and how the base is held."""
    if config["one_job_per"] != "model":
        return
    first: dict[str, str] = {}
    for model, _, _, name in training_cells(config):
        other = first.setdefault(model, name)
        for key in ("processes", "shard_base"):
            if config["adapters"][name][key] != config["adapters"][other][key]:
                raise InputError(
                    f"config: adapters.{name}.{key}: is not that of {other}, and both are trained "
                    f"in one job of {model} (one_job_per: model); give both the same"
                )


def adapter_origin(adapter: Mapping[str, Any]) -> str | None:
    """``"hub"`` or ``"dir"`` for an adapter that exists already; ``None`` for one trained here."""
    return next((key for key in ("hub", "dir") if key in adapter), None)


def _is_used(config: Mapping[str, Any], name: str, model: str, task: str) -> bool:
    """Whether the configuration puts an adapter onto this model for this task."""
    adapter = config["adapters"][name]
    return model in adapter["models"] and task in adapter["tasks"]
