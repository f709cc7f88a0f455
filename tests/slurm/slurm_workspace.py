"""A working folder whose Snakemake runs under the Slurm profile."""

import json
import subprocess
import sys
from pathlib import Path

import cluster as private
from workspaces import ROOT, Workspace

PROFILE = ROOT / "profiles" / "slurm"

# A test does not wait for a network file system, and asks for the state of its jobs at once.
IMPATIENT = ("--latency-wait", "5", "--seconds-between-status-checks", "3")


class SlurmWorkspace(Workspace):
    """One working folder; its jobs run on ``cluster``."""

    def __init__(self, folder: Path, cluster: private.Cluster, profile: Path = PROFILE) -> None:
        super().__init__(folder)
        self.cluster = cluster
        self.profile = profile

    def command(self, *arguments):
        return super().command("--profile", str(self.profile), *IMPATIENT, *arguments)

    def environment(self):
        return {**super().environment(), **self.cluster.environment()}

    def run(self, *arguments, timeout=600):
        """Run; fail the test, with the log, when Snakemake fails."""
        done = self.snakemake(*arguments, timeout=timeout)
        assert done.returncode == 0, done.stderr[-6000:]
        return done

    def pharos(self, *arguments):
        """Run a command of the command line in the folder; fail the test when it fails."""
        done = subprocess.run(
            [sys.executable, "-m", "pharos.cli", *arguments],
            cwd=self.folder,
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def jobs(self, done):
        """The rows of sacct of a folder's jobs, by rule."""
        name = done.stderr.split("Slurm job name: ")[1].split()[0]
        rows = {}
        for row in self.cluster.sacct("--name", name):
            step = row["Comment"].split()[0]
            rule = step.removeprefix("rule_").partition("_wildcards_")[0]
            rows.setdefault(rule, []).append(row)
        return rows

    def artifacts(self):
        """Every artifact that a job wrote: its path and content."""
        for file in sorted((self.folder / "results").rglob("*.json")):
            content = json.loads(file.read_text())
            if isinstance(content, dict) and "context" in content:
                yield file, content
