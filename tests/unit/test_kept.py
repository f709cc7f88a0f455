"""What is kept of a job that has not ended: found again whole, or not at all."""

import ast
import json
from pathlib import Path

import pytest

from pharos.errors import CheckFailed
from pharos.runtime.kept import done_of, is_kept, keep, kept_path, key_of, take

LIBRARY = Path(__file__).resolve().parents[2] / "src/pharos"
OUTPUTS = ["results/a/b c.json", "results/a/b c.jsonl"]


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def kept(key="key"):
    for name in OUTPUTS:
        kept_path(name).parent.mkdir(parents=True, exist_ok=True)
        kept_path(name).write_text(f"of {name}")
    keep(key, OUTPUTS)


def test_what_is_kept_is_found_by_its_key_and_put_in_place(place):
    assert not is_kept("key", OUTPUTS)
    kept()
    assert is_kept("key", OUTPUTS)
    assert not is_kept("another", OUTPUTS)
    for _ in range(2):  # a second time over what is there
        take(OUTPUTS)
        assert [(place / name).read_text() for name in OUTPUTS] == [f"of {n}" for n in OUTPUTS]
    (place / OUTPUTS[1]).unlink()  # as Snakemake does before a job runs again
    assert is_kept("key", OUTPUTS)


@pytest.mark.parametrize("damage", ["changed", "cut short", "gone", "no record", "no JSON"])
def test_what_is_no_longer_whole_is_not_taken(place, damage):
    kept()
    if damage in ("no record", "no JSON"):
        record = kept_path(OUTPUTS[0]).with_suffix(".kept")
        record.write_text("[]" if damage == "no record" else "{")
    elif damage == "gone":
        kept_path(OUTPUTS[1]).unlink()
    else:
        kept_path(OUTPUTS[1]).write_text("" if damage == "cut short" else "edited")
    assert not is_kept("key", OUTPUTS)
    with pytest.raises(CheckFailed, match="remove results/kept, and the same command"):
        take(OUTPUTS)


def test_a_file_system_without_links_gets_copies(place, monkeypatch):
    kept()

    def refuse(*_):
        raise OSError("no links here")

    monkeypatch.setattr("os.link", refuse)
    take(OUTPUTS)
    assert (place / OUTPUTS[1]).read_text() == f"of {OUTPUTS[1]}"


def test_a_key_is_of_inputs_settings_platform_and_code(monkeypatch):
    from pharos.runtime import kept as module

    keys = {
        key_of({"corpus": "1"}, {"a": 1}),
        key_of({"corpus": "2"}, {"a": 1}),
        key_of({"corpus": "1"}, {"a": 2}),
        key_of({"corpus": "1"}, {"a": 1}, "platform"),
    }
    assert key_of({"corpus": "1"}, {"a": 1}) in keys
    monkeypatch.setattr(module, "_code", lambda: "other")
    assert key_of({"corpus": "1"}, {"a": 1}) not in keys
    assert len(keys) == 4


def test_the_code_of_a_key_is_all_that_evaluations_and_trainings_import():
    from pharos.runtime.kept import CODE

    counted = {path for pattern in CODE for path in LIBRARY.glob(pattern)}
    # What they say of a fault is no part of a result.
    counted |= {LIBRARY / "errors.py", LIBRARY / "config.py", LIBRARY / "__init__.py"}
    left = [LIBRARY / "evaluate/cells.py", LIBRARY / "finetune/cells.py"]
    seen = set(left)
    while left:
        tree = ast.parse(left.pop().read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pharos"):
                place = LIBRARY.joinpath(*node.module.split(".")[1:])
                for path in [
                    place.with_suffix(".py"),
                    *(place / f"{a.name}.py" for a in node.names),
                ]:
                    if path.is_file() and path not in seen:
                        seen.add(path)
                        left.append(path)
    assert {LIBRARY / "predictions.py", LIBRARY / "finetune/packed.py"} <= seen
    assert seen <= counted


def test_the_log_says_what_is_taken_up(place, capfd):
    kept()
    parts = {"one": ("key", OUTPUTS), "two": ("key", ["results/a/other.json"])}
    assert done_of(parts) == {"one"}
    assert json.loads(capfd.readouterr().err) == {"event": "kept", "of": 2, "parts": ["one"]}
