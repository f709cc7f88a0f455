"""A wrong configuration is refused in one line that names the key."""

import copy
import math
from pathlib import Path

import pytest
import yaml

from pharos.config import check_config_file, load_config, nearest, seed_pairs
from pharos.config_manual import config_manual
from pharos.errors import InputError

ROOT = Path(__file__).parents[2]
SCHEMA = ROOT / "workflow/schemas/config.schema.yaml"
DEFAULT = yaml.safe_load((ROOT / "config/config.yaml").read_text())
MODEL = "smollm2-135m-instruct"


def changed(path, value):
    """The default configuration with one value changed (or removed, for None)."""
    raw = copy.deepcopy(DEFAULT)
    *parents, last = path
    place = raw
    for key in parents:
        place = place.setdefault(key, {})
    if value is None:
        del place[last]
    else:
        place[last] = value
    return raw


@pytest.mark.parametrize("name", ["config.yaml", "cluster.yaml"])
def test_the_configurations_that_ship_are_accepted(name):
    config = load_config(yaml.safe_load((ROOT / "config" / name).read_text()), SCHEMA)
    assert config["shortcut_gate"]["ceiling"] == 0.72


def test_defaults_are_filled_in_and_the_input_is_not_changed():
    raw = copy.deepcopy(DEFAULT)
    config = load_config(raw, SCHEMA)
    assert raw == DEFAULT
    assert config["evaluation"]["mode"] == "likelihood"
    assert config["adapters"]["lora-r16"]["models"] == [MODEL]
    assert config["models"][MODEL]["dtype"] == "auto"


def test_every_key_of_the_schema_has_a_description():
    schema = yaml.safe_load(SCHEMA.read_text())
    parts = {"": schema, **schema["$defs"]}
    bare = [
        f"{name}.{key}"
        for name, part in parts.items()
        for key, entry in part.get("properties", {}).items()
        if "description" not in entry and "$ref" not in entry and not {"properties"} & set(entry)
    ]
    assert bare == []


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["evaluatoin"], {}, "unknown key evaluatoin; did you mean evaluation?"),
        (
            ["adapters", "lora-r16", "learning_rte"],
            1.0,
            "unknown key adapters.lora-r16.learning_rte; did you mean learning_rate?",
        ),
        (["adapters", "lora-r16", "rank"], "16", "adapters.lora-r16.rank: '16' is of the wrong"),
        (["adapters", "lora-r16", "rank"], 0, "adapters.lora-r16.rank: 0 is less than"),
        (["device"], "gpu", "device: 'gpu' is unknown; did you mean cpu? (known: cpu, cuda)"),
        (["device"], "cudda", "device: 'cudda' is unknown; did you mean cuda?"),
        (["tasks"], None, "the key 'tasks' is missing"),
        (["models", MODEL, "dir"], ".", "exactly one of wheel, hub, dir is needed, found wheel"),
        (["models", MODEL, "wheel"], None, "exactly one of wheel, hub, dir is needed, found none"),
        (["models", "A B"], {"dir": "."}, "the name 'A B' will not do"),
        (["models", "../x"], {"dir": "."}, "the name '../x' will not do"),
        (["models", "x"], {"dir": "no such"}, "models.x.dir: no folder 'no such'"),
        (["adapters", "base"], {}, "adapters"),
        (
            ["adapters", "lora-r16", "models"],
            ["smollm2-135m"],
            f"unknown model 'smollm2-135m'; did you mean {MODEL}?",
        ),
        (["adapters", "lora-r16", "tasks"], ["wach"], "unknown task 'wach'; did you mean watch?"),
        (["tasks", "watch", "test_events"], 10_000, "tasks.watch.test_events: 10000 is more than"),
        (
            ["tasks", "watch"],
            {
                **DEFAULT["tasks"]["watch"],
                "seeds": {"train": [7], "test": [7]},
                "train_events": 640,
            },
            "overlap in seed 7",
        ),
        (["tasks", "watch", "seeds", "train"], [1, 2], "2 train seeds for 1 test seeds"),
        (["tasks", "watch", "seeds", "test"], [1, 1], "tasks.watch.seeds.test"),
        (["tasks", "watch", "prompt", "template"], "no text", "'no text' has no {text}, the place"),
        (["tasks", "watch", "prompt", "answers", "negative"], "SIGNIFICANT", "are the same"),
        (["tasks", "watch", "corpus"], {"file": "none.jsonl"}, "'none.jsonl' cannot be read"),
        (["tasks", "watch", "corpus"], {"generator": "watch"}, "the key 'events' is missing"),
        (["tasks", "watch", "corpus", "generator"], "wach", "did you mean watch?"),
        (["tasks", "watch", "corpus", "columns"], {}, "corpus.columns: has no meaning"),
        (["shortcut_gate", "ceiling"], 0.5, "shortcut_gate.ceiling: 0.5"),
        (["shortcut_gate", "ceiling"], math.nan, "shortcut_gate.ceiling: nan is not a finite"),
        (["adapters", "lora-r16", "learning_rate"], math.inf, "inf is not a finite number"),
        (["tasks", "watch", "seeds", "test"], [10**30], "tasks.watch.seeds.test.0: 1000"),
        (["tasks", "watch", "prompt", "answers", "negative"], "\n ", "is empty; text is expected"),
        (["models", 7], {"dir": "."}, "models: the name 7 is not text; write it in quotes"),
        (["models", "x"], {"dir": "x" * 5000}, "models.x.dir: no folder 'xxx"),
        (["models", "x"], {"dir": "\0"}, "models.x.dir: no folder"),
        (["device"], True, "device: true is unknown"),
        (["device"], "x" * 5000, "device: 'xxx"),
        (["adapters"], "x" * 5000, "adapters: 'xxx"),
        (["report"], {"title": None}, "report.title: null is of the wrong type"),
    ],
)
def test_a_fault_is_named_in_one_line(path, value, message):
    with pytest.raises(InputError) as error:
        load_config(changed(path, value), SCHEMA)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 250


@pytest.mark.parametrize("value", [None, [[]], {1: 2}])
def test_any_value_at_any_place_is_accepted_or_refused_in_one_line(value):
    for path in paths_of(DEFAULT):
        raw = copy.deepcopy(DEFAULT)
        place = raw
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        try:
            load_config(raw, SCHEMA)
        except InputError as error:
            assert "\n" not in str(error), path


def paths_of(value, path=()):
    """Every place in a configuration."""
    inner = enumerate(value) if isinstance(value, list) else ()
    for key, item in value.items() if isinstance(value, dict) else inner:
        yield (*path, key)
        yield from paths_of(item, (*path, key))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"models: {}\ntasks: {}\nmodels: {}\n", r":3: the key 'models' stands twice .* line 1"),
        (b"a:\n  b: 1\n  b: 2\n", r":3: the key 'b' stands twice in one mapping, first in line 2"),
        (b'{"a": 1, "a": 2}', r"the key 'a' stands twice"),
        (b"a: [1\nb: 2\n", r":2: not YAML: expected"),
        (b"a:\n\t- 1\n", r":2: not YAML: found character"),
        (b"- a\n", r"keys at the top level are expected"),
        (b"", r"keys at the top level are expected"),
        (b"a: \xff\n", r"not UTF-8 at byte 4"),
        (b"a: \x01\n", r"not YAML"),
    ],
)
def test_a_file_that_would_be_misread_is_refused_with_its_line(tmp_path, text, message):
    file = tmp_path / "my config.yaml"
    file.write_bytes(text)
    with pytest.raises(InputError, match=message) as error:
        check_config_file(file)
    assert str(error.value).startswith(f"config: {file}")
    assert "\n" not in str(error.value)


def test_a_missing_configuration_file_is_named(tmp_path):
    with pytest.raises(InputError, match=r"none\.yaml: cannot be read: No such file"):
        check_config_file(tmp_path / "none.yaml")


def test_equal_keys_in_different_mappings_and_anchors_are_fine(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("a: &x {rank: 1}\nb: {rank: 2}\nc: {<<: *x, rank: 3}\n")
    check_config_file(file)
    for shipped in ("config.yaml", "cluster.yaml"):
        check_config_file(ROOT / "config" / shipped)


def test_an_empty_corpus_file_is_refused(tmp_path):
    file = tmp_path / "empty file.jsonl"
    file.touch()
    with pytest.raises(InputError, match=r"empty file\.jsonl' is empty"):
        load_config(changed(["tasks", "watch", "corpus"], {"file": str(file)}), SCHEMA)


def test_one_file_cannot_be_cut_in_two_ways(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text("{}\n")
    with pytest.raises(InputError, match="would cut the same file in two ways"):
        load_config(changed(["tasks", "watch", "corpus"], {"file": str(file)}), SCHEMA)


def test_one_train_seed_serves_all_test_seeds():
    assert list(seed_pairs({"seeds": {"train": [1], "test": [7, 11]}})) == [(1, 7), (1, 11)]
    assert list(seed_pairs({"seeds": {"train": [1, 2], "test": [7, 11]}})) == [(1, 7), (2, 11)]


def test_the_manual_is_the_schemas():
    manual = (ROOT / "config/README.md").read_text()
    assert manual == config_manual(yaml.safe_load(SCHEMA.read_text())), "run: make format"


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        ({"dir": ".", "rank": 8}, "adapters.theirs.rank: has no meaning for an adapter from a dir"),
        ({"dir": "no such"}, "adapters.theirs.dir: no folder 'no such'"),
        (
            {"dir": ".", "hub": {"repository": "a/b", "revision": "main"}},
            "adapters.theirs: one of hub and dir is needed, found both",
        ),
    ],
)
def test_an_adapter_that_exists_takes_no_training_settings(adapter, message):
    config = yaml.safe_load((ROOT / "config/config.yaml").read_text())
    config["adapters"] = {"theirs": adapter}
    with pytest.raises(InputError) as error:
        load_config(config, SCHEMA)
    assert message in str(error.value)


def test_trainings_of_one_job_have_the_same_processes():
    adapters = {"one": {"processes": 2}, "two": {}}
    config = {**DEFAULT, "adapters": adapters}
    assert load_config(config, SCHEMA)["one_job_per"] == "result"
    with pytest.raises(InputError, match=r"^config: adapters\.two\.processes: is not that of one"):
        load_config({**config, "one_job_per": "model"}, SCHEMA)
    same = {**config, "adapters": {"one": {}, "two": {}}, "one_job_per": "model"}
    assert load_config(same, SCHEMA)["one_job_per"] == "model"


@pytest.mark.parametrize(
    ("name", "known", "near"),
    [
        ("tyni", ["small", "tiny"], "tiny"),
        ("labl", ["label", "site"], "label"),
        ("cluster", ["body", "site"], None),
        ("text", ["site"], None),
        ("x", [], None),
    ],
)
def test_a_name_is_suggested_only_where_it_is_close(name, known, near):
    assert nearest(name, known) == near
