"""A model on the Hugging Face hub: fetched at a commit, checked against the hub's digests."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pharos.errors import CheckFailed, InputError
from pharos.models.cache import locked, set_up_hub
from pharos.models.describe import describe_folder, refuse_without_weights, wanted_files
from pharos.runtime.artifacts import digest_of, sha256_file
from pharos.runtime.log import log_event


def prefetch(source: Mapping[str, Any]) -> dict[str, Any]:
    """The model result of a ``hub:`` source (see :func:`pharos.models.prefetch.prefetch`).

    A branch or tag is resolved to a commit, which is what is fetched and recorded.
    """
    repository, revision = source["repository"], source["revision"]
    cache = set_up_hub(offline=False)
    import huggingface_hub

    with _hub_errors_in_words(repository, revision):
        info = huggingface_hub.HfApi().model_info(
            repository, revision=revision, files_metadata=True
        )
    names = [file.rfilename for file in info.siblings or []]
    refuse_without_weights(names, f"hub: {repository}")
    wanted = wanted_files(names)
    commit = str(info.sha)
    key = digest_of(["hub", repository, commit])
    log_event("fetching", repository=repository, commit=commit, files=len(wanted))
    with locked(key), _hub_errors_in_words(repository, revision):
        folder = Path(
            huggingface_hub.snapshot_download(
                repository, revision=commit, allow_patterns=wanted, cache_dir=cache
            )
        )
        expected = {file.rfilename: file.lfs.sha256 for file in info.siblings or [] if file.lfs}
        for name in wanted:
            if (folder / name).is_file() and _as_published(folder / name, expected.get(name)):
                continue
            log_event("damaged", files=[name], then="fetched again")
            huggingface_hub.hf_hub_download(
                repository, name, revision=commit, cache_dir=cache, force_download=True
            )
            if not _as_published(folder / name, expected.get(name)):
                raise CheckFailed(f"hub: {repository}: {name} arrived damaged twice")
    facts = describe_folder(folder, f"hub: {repository}")
    return {
        "source": {
            "kind": "hub",
            "repository": repository,
            "revision": revision,
            "commit": commit,
        },
        "version": commit,
        "key": key,
        "licence": getattr(info.card_data, "license", None),
        **facts,
    }


def _as_published(path: Path, sha256: str | None) -> bool:
    """Whether a file has the digest that the hub gives; only large files have one."""
    return sha256 is None or sha256_file(path) == sha256


@contextlib.contextmanager
def _hub_errors_in_words(repository: str, revision: str) -> Iterator[None]:
    """One line for each way in which the hub says no; none repeats a header or a token."""
    import huggingface_hub
    from huggingface_hub import errors

    where = f"hub: {repository}"
    try:
        yield
    except errors.GatedRepoError:
        token = huggingface_hub.get_token()
        cure = "the token has no access yet" if token else "then set HF_TOKEN"
        raise CheckFailed(f"{where} is gated: accept its terms on the hub; {cure}") from None
    except errors.RepositoryNotFoundError:
        raise CheckFailed(
            f"{where}: no such repository, or a private one that HF_TOKEN gives no access to"
        ) from None
    except errors.RevisionNotFoundError:
        raise CheckFailed(f"{where}: no revision {revision!r}") from None
    except errors.HFValidationError:
        raise InputError(f"{where}: not a name that a repository can have") from None
    except errors.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", "no status")
        hint = "; the token is refused" if status == 401 else ""
        raise CheckFailed(f"{where}: the hub answers {status}{hint}") from None
    except errors.LocalEntryNotFoundError:
        raise CheckFailed(f"{where}: the hub cannot be reached") from None
    except Exception as error:
        if type(error).__module__.split(".")[0] in ("httpx", "httpx2", "httpcore"):
            kind = type(error).__name__
            raise CheckFailed(f"{where}: the hub cannot be reached ({kind})") from None
        raise
