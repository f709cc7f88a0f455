"""Adapters that were made elsewhere go with the base they name, or not at all."""

import json

import pytest

import tiny_models
from pharos.errors import InputError
from pharos.models.adapter import adopt
from pharos.models.load import check_adapter
from pharos.models.prefetch import prefetch

BASE = {
    "source": {"kind": "hub", "repository": "a/base", "revision": "main", "commit": "c" * 40},
    "version": "c" * 40,
}


@pytest.fixture
def adapter(tmp_path):
    """An adapter's folder, and how to say what its base is."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(b"weights")

    def names(**config):
        (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **config}))
        return {"dir": str(folder)}

    return names


@pytest.mark.parametrize("revision", ["c" * 40, "main"])
def test_an_adapter_of_this_base_is_taken_and_named_as_if_trained_here(adapter, tmp_path, revision):
    source = adapter(base_model_name_or_path="a/base", revision=revision)
    adopted = adopt("theirs", source, BASE, tmp_path / "target")
    check_adapter(tmp_path / "target", BASE)
    assert adopted["names"] == {"base_model_name_or_path": "a/base", "revision": revision}
    assert set(adopted["files"]) == {"adapter_config.json", "adapter_model.safetensors"}
    assert (tmp_path / "target/adapter_model.safetensors").read_bytes() == b"weights"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"base_model_name_or_path": "a/other"}, "base is 'a/other', the model is 'a/base'"),
        ({}, "base is None"),
        (
            {"base_model_name_or_path": "a/base", "revision": "d" * 40},
            "base is revision 'dddd.*the model is 'cccc",
        ),
        ({"base_model_name_or_path": "a/base", "revision": "v2"}, "base is revision 'v2'"),
    ],
)
def test_another_base_or_revision_is_refused(adapter, tmp_path, config, message):
    with pytest.raises(InputError, match=f"adapter theirs: .*{message}"):
        adopt("theirs", adapter(**config), BASE, tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_an_adapter_without_a_revision_is_taken_with_a_warning(adapter, tmp_path, capfd):
    source = adapter(base_model_name_or_path="a/base", revision=None)
    adopt("theirs", source, BASE, tmp_path / "target")
    assert "does not say which revision of a/base" in capfd.readouterr().err


def test_the_same_folder_of_another_content_is_another_base(adapter, tmp_path):
    one = prefetch("m", {"dir": str(tiny_models.write_folder(tmp_path / "m"))})
    source = adapter(base_model_name_or_path="dir", revision="0" * 64)
    with pytest.raises(InputError, match="base is revision '000"):
        adopt("theirs", source, one, tmp_path / "target")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("adapter_config.json", "{", "is not JSON"),
        ("adapter_config.json", "[]", "is not a JSON object"),
        ("adapter_config.json", None, r"no adapter_config\.json"),
        ("adapter_model.safetensors", None, r"no adapter_model\.safetensors"),
    ],
)
def test_what_is_no_adapter_is_refused(adapter, tmp_path, name, text, message):
    source = adapter(base_model_name_or_path="a/base")
    path = tmp_path / "theirs" / name
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(InputError, match=message):
        adopt("theirs", source, BASE, tmp_path / "target")
