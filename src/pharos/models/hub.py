"""A model on the Hugging Face hub: fetched at a commit, checked against the hub's digests."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pharos.config import did_you_mean
from pharos.errors import CheckFailed, InputError
from pharos.models import gguf
from pharos.models.cache import TOLD_OFFLINE, cache_root, hub_folder, locked, warn_if_node_local
from pharos.models.client import check_token, hub_errors_in_words, open_hub
from pharos.models.describe import (
    TEXT_SUFFIXES,
    describe_folder,
    refuse_unknown_architecture,
    refuse_without_weights,
    refuse_wrong_shards,
    wanted_files,
)
from pharos.models.fetch import Published, bring, digest_if_whole, snapshot_folder
from pharos.runtime.artifacts import digest_of, write_text_atomic
from pharos.runtime.log import log_event

COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Listing:
    """What a repository holds at a commit, as the hub said once; kept in the cache."""

    repository: str
    commit: str
    licence: str | None
    files: dict[str, Published]

    @property
    def key(self) -> str:
        """What the cache calls it."""
        return digest_of(["hub", self.repository, self.commit])


def prefetch(source: Mapping[str, Any], pin: Path | None = None) -> dict[str, Any]:
    """The model result of a ``hub:`` source (see :func:`pharos.models.prefetch.prefetch`).

    A branch or tag is resolved to a commit once; ``pin`` is the file that remembers it, and
    later calls fetch the same commit until that file is removed.
    """
    repository, name = source["repository"], source.get("gguf")
    listing, cache = find(source, pin)
    where = f"hub: {repository}"
    if name is not None:
        _refuse_gguf(listing, name, where)
        key = version = listing.files[name].sha256 or ""
        record = gguf.whole_record(key) if key else None
        if record is None:
            key = version = fetch(listing, [name], cache, before=_refuse_unread_gguf)[name]
            path = snapshot_folder(cache, repository, listing.commit) / name
            with locked(key):
                record = gguf.converted(path, key, where, listing.licence)
        facts = record
    else:
        refuse_without_weights(listing.files, where)
        wanted = wanted_files(listing.files)
        folder = snapshot_folder(cache, repository, listing.commit)
        # What says whether the weights can be used comes first, so that they are fetched only then.
        texts = [one for one in wanted if one.endswith(TEXT_SUFFIXES)]
        digests = fetch(listing, texts, cache)
        refuse_wrong_shards(folder, wanted, where)
        refuse_unknown_architecture(folder, where)
        digests |= fetch(listing, [one for one in wanted if one not in texts], cache)
        facts = describe_folder(folder, where, digests)
        key, version = listing.key, listing.commit
    return {
        "source": {
            "kind": "hub",
            "repository": repository,
            "revision": source["revision"],
            "commit": listing.commit,
            **({} if name is None else {"gguf": name}),
        },
        "version": version,
        "key": key,
        **facts,
        "licence": listing.licence,
    }


def find(
    source: Mapping[str, Any], pin: Path | None, *, quiet: bool = False
) -> tuple[Listing, Path]:
    """The listing of a source at its commit, and the folder of the hub's snapshots.

    The hub is asked only for what is not known yet: the commit of a branch or tag that is not
    pinned, the files of a commit that was never listed. ``quiet``: as of ``check_token``.
    """
    repository, revision = source["repository"], source["revision"]
    commit = revision if COMMIT.fullmatch(revision) else _pinned(pin, repository, revision)
    listing = None if commit is None else read_listing(repository, commit)
    if listing is None:
        if TOLD_OFFLINE:
            raise CheckFailed(
                f"hub: {repository}: offline (HF_HUB_OFFLINE), and what revision {revision!r} "
                "holds is not known here; run prefetch where there is a network"
            )
        listing = _ask(repository, revision, commit, quiet)
    if pin is not None and commit is None:
        pinned = {"repository": repository, "revision": revision, "commit": listing.commit}
        write_text_atomic(pin, json.dumps(pinned, indent=2) + "\n")
    return listing, hub_folder()


def still_to_fetch(source: Mapping[str, Any], pin: Path | None) -> int:
    """Bytes of a source that are not in the cache yet, after the hub let this token open it.

    Nothing is fetched. A file that is there in full length is taken for whole.

    Raises
    ------
    CheckFailed
        As a fetch would: no access, no such repository, no network.
    """
    listing, cache = find(source, pin, quiet=True)
    repository, name = source["repository"], source.get("gguf")
    if name is not None:
        _refuse_gguf(listing, name, f"hub: {repository}")
    folder = snapshot_folder(cache, repository, listing.commit)
    names = wanted_files(listing.files) if name is None else [name]
    missing = 0
    absent = []
    for file in names:
        length = listing.files[file].bytes or 0
        path = folder / file
        if not path.exists() or path.stat().st_size != length:
            absent.append(file)
            missing += length
    if absent:
        open_hub()
        import huggingface_hub

        with hub_errors_in_words(repository, listing.commit):
            url = huggingface_hub.hf_hub_url(repository, absent[0], revision=listing.commit)
            huggingface_hub.get_hf_file_metadata(url)
    return missing


def _pinned(pin: Path | None, repository: str, revision: str) -> str | None:
    try:
        known = json.loads(pin.read_text(encoding="utf-8")) if pin is not None else {}
        if (known["repository"], known["revision"]) == (repository, revision):
            return str(known["commit"]) if COMMIT.fullmatch(known["commit"]) else None
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def _ask(repository: str, revision: str, commit: str | None, quiet: bool) -> Listing:
    cache = open_hub()
    warn_if_node_local(cache)
    import huggingface_hub

    with hub_errors_in_words(repository, revision):
        check_token(quiet=quiet)
        info = huggingface_hub.HfApi().model_info(
            repository, revision=commit or revision, files_metadata=True
        )
    commit = str(info.sha)
    if not COMMIT.fullmatch(commit):
        raise CheckFailed(f"hub: {repository}: the hub names no commit; check HF_ENDPOINT")
    files = {}
    for file in info.siblings or []:
        sha256 = file.lfs.sha256 if file.lfs else None
        files[file.rfilename] = Published(file.size, sha256, None if sha256 else file.blob_id)
    licence = getattr(info.card_data, "license", None)
    listing = Listing(repository, commit, licence, files)
    write_text_atomic(_listing_path(listing.key), json.dumps(asdict(listing), indent=2) + "\n")
    return listing


def _listing_path(key: str) -> Path:
    return cache_root() / "listings" / f"{key}.json"


def read_listing(repository: str, commit: str) -> Listing | None:
    """What the hub said of a commit before; ``None`` where it was never asked."""
    return _read(_listing_path(digest_of(["hub", repository, commit])))


def read_listings() -> Iterator[Listing]:
    """Every listing of the cache, by repository and commit."""
    found = [_read(path) for path in (cache_root() / "listings").glob("*.json")]
    known = [listing for listing in found if listing is not None]
    yield from sorted(known, key=lambda listing: (listing.repository, listing.commit))


def _read(path: Path) -> Listing | None:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        files = {name: Published(**facts) for name, facts in record["files"].items()}
        return Listing(record["repository"], record["commit"], record["licence"], files)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def fetch(
    listing: Listing,
    names: Iterable[str],
    cache: Path,
    before: Callable[[Listing, str], None] | None = None,
) -> dict[str, str]:
    """Bring files of a listing into the cache, each as published; returns ``{name: sha256}``.

    A cache that has them all is only read. ``before(listing, name)`` may refuse a file that is
    about to be fetched.
    """
    repository, commit = listing.repository, listing.commit
    files = {name: listing.files[name] for name in names}
    folder = snapshot_folder(cache, repository, commit)
    found = {name: digest_if_whole(folder / name, files[name]) for name in files}
    digests = {name: digest for name, digest in found.items() if digest is not None}
    missing = [name for name in files if name not in digests]
    if not missing:
        return digests
    if TOLD_OFFLINE:
        raise CheckFailed(
            f"hub: {repository}: offline (HF_HUB_OFFLINE), and not in the cache: "
            f"{', '.join(missing)}; run prefetch where there is a network"
        )
    open_hub()
    with (
        locked(f"repository-{digest_of([repository])}"),
        hub_errors_in_words(repository, commit),
    ):
        if before is not None:
            for name in missing:
                before(listing, name)
        log_event("fetching", repository=repository, commit=commit, files=len(missing))
        return digests | bring(cache, repository, commit, {name: files[name] for name in missing})


def _refuse_gguf(listing: Listing, name: str, where: str) -> None:
    if name not in listing.files:
        models = [file for file in listing.files if file.endswith(".gguf")]
        raise InputError(f"{where}: no file {name!r}{did_you_mean(name, models)}")
    gguf.refuse_split(name, where)


def _refuse_unread_gguf(listing: Listing, name: str) -> None:
    """Ask for the first bytes of a GGUF file, which say what architecture it is."""
    import huggingface_hub
    from huggingface_hub.utils._headers import build_hf_headers
    from huggingface_hub.utils._http import hf_raise_for_status

    url = huggingface_hub.hf_hub_url(listing.repository, name, revision=listing.commit)
    headers = {**build_hf_headers(), "Range": f"bytes=0-{gguf.HEAD_BYTES - 1}"}
    with huggingface_hub.get_session().stream("GET", url, headers=headers) as response:
        hf_raise_for_status(response)
        head = b""
        for block in response.iter_bytes():
            head += block
            if len(head) >= gguf.HEAD_BYTES:
                break
    gguf.refuse_unread(head, f"hub: {listing.repository}: {name}")
