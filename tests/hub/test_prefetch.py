"""Prefetch against a hub on the loopback, through the hub's real client."""

import errno
import json
import multiprocessing
import os
import random
import re
import signal
import time

import numpy as np
import pytest
from safetensors.numpy import save

import tiny_models
from hub.server import Hub, Token
from pharos.cluster.doctor import check_models
from pharos.errors import CheckFailed, InputError
from pharos.models import cache, client, fetch, hub
from pharos.models.fetch import snapshot_folder
from pharos.models.load import load_model
from pharos.models.prefetch import prefetch
from pharos.models.shapes import find_shape, known_shape

NAME = "someone/tiny"
FULL = {"dtype": "float32", "precision": "full", "attention": "sdpa"}
TOKEN = "hf_planted0secret0token"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A tiny model, and what else lies about in a repository."""
    folder = tiny_models.write_folder(tmp_path_factory.mktemp("model") / "tiny")
    model = {path.name: path.read_bytes() for path in folder.iterdir()}
    clutter = {
        "README.md": b"# A model\n",
        "pytorch_model.bin": b"a pickle",
        "original/consolidated.safetensors": b"a second copy",
        "modeling_own.py": b"raise SystemExit\n",
    }
    return {**model, **clutter}


@pytest.fixture
def the_hub(files):
    with Hub() as running:
        running.add(NAME, files)
        yield running


@pytest.fixture(autouse=True)
def own_place(tmp_path, monkeypatch, the_hub):
    """A cache of one's own, no credentials, the client pointed at the hub on the loopback."""
    import huggingface_hub
    import huggingface_hub.constants as constants

    monkeypatch.setenv("PHAROS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "token"))
    for name in ("HF_HOME", "HF_HUB_CACHE", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "ENDPOINT", the_hub.endpoint)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    url = the_hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url)
    monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", the_hub.endpoint)
    huggingface_hub.close_session()


@pytest.fixture
def waits(monkeypatch):
    """The seconds that were waited for, without waiting."""
    waited = []
    monkeypatch.setattr(client, "sleep", waited.append)
    return waited


def config(revision="main", **more):
    return {"hub": {"repository": NAME, "revision": revision, **more}}


def fetched(tmp_path, **more):
    return prefetch("tiny", config(**more), tmp_path / "pin.json")


def folder_of(result):
    return snapshot_folder(cache.hub_folder(), NAME, result["source"]["commit"])


def paths(asked):
    return [one.path for one in asked]


# -- what is fetched --------------------------------------------------------------------------


def test_a_model_is_fetched_at_a_commit_and_loads_without_a_network(the_hub, tmp_path):
    commit = the_hub.repositories[NAME].revisions["main"]
    result = fetched(tmp_path)
    assert result["source"] == {
        "kind": "hub",
        "repository": NAME,
        "revision": "main",
        "commit": commit,
    }
    assert result["version"] == commit
    assert result["licence"] == "apache-2.0"
    assert result["sizes"]["parameters"] == result["parameters"]
    asked = len(the_hub.asked)
    loaded = load_model(result, {**FULL, **config()})
    assert sum(p.numel() for p in loaded.model.parameters()) == result["parameters"]
    assert len(the_hub.asked) == asked


def test_only_what_loading_needs_is_fetched(the_hub, tmp_path):
    fetched(tmp_path)
    assert sorted(path.name for path in folder_of(fetched(tmp_path)).iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert len(the_hub.gets("storage")) == 1


def test_only_reading_requests_are_made(the_hub, tmp_path):
    fetched(tmp_path)
    assert {one.method for one in the_hub.asked} <= {"GET", "HEAD"}


def test_what_is_whole_in_the_cache_asks_the_hub_nothing(the_hub, tmp_path):
    first = fetched(tmp_path)
    asked = len(the_hub.asked)
    assert fetched(tmp_path) == first
    assert len(the_hub.asked) == asked


def test_a_branch_stays_where_it_was_until_asked_to_update(the_hub, tmp_path, files):
    first = fetched(tmp_path)
    moved = the_hub.add(NAME, {**files, "README.md": b"new"})
    assert fetched(tmp_path) == first
    (tmp_path / "pin.json").unlink()
    assert fetched(tmp_path)["source"]["commit"] == moved


def test_a_pin_of_another_revision_does_not_count(the_hub, tmp_path, files):
    fetched(tmp_path)
    other = the_hub.add(NAME, {**files, "README.md": b"other"}, revision="v2")
    assert fetched(tmp_path, revision="v2")["source"]["commit"] == other


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"repository": "someone/tiny"}', "\xff"])
def test_a_pin_that_is_not_one_is_made_again(tmp_path, text):
    (tmp_path / "pin.json").write_text(text, encoding="latin-1")
    commit = fetched(tmp_path)["source"]["commit"]
    assert json.loads((tmp_path / "pin.json").read_text())["commit"] == commit


def test_pickles_alone_are_refused_before_anything_is_fetched(the_hub, tmp_path, files):
    pickled = {name: data for name, data in files.items() if not name.endswith(".safetensors")}
    the_hub.add(NAME, pickled)
    with pytest.raises(InputError, match=r"only pickled weights \(pytorch_model\.bin\)"):
        fetched(tmp_path)
    assert the_hub.gets("storage") == []


def test_an_architecture_that_cannot_be_loaded_is_refused_before_its_weights(
    the_hub, tmp_path, files
):
    odd = json.loads(files["config.json"]) | {"model_type": "albert"}
    the_hub.add(NAME, {**files, "config.json": json.dumps(odd).encode()})
    with pytest.raises(InputError, match="transformers has no model of this configuration"):
        fetched(tmp_path)
    assert the_hub.gets("storage") == []


def shards(files, count, there):
    """The files of a model in shards; ``there`` are those that the repository has."""
    names = [f"model-{k:05d}-of-{count:05d}.safetensors" for k in range(1, count + 1)]
    index = {"weight_map": {f"w{k}": name for k, name in enumerate(names)}}
    rest = {name: data for name, data in files.items() if name.endswith(("json", "jinja"))}
    weights = {
        f"model-{k:05d}-of-{count:05d}.safetensors": save({"w": np.zeros(4, np.float32)})
        for k in there
    }
    return {**rest, **weights, "model.safetensors.index.json": json.dumps(index).encode()}


@pytest.mark.parametrize(
    ("there", "message"),
    [
        ([1, 3], r"names shards that are not there: model-00002-of-00003\.safetensors"),
        ([1, 2, 3, 4], r"does not name: model-00004-of-00003\.safetensors"),
    ],
)
def test_missing_and_extra_shards_are_refused_by_name(the_hub, tmp_path, files, there, message):
    the_hub.add(NAME, shards(files, 3, there))
    with pytest.raises(InputError, match=message):
        fetched(tmp_path)
    assert the_hub.gets("storage") == []


def test_a_shard_without_an_index_is_refused(the_hub, tmp_path, files):
    some = shards(files, 2, [1, 2])
    del some["model.safetensors.index.json"]
    the_hub.add(NAME, some)
    with pytest.raises(InputError, match=r"is a shard, and there is no model\.safetensors\.index"):
        fetched(tmp_path)


# -- damage -----------------------------------------------------------------------------------


def test_wrong_content_of_the_right_length_is_fetched_again(the_hub, tmp_path, capfd):
    the_hub.fail("GET /[0-9a-f]{64}", corrupt=True)
    fetched(tmp_path)
    assert len(the_hub.gets("storage")) == 2
    assert '"event": "damaged"' in capfd.readouterr().err


def test_wrong_content_in_a_small_file_is_found_by_its_git_digest(the_hub, tmp_path):
    the_hub.fail(r"GET .*/config\.json", corrupt=True)
    result = fetched(tmp_path)
    assert result["config"]["layers"] == 2


@pytest.mark.parametrize("fault", [{"corrupt": True}, {"shorten": 7}])
def test_what_arrives_damaged_twice_is_an_error_and_leaves_nothing(the_hub, tmp_path, fault):
    the_hub.fail("GET /[0-9a-f]{64}", times=99, **fault)
    with pytest.raises(CheckFailed, match=r"model\.safetensors arrived damaged 2 times"):
        fetched(tmp_path)
    commit = the_hub.repositories[NAME].revisions["main"]
    folder = snapshot_folder(cache.hub_folder(), NAME, commit)
    assert not (folder / "model.safetensors").is_symlink()
    the_hub.faults.clear()
    fetched(tmp_path)


def test_without_digests_the_length_decides(the_hub, tmp_path):
    the_hub.repositories[NAME].digests = False
    the_hub.fail("GET /[0-9a-f]{64}", shorten=7)
    result = fetched(tmp_path)
    assert len(the_hub.gets("storage")) == 2
    weights = folder_of(result) / "model.safetensors"
    weights.resolve().write_bytes(weights.read_bytes()[:-1])
    fetched(tmp_path)
    assert len(the_hub.gets("storage")) == 3


def test_a_file_damaged_later_is_fetched_again_alone(the_hub, tmp_path):
    weights = folder_of(fetched(tmp_path)) / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.resolve().write_bytes(data)
    asked = len(the_hub.asked)
    fetched(tmp_path)
    assert {path.rsplit("/")[-1] for path in paths(the_hub.asked[asked:])} == {
        "model.safetensors",
        the_hub.gets("storage")[0].path.strip("/"),
    }


def test_a_cut_connection_goes_on_where_it_stopped(the_hub, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 100)
    the_hub.fail("GET /[0-9a-f]{64}", cut_after=1000)
    fetched(tmp_path)
    assert [one.range for one in the_hub.gets("storage")] == [None, "bytes=1000-"]


def test_a_storage_that_ignores_ranges_sends_it_all_again(the_hub, tmp_path):
    the_hub.fail("GET /[0-9a-f]{64}", cut_after=1000)
    the_hub.fail("GET /[0-9a-f]{64}", ignore_range=True)
    fetched(tmp_path)
    assert [one.status for one in the_hub.gets("storage")] == [200, 200]


def test_a_range_that_the_storage_refuses_is_one_line(the_hub, tmp_path):
    the_hub.fail("GET /[0-9a-f]{64}", cut_after=1000)
    the_hub.fail("GET /[0-9a-f]{64}", status=416)
    with pytest.raises(CheckFailed, match="the hub answers 416"):
        fetched(tmp_path)
    fetched(tmp_path)


# -- a hub that is busy, slow or away ---------------------------------------------------------


def test_the_hub_is_waited_for_as_long_as_it_says(the_hub, tmp_path, waits):
    the_hub.fail("GET /api/models", status=429, headers={"Retry-After": "7"})
    the_hub.fail("GET /[0-9a-f]{64}", status=503, headers={"Retry-After": "3"})
    the_hub.fail(r"HEAD .*/config\.json", status=429, headers={"RateLimit": '"resolvers";r=0;t=5'})
    fetched(tmp_path)
    assert sorted(waits) == [3, 5, 7]


def test_without_a_word_the_waits_grow(the_hub, tmp_path, waits):
    the_hub.fail("GET /api/models", times=3, status=502)
    fetched(tmp_path)
    assert waits == [1, 2, 4]


def test_a_hub_that_stays_down_is_one_line(the_hub, tmp_path, waits):
    the_hub.fail("GET /api/models", times=99, status=503)
    with pytest.raises(CheckFailed, match="the hub answers 503, 6 times"):
        fetched(tmp_path)
    assert waits == [1, 2, 4, 8, 16]


def test_a_wait_beyond_the_limit_is_refused_at_once(the_hub, tmp_path, waits):
    the_hub.fail("GET /api/models", status=429, headers={"Retry-After": "90000"})
    with pytest.raises(CheckFailed, match="asks to wait 90000 s, which is beyond the 900 s"):
        fetched(tmp_path)
    assert waits == []


def test_the_limit_holds_for_all_waits_together(the_hub, tmp_path, waits):
    the_hub.fail("GET /api/models", times=5, status=429, headers={"Retry-After": "400"})
    with pytest.raises(CheckFailed, match="beyond the 900 s"):
        fetched(tmp_path)
    assert waits == [400, 400]


def test_a_date_to_retry_after_is_understood(the_hub, tmp_path, waits):
    from email.utils import formatdate

    when = formatdate(time.time() + 60, usegmt=True)
    the_hub.fail("GET /api/models", status=429, headers={"Retry-After": when})
    fetched(tmp_path)
    assert len(waits) == 1 and 55 < waits[0] <= 60


def test_a_silent_hub_is_given_up(the_hub, tmp_path, monkeypatch):
    monkeypatch.setattr(client, "TIMEOUT_S", 0.2)
    the_hub.fail("GET /api/models", delay_s=1.0)
    with pytest.raises(CheckFailed, match=r"cannot be reached \(ReadTimeout\)"):
        fetched(tmp_path)


def test_a_slow_hub_is_waited_for(the_hub, tmp_path):
    the_hub.fail("GET /api/models", delay_s=0.3)
    fetched(tmp_path)


def test_an_endpoint_that_is_away_is_one_line(the_hub, tmp_path, monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(CheckFailed, match=r"http://127\.0\.0\.1:9 cannot be reached") as error:
        fetched(tmp_path)
    assert "\n" not in str(error.value)


def test_an_endpoint_that_is_no_hub_is_one_line(the_hub, tmp_path):
    the_hub.fail("GET /api/models", status=200)
    with pytest.raises(CheckFailed, match="does not answer like a hub"):
        fetched(tmp_path)


def test_offline_says_which_files_are_missing(the_hub, tmp_path, monkeypatch):
    weights = folder_of(fetched(tmp_path)) / "model.safetensors"
    monkeypatch.setattr(hub, "TOLD_OFFLINE", True)
    asked = len(the_hub.asked)
    fetched(tmp_path)
    weights.unlink()
    with pytest.raises(CheckFailed, match=r"offline .*not in the cache: model\.safetensors;"):
        fetched(tmp_path)
    with pytest.raises(CheckFailed, match=r"offline .*revision 'v2' holds is not known"):
        fetched(tmp_path, revision="v2")
    assert len(the_hub.asked) == asked


# -- credentials ------------------------------------------------------------------------------


@pytest.fixture(params=["HF_TOKEN", "HF_TOKEN_PATH"])
def credentials(request, monkeypatch, tmp_path, the_hub):
    """A token, planted where a user keeps one."""
    the_hub.tokens[TOKEN] = Token(reads=(NAME,))
    if request.param == "HF_TOKEN":
        monkeypatch.setenv("HF_TOKEN", TOKEN)
    else:
        (tmp_path / "token").write_text(TOKEN + "\n")
    return the_hub.tokens[TOKEN]


@pytest.mark.parametrize("kind", ["private", "gated"])
def test_a_token_opens_what_it_may_read(the_hub, tmp_path, credentials, kind, capfd):
    setattr(the_hub.repositories[NAME], kind, True)
    fetched(tmp_path)
    assert client.has_token()
    assert TOKEN not in "".join(capfd.readouterr())


def test_the_token_is_not_shown_to_the_storage(the_hub, tmp_path, credentials):
    fetched(tmp_path)
    assert {one.token for one in the_hub.gets("storage")} == {None}
    assert TOKEN in {one.token for one in the_hub.gets("hub")}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("gated", r"is gated: accept its terms at http://[^ ]*/someone/tiny, then set HF_TOKEN"),
        ("private", "no such repository, or a private one, for which HF_TOKEN is needed"),
    ],
)
def test_without_a_token_the_cure_is_named(the_hub, tmp_path, kind, message):
    setattr(the_hub.repositories[NAME], kind, True)
    with pytest.raises(CheckFailed, match=message) as error:
        fetched(tmp_path)
    assert "\n" not in str(error.value)
    assert not client.has_token()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("gated", "is gated: this token has no access: accept its terms"),
        ("private", "no such repository, or a private one that this token may not read"),
    ],
)
def test_a_token_without_access_is_told_so(the_hub, tmp_path, credentials, kind, message):
    setattr(the_hub.repositories[NAME], kind, True)
    credentials.reads = ()
    with pytest.raises(CheckFailed, match=message) as error:
        fetched(tmp_path)
    assert TOKEN not in str(error.value)


def test_a_token_that_does_not_exist_is_not_taken_for_a_wrong_name(the_hub, tmp_path, credentials):
    the_hub.tokens.clear()
    with pytest.raises(
        CheckFailed, match=r"refuses the token of HF_TOKEN.*make one with read"
    ) as e:
        fetched(tmp_path)
    assert TOKEN not in str(e.value)


@pytest.mark.parametrize(
    ("role", "permissions", "warned"),
    [
        ("read", (), False),
        ("write", (), True),
        ("fineGrained", ("repo.content.read",), False),
        ("fineGrained", ("repo.content.read", "repo.write"), True),
    ],
)
def test_a_token_that_may_write_gives_a_warning(
    the_hub, tmp_path, credentials, role, permissions, warned, capfd
):
    credentials.role, credentials.permissions = role, permissions
    fetched(tmp_path)
    assert ("may do more than read" in capfd.readouterr().err) == warned


def test_a_hub_that_does_not_say_who_is_asking_is_asked_all_the_same(
    the_hub, tmp_path, credentials, waits
):
    the_hub.fail("whoami", status=429, headers={"Retry-After": "60"})
    fetched(tmp_path)
    assert waits == []


def test_unknown_names_are_one_line(the_hub, tmp_path):
    with pytest.raises(CheckFailed, match="no revision 'v9'; its branches and tags are listed at"):
        fetched(tmp_path, revision="v9")
    other = {"hub": {"repository": "someone/else", "revision": "main"}}
    with pytest.raises(CheckFailed, match="model tiny: hub: someone/else: no such repository"):
        prefetch("tiny", other)


def test_a_request_that_is_not_reading_is_never_sent(the_hub):
    import huggingface_hub

    client.open_hub()
    with pytest.raises(CheckFailed, match="Pharos only reads the hub"):
        huggingface_hub.get_session().post(f"{the_hub.endpoint}/api/repos/create", json={})
    assert the_hub.asked == []


# -- room, rights and places ------------------------------------------------------------------


def test_no_room_is_said_before_the_weights_are_fetched(the_hub, tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "SPARE", 1 << 60)
    with pytest.raises(CheckFailed, match=r"GB are needed and .* are left by the disk of"):
        fetched(tmp_path)
    assert the_hub.gets("storage") == []


@pytest.mark.parametrize("command", ["lfs", "quota"])
@pytest.mark.parametrize(
    ("line", "left"),
    [
        ("/data 900 0 1000 - 5 0 0 -", 100 * 1024),
        ("/data 1100* 900 1000 6days 5 0 0 -", 0),
        ("/data 900 950 0 - 5 0 0 -", 50 * 1024),
        ("/data 900 0 0 - 5 0 0 -", None),
    ],
)
def test_a_quota_counts_where_it_can_be_read(tmp_path, monkeypatch, command, line, left):
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / command).write_text(f"#!/bin/sh\necho 'Disk quotas for user'\necho '{line}'\n")
    (tools / command).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/bin")
    assert fetch.quota_left(tmp_path) == left


def test_a_quota_that_is_too_small_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "quota_left", lambda _: 1000)
    with pytest.raises(CheckFailed, match=r"0\.0 MB are left by the quota of"):
        fetched(tmp_path)


def test_a_full_disk_in_the_middle_is_one_line(tmp_path, monkeypatch):
    import huggingface_hub

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", full)
    with pytest.raises(CheckFailed, match="no room left on the disk of the cache"):
        fetched(tmp_path)


def test_a_read_only_cache_that_has_everything_will_do(tmp_path, monkeypatch):
    first = fetched(tmp_path)

    def read_only(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system", "the cache")

    monkeypatch.setattr(cache.Path, "mkdir", read_only)
    assert fetched(tmp_path) == first
    (folder_of(first) / "config.json").unlink()
    with pytest.raises(CheckFailed, match=r"the cache cannot be written .*PHAROS_CACHE"):
        fetched(tmp_path)


@pytest.mark.parametrize(
    ("kind", "in_job", "warned"),
    [("tmpfs", True, True), ("ext4", True, True), ("nfs4", True, False), ("ext4", False, False)],
)
def test_a_cache_on_the_nodes_own_disk_is_warned_of_under_slurm(
    tmp_path, monkeypatch, capfd, kind, in_job, warned
):
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "22 1 0:1 / / rw - ext4 /dev/sda rw\n"
        f"23 22 0:2 / {str(tmp_path).replace(' ', chr(92) + '040')} rw shared:1 - {kind} x rw\n"
    )
    monkeypatch.setattr(cache, "MOUNTS", mounts)
    if in_job:
        monkeypatch.setenv("SLURM_JOB_ID", "7")
    fetched(tmp_path)
    assert ("on this node's own disk" in capfd.readouterr().err) == warned


# -- two at once, and kills -------------------------------------------------------------------


def in_another_process(target, *arguments):
    process = multiprocessing.get_context("fork").Process(target=target, args=arguments)
    process.start()
    return process


def test_two_jobs_that_want_the_same_model_fetch_it_once(the_hub, tmp_path):
    the_hub.fail("GET /[0-9a-f]{64}", delay_s=0.3)
    jobs = [
        in_another_process(prefetch, "tiny", config(), tmp_path / f"pin{k}.json") for k in range(3)
    ]
    for job in jobs:
        job.join()
    assert [job.exitcode for job in jobs] == [0, 0, 0]
    assert len(the_hub.gets("storage")) == 1


def test_without_flock_a_dead_fetch_does_not_stop_the_next(the_hub, tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", unsupported)  # for Pharos and for the client alike
    monkeypatch.setattr(cache, "STALE_AFTER_S", 0.3)
    monkeypatch.setattr(cache, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(cache, "LOOK_AGAIN_S", 0.05)
    the_hub.fail("GET /[0-9a-f]{64}", delay_s=5)
    first = in_another_process(prefetch, "tiny", config())
    while not the_hub.gets("storage"):
        time.sleep(0.01)
    first.kill()
    first.join()
    held = list((tmp_path / "cache").rglob("*.lock")) + list((tmp_path / "cache").rglob("*.held"))
    assert held
    second = in_another_process(prefetch, "tiny", config())
    second.join(20)
    assert second.exitcode == 0


def large_model(files, shard_count, shard_bytes):
    """A model of ``shard_count`` shards; their content is whatever, their headers are right."""
    some = shards(files, shard_count, [])
    draw = np.random.default_rng(7)
    for k in range(1, shard_count + 1):
        weights = draw.integers(0, 255, shard_bytes, dtype=np.uint8).view(np.float32)
        some[f"model-{k:05d}-of-{shard_count:05d}.safetensors"] = save({f"w{k}": weights})
    return some


def test_a_fetch_killed_at_any_moment_ends_whole_and_repeats_one_file_at_most(
    the_hub, tmp_path, files
):
    commit = the_hub.add(NAME, large_model(files, 10, 20_000_000))
    the_hub.bytes_per_s = 150e6
    moments = random.Random(20)
    pin = tmp_path / "pin.json"
    kills = 0
    while kills < 20:
        asked = len(the_hub.asked)
        run = in_another_process(prefetch, "tiny", config(), pin)
        run.join(moments.uniform(0.02, 0.5))
        if run.exitcode is not None:
            # It was finished before the moment came: begin another fetch to be killed.
            assert run.exitcode == 0
            for path in folder_of_commit(commit).glob("*.safetensors"):
                path.resolve().unlink()
                path.unlink()
            the_hub.asked.clear()
            continue
        os.kill(run.pid, signal.SIGKILL)
        run.join()
        kills += 1
        time.sleep(0.02)  # until the server has noticed
        unfinished = [one for one in the_hub.asked[asked:] if one.server == "storage"]
        assert sum(not one.whole for one in unfinished) <= 1
    the_hub.bytes_per_s = None
    result = fetched(tmp_path)
    assert result["source"]["commit"] == commit
    assert result["bytes"] > 200_000_000
    # Since the last fresh start, every file came whole once.
    whole = [one.path for one in the_hub.gets("storage") if one.whole]
    assert len(whole) - len(set(whole)) <= kills
    assert list(folder_of_commit(commit).parents[1].rglob("*.incomplete")) == []


def folder_of_commit(commit):
    return snapshot_folder(cache.hub_folder(), NAME, commit)


def test_what_a_dead_fetch_left_is_cleared_but_not_what_others_are_at(tmp_path, monkeypatch):
    home = tmp_path / "home"
    monkeypatch.setenv("HF_HOME", str(home))
    blobs = home / "hub" / "models--someone--tiny" / "blobs"
    blobs.mkdir(parents=True)
    old, new = blobs / "a.incomplete", blobs / "b.incomplete"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 3600, time.time() - 3600))
    fetched(tmp_path)
    assert not old.exists()
    assert new.exists()


# -- GGUF -------------------------------------------------------------------------------------


@pytest.fixture
def gguf_file(tmp_path):
    digest = tiny_models.write_gguf(tmp_path / "model.gguf")
    return (tmp_path / "model.gguf"), digest


def test_a_gguf_file_is_fetched_by_name_and_kept_as_safetensors(the_hub, tmp_path, gguf_file):
    path, digest = gguf_file
    commit = the_hub.add(NAME, {"q4/model.gguf": path.read_bytes(), "q8/model.gguf": b"other"})
    result = fetched(tmp_path, gguf="q4/model.gguf")
    assert result["source"]["commit"] == commit
    assert result["version"] == digest
    assert [one.range for one in the_hub.gets("storage")] == ["bytes=0-65535", None]
    loaded = load_model(result, {**FULL, **config(gguf="q4/model.gguf")})
    assert loaded.context_length == 512
    asked = len(the_hub.asked)
    assert fetched(tmp_path, gguf="q4/model.gguf") == result
    assert len(the_hub.asked) == asked


def test_a_gguf_architecture_that_is_not_read_is_refused_before_it_is_fetched(
    the_hub, tmp_path, gguf_file
):
    odd = gguf_file[0].read_bytes().replace(b"llama", b"lorem", 1)
    the_hub.add(NAME, {"model.gguf": odd})
    with pytest.raises(
        InputError, match=r"does not read GGUF of architecture 'lorem'; known: .*llama"
    ):
        fetched(tmp_path, gguf="model.gguf")
    assert [one.range for one in the_hub.gets("storage")] == ["bytes=0-65535"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("modle.gguf", r"no file 'modle\.gguf'; did you mean model\.gguf\?"),
        ("big-00001-of-00003.gguf", "one of 3 parts"),
        ("text.gguf", "not a GGUF file"),
    ],
)
def test_a_gguf_file_that_cannot_be_used_is_refused(the_hub, tmp_path, gguf_file, name, message):
    content = gguf_file[0].read_bytes()
    the_hub.add(
        NAME,
        {"model.gguf": content, "big-00001-of-00003.gguf": content, "text.gguf": b"just text"},
    )
    with pytest.raises(InputError, match=message):
        fetched(tmp_path, gguf=name)


def test_a_gguf_file_of_a_folder_is_hashed_and_converted(gguf_file):
    path, digest = gguf_file
    result = prefetch("tiny", {"dir": str(path)})
    assert result["version"] == digest
    assert result["source"] == {"kind": "dir", "gguf": "model.gguf"}
    assert prefetch("tiny", {"dir": str(path)}) == result
    assert load_model(result, {**FULL, "dir": str(path)}).context_length == 512


def test_every_refusal_is_one_line(the_hub, tmp_path, waits):
    for status in (400, 401, 403, 404, 410, 500, 504):
        the_hub.faults.clear()
        the_hub.fail("GET /api/models", times=99, status=status)
        with pytest.raises(CheckFailed) as error:
            fetched(tmp_path)
        assert re.fullmatch(r"model tiny: hub: someone/tiny[^\n]+", str(error.value))


# -- what the doctor asks ---------------------------------------------------------------------


def told(models):
    """Levels and texts of the doctor's findings, and what it found missing."""
    missing = {}
    findings = list(check_models(models, missing))
    return [(f.what, f.level) for f in findings], " ".join(map(str, findings)), missing


def test_the_doctor_counts_what_is_still_to_fetch_and_fetches_nothing(the_hub, tmp_path, files):
    levels, _, missing = told({"tiny": config()})
    assert levels == [("token", "warning"), ("models", "ok")]
    wanted = hub.wanted_files(files)
    assert missing == {"tiny": sum(len(files[name]) for name in wanted)}
    assert the_hub.gets("storage") == []
    fetched(tmp_path)
    assert told({"tiny": config()})[2] == {"tiny": 0}


def test_the_doctor_sees_a_gated_model_before_anything_is_fetched(the_hub, files, monkeypatch):
    the_hub.add("closed/model", files, gated=True)
    models = {
        "tiny": config(),
        "closed": {"hub": {"repository": "closed/model", "revision": "main"}},
    }
    levels, text, _ = told(models)
    assert levels == [("token", "warning"), ("models", "ok"), ("models", "error")]
    assert "closed: hub: closed/model is gated: accept its terms at" in text
    the_hub.tokens[TOKEN] = Token("read", reads=("closed/model",))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    levels, text, _ = told(models)
    assert levels == [("token", "ok"), ("models", "ok"), ("models", "ok")]
    assert "it may only read" in text


@pytest.mark.parametrize(
    ("token", "level", "words"),
    [
        (Token("write"), "warning", "it may do more than read (write)"),
        (None, "error", "the hub refuses the token"),
    ],
)
def test_the_doctor_judges_the_token_and_never_shows_it(
    the_hub, monkeypatch, capsys, token, level, words
):
    if token is not None:
        the_hub.tokens[TOKEN] = token
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    levels, text, _ = told({"tiny": config()})
    assert levels[0][1] == level
    assert words in text
    said = capsys.readouterr()
    assert TOKEN not in text + said.out + said.err


def test_the_doctor_asks_a_hub_that_is_gone_only_once(the_hub, monkeypatch, waits):
    the_hub.__exit__()
    levels, text, _ = told({"one": config(), "two": config()})
    assert levels == [("token", "warning"), ("models", "error")]
    assert "cannot be reached" in text


def test_without_a_model_on_the_hub_nothing_is_asked(the_hub):
    levels, text, _ = told({"ours": {"dir": "/models/ours"}})
    assert levels == [("hub", "ok")]
    assert "no token is needed" in text
    assert the_hub.asked == []


# -- the shape of a model that is not fetched ---------------------------------------------------


def test_a_shape_costs_a_configuration_and_is_asked_for_once(the_hub, tmp_path):
    results = tmp_path / "results"
    assert known_shape("tiny", config(), results) is None
    shape = find_shape("tiny", config(), results)
    resolved = [path for path in paths(the_hub.asked) if "/resolve/" in path]
    assert {path.rpartition("/")[2] for path in resolved} == {"config.json"}
    assert not (results / "pins").exists()
    asked = len(the_hub.asked)
    assert known_shape("tiny", config(), results) == shape
    assert find_shape("tiny", config(), results) == shape
    assert len(the_hub.asked) == asked
    # Fetching it afterwards finds the same, and all of the model.
    result = fetched(tmp_path)
    assert result["sizes"] == shape["sizes"]
    assert 0 < shape["bytes"] <= result["bytes"]


def test_a_shape_in_a_gguf_file_is_known_when_it_is_fetched(the_hub, tmp_path):
    with pytest.raises(CheckFailed, match="known when it has been fetched"):
        find_shape("tiny", config(gguf="model.gguf"), tmp_path)
    assert the_hub.asked == []
