"""What a Snakemake profile says, for those who ask it outside of Snakemake."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from pharos.errors import InputError


def read_profile(profile: Path) -> dict[str, Any]:
    """The settings in a profile's ``config.yaml``.

    Raises
    ------
    InputError
        It is not there, not YAML, or not a mapping.
    """
    file = profile / "config.yaml"
    try:
        settings = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise InputError(f"{file}: {error.strerror}: name the profile with --profile") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(settings, dict):
        raise InputError(f"{file}: not a mapping of Snakemake's options to their values")
    return settings


def mapping_of(value: Any, where: str) -> dict[str, Any]:
    """A mapping of a profile as it is; a list of ``name=value``, which it may be too, as one.

    ``where`` is what to call it in an error; nothing (None) is an empty mapping.

    Raises
    ------
    InputError
        It is neither.
    """
    if isinstance(value, list):
        return dict(str(entry).partition("=")[::2] for entry in value)
    if not isinstance(value or {}, Mapping):
        raise InputError(f"{where}: {value} is not a mapping of names to values")
    return dict(value or {})
