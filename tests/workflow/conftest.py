"""Working folders with a tiny model."""

import pytest

import tiny_models
from workspaces import ROOT, TASK, Workspace, jobs_in, tiny_config

__all__ = ["ROOT", "TASK", "Workspace", "jobs_in", "tiny_config"]  # to be imported from here


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    return tiny_models.write_chat_model(tmp_path_factory.mktemp("models") / "tiny model")


@pytest.fixture
def workspace(tmp_path):
    return Workspace(tmp_path / "a space")


@pytest.fixture(scope="session")
def finished(tmp_path_factory, tiny_model):
    """A workspace in which everything has run once; tests copy it before they change it."""
    workspace = Workspace(tmp_path_factory.mktemp("finished") / "work")
    workspace.configure(tiny_config(tiny_model))
    workspace.run()
    return workspace
