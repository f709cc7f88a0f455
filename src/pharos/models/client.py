"""The hub's client: patient within a limit, read-only, and its refusals in words."""

import contextlib
import json
import logging
import os
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path
from time import sleep, time
from typing import Any

from pharos.errors import CheckFailed, InputError, PharosError
from pharos.models.cache import login_file, set_up_hub
from pharos.runtime.log import log_event, warn

TIMEOUT_S = 30.0  # without a byte
PATIENCE_S = 900.0  # of waiting, all answers of a process together
TRIES = 6  # where the hub does not say how long to wait
BUSY = (408, 429, 500, 502, 503, 504)
LIMITS = ("connect", "read", "write", "pool")
READS = ("GET", "HEAD")
MORE_THAN_READ = ("write", "admin")

_waited_s = 0.0


def open_hub() -> Path:
    """Make the hub's client ready to fetch; returns the folder of its snapshots.

    The client is told to wait as long as the hub says (``Retry-After``), or twice as long each
    time where it says nothing, at most :data:`PATIENCE_S` in all; to give up on a silent
    connection after :data:`TIMEOUT_S`; and to send nothing but ``GET`` and ``HEAD``.
    """
    global _waited_s
    _waited_s = 0.0
    cache = set_up_hub(offline=False)
    import huggingface_hub

    # Waits are logged here, and the client's warnings show signed addresses.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    huggingface_hub.set_client_factory(_patient_client)
    return cache


def _patient_client() -> Any:
    from huggingface_hub.utils._http import default_client_factory

    client: Any = default_client_factory()
    send = client.send

    def patient_send(request: Any, **options: Any) -> Any:
        if request.method not in READS:
            raise CheckFailed(f"a {request.method} request is not sent: Pharos only reads the hub")
        limits = request.extensions.get("timeout", {})
        request.extensions["timeout"] = {key: limits.get(key) or TIMEOUT_S for key in LIMITS}
        for attempt in range(1, TRIES + 1):
            response = send(request, **options)
            path = request.url.path
            if response.status_code not in BUSY or path.startswith("/api/whoami"):
                return response
            response.close()
            told = _told_to_wait(response.headers)
            if attempt == TRIES:
                break
            _wait(response.status_code, 2.0 ** (attempt - 1) if told is None else told)
        raise CheckFailed(
            f"the hub answers {response.status_code}, {TRIES} times; "
            "start again when it is well (https://status.huggingface.co)"
        )

    client.send = patient_send
    return client


def _told_to_wait(headers: Any) -> float | None:
    """Seconds that ``Retry-After`` (a number or a date) or the rate limit's headers ask for."""
    from huggingface_hub.utils._http import parse_ratelimit_headers

    limit = parse_ratelimit_headers(headers)
    if limit is not None and limit.remaining == 0:
        return float(limit.reset_in_seconds)
    value = headers.get("Retry-After", "").strip()
    if value.isdigit():
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time())
    except (TypeError, ValueError):
        return None


def _wait(status: int, seconds: float) -> None:
    global _waited_s
    if _waited_s + seconds > PATIENCE_S:
        raise CheckFailed(
            f"the hub answers {status} and asks to wait {seconds:.0f} s, which is beyond the "
            f"{PATIENCE_S:.0f} s that a fetch waits in all; start again later"
        )
    log_event("waiting", why=f"the hub answers {status}", seconds=round(seconds, 1))
    sleep(seconds)
    _waited_s += seconds


def has_token() -> bool:
    """Whether ``HF_TOKEN``, the file that ``HF_TOKEN_PATH`` names, or the login file has one."""
    if os.environ.get("HF_TOKEN", "").strip():
        return True
    try:
        return bool(login_file().read_text(encoding="utf-8").strip())
    except (OSError, UnicodeDecodeError):
        return False


def check_token(*, quiet: bool = False) -> None:
    """Refuse a token that the hub does not know; warn of one that may do more than read.

    ``quiet`` leaves out the log's line and the warning, for commands that ask about many models.

    Raises
    ------
    CheckFailed
        If there is a token and the hub refuses it.
    """
    too_much = granted_beyond_reading()
    if quiet:
        return
    log_event("token", beyond_reading=too_much)
    if too_much:
        warn(
            f"the hub's token may do more than read ({too_much}); Pharos only reads: make a token "
            f"with read scope at {endpoint()}/settings/tokens"
        )


def granted_beyond_reading() -> str | None:
    """The first thing that the token may do beyond reading, as the hub calls it.

    Empty for a token that may only read; ``None`` without a token, or where the hub does not say.

    Raises
    ------
    CheckFailed
        If there is a token and the hub refuses it.
    """
    import huggingface_hub
    from huggingface_hub import errors

    token = huggingface_hub.get_token()
    if token is None:
        return None
    try:
        who = huggingface_hub.HfApi().whoami(token)
    except errors.HfHubHTTPError as error:
        if error.response.status_code == 401:
            raise CheckFailed(_bad_token()) from None
        return None
    access = who.get("auth", {}).get("accessToken", {})
    scopes = access.get("fineGrained", {}).get("scoped", [])
    granted = [access.get("role", ""), *(p for scope in scopes for p in scope["permissions"])]
    wide = (name for name in granted if any(word in name for word in MORE_THAN_READ))
    return next(wide, "")


def endpoint() -> str:
    """The hub's address: ``HF_ENDPOINT``, or the public one."""
    import huggingface_hub.constants as constants

    return constants.ENDPOINT


def _bad_token() -> str:
    return (
        "the hub refuses the token of HF_TOKEN, HF_TOKEN_PATH or the login file: it does not "
        f"exist or has expired; make one with read scope at {endpoint()}/settings/tokens"
    )


@contextlib.contextmanager
def hub_errors_in_words(repository: str, revision: str) -> Iterator[None]:
    """One line, with the cure, for each way in which the hub says no; none shows a token."""
    where = f"hub: {repository}"
    try:
        yield
    except PharosError as error:
        text = str(error)
        raise type(error)(text if text.startswith(where) else f"{where}: {text}") from None
    except Exception as error:
        words = _in_words(error, repository, revision)
        if words is None:
            raise
        raise words from None


def _in_words(error: BaseException, repository: str, revision: str) -> PharosError | None:
    """The refusal that an error of the client stands for; ``None`` where it is no refusal."""
    import huggingface_hub
    from huggingface_hub import errors

    where, at = f"hub: {repository}", endpoint()
    token = huggingface_hub.get_token() is not None
    if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ is not None:
        return _in_words(error.__cause__, repository, revision)
    if isinstance(error, errors.GatedRepoError):
        terms = f"accept its terms at {at}/{repository}"
        cure = (
            f"this token has no access: {terms} with the token's account; a fine-grained token "
            "also needs read access to gated repositories"
            if token
            else f"{terms}, then set HF_TOKEN to a token with read scope"
        )
        return CheckFailed(f"{where} is gated: {cure}")
    if isinstance(error, errors.RepositoryNotFoundError):
        cure = (
            "or a private one that this token may not read"
            if token
            else "or a private one, for which HF_TOKEN is needed"
        )
        return CheckFailed(f"{where}: no such repository, {cure}")
    if isinstance(error, errors.RevisionNotFoundError):
        return CheckFailed(
            f"{where}: no revision {revision!r}; its branches and tags are listed at "
            f"{at}/{repository}/tree/main"
        )
    if isinstance(error, errors.EntryNotFoundError) and not isinstance(
        error, errors.LocalEntryNotFoundError
    ):
        return CheckFailed(f"{where}: a file that the hub lists is not there; try again later")
    if isinstance(error, errors.HFValidationError):
        return InputError(f"{where}: not a name that a repository can have")
    if isinstance(error, errors.HfHubHTTPError):
        status = getattr(error.response, "status_code", "no status")
        if status == 401:
            return CheckFailed(f"{where}: {_bad_token()}")
        if status == 403:
            return CheckFailed(f"{where}: the hub answers 403: this token may not read it")
        return CheckFailed(f"{where}: the hub answers {status}")
    kind = type(error).__name__
    family = type(error).__module__.split(".")[0]
    if family in ("httpx", "httpx2", "httpcore") or isinstance(
        error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled
    ):
        return CheckFailed(
            f"{where}: the hub at {at} cannot be reached ({kind}): run prefetch where there "
            "is a network; HF_ENDPOINT names another hub"
        )
    if isinstance(error, errors.FileMetadataError | json.JSONDecodeError):
        return CheckFailed(f"{where}: {at} does not answer like a hub; check HF_ENDPOINT")
    return None
