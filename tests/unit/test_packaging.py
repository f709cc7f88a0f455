"""One set of versions, whoever installs."""

import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pins(lines):
    return dict(re.fullmatch(r"([A-Za-z0-9._-]+)==([^\s;]+)", line).groups() for line in lines)


def constraints(text=None):
    lines = (text or (ROOT / "constraints.txt").read_text()).splitlines()
    return pins(line for line in lines if line and not line.startswith("#"))


def plain(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_dependency_is_pinned_as_the_constraints_pin_it():
    extras = PROJECT["optional-dependencies"]
    wanted = PROJECT["dependencies"] + extras["dev"] + extras["bench"]
    found = {plain(name): version for name, version in constraints().items()}
    assert {plain(n): v for n, v in pins(wanted).items()}.items() <= found.items()


def test_torch_is_the_version_at_hand():
    assert constraints()["torch"] == "2.13.0"


def test_conda_users_get_the_same_versions():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    from_pip = environment["dependencies"][-1]["pip"]
    everyday, for_benches = (ROOT / "constraints.txt").read_text().split("# The rest")
    assert pins(from_pip) == constraints(everyday)
    assert {"datasets", "lm_eval", "trl"} <= constraints(f"#{for_benches}").keys()
    python = next(d for d in environment["dependencies"] if str(d).startswith("python="))
    minimum = PROJECT["requires-python"].removeprefix(">=")
    assert python == f"python={minimum}"


def test_no_file_names_a_registry_host():
    files = ["pyproject.toml", "constraints.txt", "environment.yml", "Makefile", ".ci/run"]
    for name in files:
        assert not re.search(r"https?://|index-url|find-links", (ROOT / name).read_text()), name
