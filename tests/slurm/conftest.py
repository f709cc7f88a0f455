"""One private Slurm for every test in this folder; without its packages they are skipped."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import cluster as private
import tiny_models


class BorrowedCluster(private.Cluster):
    """A Slurm that was there before, with partitions cpu and gpu: no part of it is stopped."""

    def _check_daemon(self, name: str) -> None:
        pytest.skip(f"{name} is of a Slurm that was not started for these tests")


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[private.Cluster]:
    """A running cluster; PHAROS_USE_SLURM=1 takes the one that answers already instead."""
    use_existing = os.environ.get("PHAROS_USE_SLURM") == "1"
    if not use_existing:
        if missing := private.missing_packages():
            pytest.skip(f"needs a Slurm; not installed: {' '.join(missing)}")
        if present := private.answering_slurm():
            pytest.skip(f"a Slurm answers already ({present}): PHAROS_USE_SLURM=1 runs them there")
    kind = BorrowedCluster if use_existing else private.Cluster
    made = kind(tmp_path_factory.mktemp("slurm"), use_existing=use_existing)
    made.start()
    watcher = made.stop_with()
    yield made
    made.stop()
    watcher.communicate()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.write_chat_model(tmp_path_factory.mktemp("models") / "tiny model")
