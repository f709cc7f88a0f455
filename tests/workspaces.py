"""A working folder, a configuration that runs in seconds, and Snakemake as a user starts it."""

import os
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]

TASK = {
    "corpus": {"generator": "watch", "events": 60},
    "seeds": {"train": [1], "test": [7]},
    "train_events": 24,
    "test_events": 30,
    "prompt": {
        "system": "Answer SIGNIFICANT or ROUTINE.",
        "template": "{text}",
        "answers": {"positive": "SIGNIFICANT", "negative": "ROUTINE"},
    },
}


def tiny_config(model_folder, **changes):
    """A configuration that runs through in seconds."""
    return {
        "models": {"tiny": {"dir": str(model_folder)}},
        "tasks": {"watch": TASK},
        "adapters": {"lora": {"rank": 2, "alpha": 4, "batch_size": 4}},
        "shortcut_gate": {"permutations": 50},
        "promotion_gate": {"bootstrap": 200},
        "evaluation": {"bootstrap": 200},
        **changes,
    }


class Workspace:
    """One working folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def configure(self, config):
        self.folder.mkdir(parents=True, exist_ok=True)
        text = config if isinstance(config, str) else yaml.safe_dump(config, sort_keys=False)
        (self.folder / "my config.yaml").write_text(text)

    def command(self, *arguments):
        return [
            sys.executable,
            "-m",
            "snakemake",
            "--snakefile",
            str(ROOT / "Snakefile"),
            "--directory",
            str(self.folder),
            "--configfile",
            str(self.folder / "my config.yaml"),
            *arguments,
        ]

    def environment(self):
        return {**os.environ, "PHAROS_CACHE": str(self.folder / "cache")}

    def snakemake(self, *arguments, timeout=300):
        return subprocess.run(
            self.command(*arguments),
            cwd=self.folder,
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def start(self, **options):
        """Start with two cores, for a test that does something to the run; it prints nowhere."""
        return subprocess.Popen(
            self.command("--cores", "2"),
            cwd=self.folder,
            env=self.environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            **options,
        )

    def run(self, *arguments):
        """Run with two cores; fail the test, with the log, when Snakemake fails."""
        done = self.snakemake("--cores", "2", *arguments)
        assert done.returncode == 0, done.stderr[-4000:]
        return done


def jobs_in(done):
    """Rule names, with counts, that a dry run lists (empty when nothing is to be done)."""
    lines = (done.stdout + done.stderr).splitlines()
    if "Job stats:" not in lines:
        return {}
    table = lines[lines.index("Job stats:") + 3 :]
    rows = [line.split() for line in table[: table.index("")] if line.strip()]
    return {name: int(count) for name, count in rows if name not in ("total", "all")}


class RealWorkspace(Workspace):
    """One for the real model, which is kept beside the checkout, so that it is fetched once."""

    def environment(self):
        return {**super().environment(), "PHAROS_CACHE": str(ROOT / ".cache" / "pharos")}
