"""`make setup` on a login node: which Python it takes, and where it puts the environment."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools/make-environment"
TOOLS = ("basename", "cat", "cksum", "cut", "dirname", "ln", "mkdir", "rm")

OLD = 'case "$*" in *version_info*) exit 1 ;; *python_version*) echo 3.6.8 ;; esac'
# Makes an environment whose Python says who made it.
NEW = """\
case "$*" in
*"-m venv"*)
    for folder do :; done
    mkdir -p "$folder/bin"
    printf '#!/bin/sh\\n# %s\\n' "$0" >"$folder/bin/python"
    chmod +x "$folder/bin/python" ;;
esac"""
# The folder is behind --prefix (conda) or the last word (uv).
BRINGS = """\
echo "$@" >>"$LOG"
for word do
    [ "${before:-}" = --prefix ] && folder=$word
    before=$word
done
folder=${folder:-$before}
case "$1" in
venv | create)
    mkdir -p "$folder/bin"
    printf '#!/bin/sh\\n' >"$folder/bin/python"
    chmod +x "$folder/bin/python" ;;
esac"""


class LoginNode:
    """A folder with a checkout, and a PATH of fake commands."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkout = folder / "checkout"
        self.checkout.mkdir()
        self.path: list[str] = []
        for name in (*TOOLS, "chmod"):
            self.command("tools", name, link=shutil.which(name))

    def command(self, folder, name, body="", link=None):
        """Put a command into a folder of PATH, the folders in the order of their first use."""
        place = self.folder / folder
        place.mkdir(exist_ok=True)
        if link:
            (place / name).symlink_to(link)
        else:
            (place / name).write_text(f"#!/bin/sh\n{body}\n")
            (place / name).chmod(0o755)
        if str(place) not in self.path:
            self.path.append(str(place))

    def make(self, *python, **variables):
        return subprocess.run(
            [SCRIPT, ".venv", *python],
            cwd=self.checkout,
            env={"PATH": os.pathsep.join(self.path), "LOG": str(self.folder / "log"), **variables},
            capture_output=True,
            text=True,
        )

    @property
    def made_by(self):
        return (self.checkout / ".venv/bin/python").read_text().split()[-1]


@pytest.fixture
def node(tmp_path):
    return LoginNode(tmp_path)


def test_an_old_python_that_comes_first_does_not_hide_a_new_one(node):
    node.command("site old", "python3", OLD)
    node.command("site new", "python3", NEW)
    assert node.make().returncode == 0
    assert node.made_by.endswith("new/python3")


def test_a_newer_python_is_found_by_its_full_name(node):
    node.command("bin", "python3", OLD)
    node.command("bin", "python3.12", NEW)
    assert node.make().returncode == 0
    assert node.made_by.endswith("bin/python3.12")


def test_a_python_of_another_architecture_is_not_taken_for_one(node):
    node.command("bin", "python3", NEW)
    (node.folder / "bin/python3").write_bytes(b"\x7fELF of another machine")
    node.command("bin", "python3.11", NEW)
    assert node.make().returncode == 0
    assert node.made_by.endswith("bin/python3.11")


@pytest.mark.parametrize(
    ("tool", "words"),
    [("uv", "venv --quiet --seed --python 3.11"), ("micromamba", "create "), ("conda", "create ")],
)
def test_without_a_new_python_a_tool_that_is_there_brings_one(node, tool, words):
    node.command("bin", "python3", OLD)
    node.command("bin", tool, BRINGS)
    done = node.make()
    assert done.returncode == 0, done.stderr
    assert f"{tool} brings one" in done.stdout
    assert words in (node.folder / "log").read_text()
    assert (node.checkout / ".venv/bin/python").exists()


def test_a_tool_that_is_there_and_does_not_run_is_passed_over(node):
    node.command("bin", "uv", "exit 126")
    node.command("bin", "conda", BRINGS)
    assert "conda brings one" in node.make().stdout


def test_without_any_way_there_is_one_line_that_says_what_to_do(node):
    node.command("bin", "python3", OLD)
    done = node.make()
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "(python3 is 3.6.8)" in done.stderr
    assert "make setup PYTHON=/path/to/python3.11" in done.stderr
    assert list(node.checkout.iterdir()) == []


def test_a_python_that_was_named_is_taken_or_refused(node):
    node.command("bin", "python3", NEW)
    node.command("bin", "mine", NEW)
    assert node.make("mine").returncode == 0
    assert node.made_by.endswith("bin/mine")
    shutil.rmtree(node.checkout / ".venv")
    node.command("bin", "mine", OLD)
    done = node.make("mine")
    assert done.returncode == 2
    assert done.stderr.startswith("pharos: error: mine is not Python 3.11 or newer")


def test_a_home_holds_the_environment_and_is_remembered(node):
    node.command("bin", "python3", NEW)
    home = node.folder / "my scratch"
    assert node.make(PHAROS_HOME=str(home)).returncode == 0
    assert (node.checkout / ".venv").resolve().parent == home / "environments"
    assert (node.checkout / ".venv/pharos-home").read_text() == f"{home}\n"
    # From another shell, which has forgotten it; and again.
    assert node.make().returncode == 0
    assert node.make(PHAROS_HOME=str(home)).returncode == 0


def test_two_checkouts_have_two_environments_in_one_home(node):
    node.command("bin", "python3", NEW)
    home = node.folder / "home"
    node.make(PHAROS_HOME=str(home))
    node.checkout = node.folder / "elsewhere" / node.checkout.name
    node.checkout.mkdir(parents=True)
    node.make(PHAROS_HOME=str(home))
    assert len(list((home / "environments").iterdir())) == 2


@pytest.mark.parametrize(
    ("home", "message"),
    [
        ("scratch", "PHAROS_HOME: scratch: not an absolute path"),
        ("/another/home", ".venv lies in this folder, and PHAROS_HOME says /another/home: "),
    ],
)
def test_a_home_that_cannot_be_is_refused(node, home, message):
    node.command("bin", "python3", NEW)
    node.make()
    done = node.make(PHAROS_HOME=home)
    assert done.returncode == 2
    assert message in done.stderr


def test_a_checkout_whose_path_has_white_space_is_refused(node):
    node.command("bin", "python3", NEW)
    node.checkout = node.folder / "a checkout"
    node.checkout.mkdir()
    done = node.make()
    assert done.returncode == 2
    assert "a path with white space" in done.stderr
    assert list(node.checkout.iterdir()) == []


def test_an_environment_whose_python_is_gone_is_said(node):
    node.command("bin", "python3", NEW)
    node.make()
    (node.checkout / ".venv/bin/python").unlink()
    done = node.make()
    assert done.returncode == 2
    assert "its Python does not run here" in done.stderr


def test_an_environment_that_could_not_be_finished_is_none(node):
    node.command("bin", "python3", 'case "$*" in *"-m "*) mkdir -p "$3"; exit 1 ;; esac')
    done = node.make(PHAROS_HOME=str(node.folder / "home"))
    assert done.returncode == 2
    assert not (node.checkout / ".venv").is_symlink()
    assert list((node.folder / "home/environments").iterdir()) == []
