"""Nothing is ever sent to a hub: no call that uploads appears in the code."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UPLOADS = re.compile(
    r"(upload_\w+|push_to_hub|create_(repo|commit|branch|tag|pull_request|discussion)\w*"
    r"|delete_(repo|file|folder|files|branch|tag)|move_repo|update_repo\w*|super_squash_history"
    r"|preupload_lfs_files|CommitOperation\w+|commit_scheduler|CommitScheduler|HfFileSystem)"
)
OPTIONS = ("push_to_hub",)


def uploads_in(source):
    """Names in ``source`` that would send something, with their lines."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.Name):
            names = [node.id]
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.keyword):
            names = [node.arg] if node.arg in OPTIONS else []
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value] if node.value.isidentifier() else []
        found += [(node.lineno, name) for name in names if UPLOADS.fullmatch(name or "")]
    return found


def test_no_upload_call_is_anywhere():
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "workflow").rglob("*.py")]
    assert len(files) > 50
    found = {path.name: uploads_in(path.read_text()) for path in files}
    assert {name: calls for name, calls in found.items() if calls} == {}


def test_no_upload_is_in_the_rules():
    files = [ROOT / "Snakefile", *(ROOT / "workflow").rglob("*.smk")]
    for path in files:
        assert not re.search(rf"\b{UPLOADS.pattern}\b", path.read_text()), path


@pytest.mark.parametrize(
    "source",
    [
        "api.upload_file(path)",
        "model.push_to_hub('x')",
        "from huggingface_hub import upload_folder",
        "model.save_pretrained(folder, push_to_hub=True)",
        "getattr(api, 'create_commit')()",
    ],
)
def test_an_upload_call_would_be_found(source):
    assert uploads_in(source)
