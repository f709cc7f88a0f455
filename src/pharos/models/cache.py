"""The model cache: where it is, and one writer at a time."""

import os
from pathlib import Path

DEFAULT_CACHE = Path(".cache/pharos")


def cache_root() -> Path:
    """The cache folder: ``PHAROS_CACHE``, else ``.cache/pharos`` under the working folder."""
    return Path(os.environ.get("PHAROS_CACHE") or DEFAULT_CACHE).absolute()


def set_up_hub(offline: bool) -> Path:
    """Point the hub's client at this project's cache and say whether it may use the network.

    This is the one place where ``HF_HOME`` is set (kept, where the environment has it). Call it
    before transformers or huggingface_hub are imported; one imported already is told too.

    Returns
    -------
    The folder of the hub's snapshots.
    """
    if "HF_HOME" not in os.environ:
        # The login file stays where `hf auth login` puts it.
        login = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
        os.environ.setdefault("HF_TOKEN_PATH", str(login / "token"))
        os.environ["HF_HOME"] = str(cache_root() / "huggingface")
    home = Path(os.environ["HF_HOME"]).expanduser()
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1" if offline else "0"
    import huggingface_hub.constants as constants

    constants.HF_HUB_OFFLINE = offline
    return Path(os.environ.get("HF_HUB_CACHE") or home / "hub").absolute()
