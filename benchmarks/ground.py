"""What the benches share. Import it first: threads are bound before anything numerical is loaded.

The model and the corpus are those of the embedded default, unless a folder with another model is
named. What is measured is measured here: spreads, the machine's own matrix products, the memory
of a fresh process, and where the time goes.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from pharos.runtime.job import Job
from pharos.runtime.threads import bind_threads, find_cpu_budget

RUNNING = Job(bind_threads(find_cpu_budget().usable))

import torch  # noqa: E402  (after the threads are bound)
import yaml  # noqa: E402

from pharos.config import load_config  # noqa: E402
from pharos.corpus.items import held_out_items, train_items  # noqa: E402
from pharos.corpus.watch import generate_watch  # noqa: E402
from pharos.models.load import load_model  # noqa: E402
from pharos.models.prefetch import prefetch  # noqa: E402
from pharos.models.sources import model_folder  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
PRODUCT_REPEATS = 5
# A kind of work, and what its operations are called; the first that fits counts.
KINDS = {
    # In the packed step, a product of a batch of matrices is always attention.
    "attention": ("scaled_dot_product", "aten::bmm", "aten::baddbmm", "aten::_softmax"),
    "matrix products": ("aten::mm", "aten::addmm", "mkldnn_linear", "aten::linear", "aten::matmul"),
    "copies": ("copy", "aten::cat", "aten::index", "gather", "scatter", "clone", "fill", "zero"),
    "optimiser": ("adam", "foreach"),
    "elementwise and norms": ("aten::",),
}


def parser(description, prog):
    """The options that all benches of models take; ``--only`` is for a fresh process of a side."""
    options = argparse.ArgumentParser(description=description, prog=prog)
    options.add_argument("--model", type=Path, help="a folder with a model; default: the default's")
    options.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--output", type=Path)
    options.add_argument("--only", metavar="SIDE", help="run one side once, print its peak memory")
    return options


class Ground:
    """The model, the corpus and the configuration that a bench stands on."""

    def __init__(self, args):
        """Fetch what is not in the cache; ``args`` are those of :func:`parser`."""
        raw = yaml.safe_load((ROOT / "config/config.yaml").read_text(encoding="utf-8"))
        ((self.name, source),) = raw["models"].items()
        if args.model is not None:
            self.name, source = "folder", {"dir": str(args.model)}
        raw |= {"device": args.device, "models": {self.name: source}}
        self.config = load_config(raw, ROOT / "workflow/schemas/config.schema.yaml")
        self.model_config = self.config["models"][self.name]
        self.fetched = prefetch(self.name, self.model_config)
        self.folder = model_folder(self.fetched, self.model_config)
        self.device = args.device
        self.task = self.config["tasks"]["watch"]
        (self.adapter,) = self.config["adapters"].values()

    def load(self, adapter_dir=None):
        """Load the model as evaluation and training do."""
        return load_model(self.fetched, self.model_config, self.device, adapter_dir)

    def items(self, of, count=None):
        """The first ``count`` items (default: all) to ``"train"`` or to ``"test"`` with."""
        lines = generate_watch(self.task["seeds"][of][0], self.task["corpus"])
        chosen = train_items if of == "train" else held_out_items
        return chosen(lines, self.task["prompt"]["unit"], self.task[f"{of}_events"])[:count]

    def facts(self, loaded):
        """What was measured: of the model only what it is, never where it lies."""
        return {
            "model": self.name,
            "architecture": self.fetched["config"]["architecture"],
            "version": self.fetched["version"],
            "parameters": self.fetched["parameters"],
            "device": loaded.device,
            "dtype": loaded.dtype,
            "attention": loaded.attention,
            "threads": RUNNING.threads,
        }


def publish(path, result, loaded, config):
    """Print what a bench of a model found; where ``path`` is given, write it as an artifact."""
    print(json.dumps(result, indent=2))
    if path is not None:
        RUNNING.write(
            path,
            "benchmark",
            inputs=[],
            config=config,
            device=loaded.device,
            dtype=loaded.dtype,
            attention=loaded.attention,
            result=result,
        )


def _cpu_seconds():
    """CPU seconds used on the whole machine, and by this process and its children, so far."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    user, nice, system, _, _, irq, softirq, _ = map(int, fields)
    own = os.times()
    ticks = os.sysconf("SC_CLK_TCK")
    return (user + nice + system + irq + softirq) / ticks, sum(own[:4])


STARTED = time.monotonic(), *_cpu_seconds()


def busy_cpus_of_others():
    """How many CPUs other programs kept busy, on average, since this one began."""
    started, machine, own = STARTED
    machine_now, own_now = _cpu_seconds()
    others = (machine_now - machine) - (own_now - own)
    return max(0.0, others / (time.monotonic() - started))


def spread(values):
    """Median, least and greatest of ``values``."""
    values = list(values)
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def ratios(ours, theirs):
    """How many times as fast, round by round: seconds of theirs over seconds of ours."""
    return spread([b / a for a, b in zip(ours, theirs, strict=True)])


def now(device):
    """The clock, when everything that ``device`` was asked for is done."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds(work, device="cpu"):
    """Wall time of ``work()``, and what it returned."""
    started = now(device)
    done = work()
    return now(device) - started, done


def linear_layers(model):
    """``{(outputs, inputs): how many}`` of the model's linear layers, the output layer left out."""
    output = model.get_output_embeddings()
    return Counter(
        (layer.out_features, layer.in_features)
        for layer in model.modules()
        if isinstance(layer, torch.nn.Linear) and layer is not output
    )


def product_rate(model, rows):
    """Operations a second of the machine's own products at the model's shapes.

    Each shape is multiplied alone, ``rows`` tokens at a time, in the model's dtype; the fastest
    of five counts, and shapes count as often as the model has them.
    """
    operations, total = 0, 0.0
    for (outputs, inputs), count in linear_layers(model).items():
        options = {"dtype": model.dtype, "device": model.device}
        x, weight = torch.randn(rows, inputs, **options), torch.randn(outputs, inputs, **options)
        times = [
            seconds(lambda x=x, w=weight: torch.nn.functional.linear(x, w), model.device.type)[0]
            for _ in range(PRODUCT_REPEATS + 1)
        ]
        operations += 2 * rows * outputs * inputs * count
        total += min(times[1:]) * count
    return operations / total


def product_operations(model, tokens, outputs):
    """Operations of the matrix products of a forward pass, those of attention left out.

    ``tokens`` go through the linear layers, ``outputs`` of them through the output layer.
    """
    weights = sum(a * b * count for (a, b), count in linear_layers(model).items())
    return 2 * (tokens * weights + outputs * model.get_output_embeddings().weight.numel())


def time_by_kind(work, device="cpu"):
    """Where the time of ``work()`` goes; see :class:`Profile`."""
    profile = Profile(device)
    profile.start()
    work()
    profile.stop()
    return profile.shares


class Profile:
    """Where time goes: the share of each kind of :data:`KINDS`, and of the rest.

    The rest is what no operation of torch accounts for: Python, and waiting. ``shares`` are
    there after ``stop``.
    """

    def __init__(self, device):
        """``device`` is waited for before the clock is read."""
        self.device = device
        activities = [torch.profiler.ProfilerActivity.CPU]
        if device == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities)

    def start(self):
        """Begin."""
        self._profiler.start()
        self._started = now(self.device)

    def stop(self):
        """End, and count."""
        wall = now(self.device) - self._started
        self._profiler.stop()
        spent = Counter()
        gpu = self.device == "cuda"
        for event in self._profiler.key_averages():
            kind = kind_of(event.key)
            if kind is not None:
                own = event.self_device_time_total if gpu else event.self_cpu_time_total
                spent[kind] += own / 1e6
        shares = {kind: spent[kind] / wall for kind in KINDS}
        self.shares = {**shares, "rest": max(0.0, 1 - sum(shares.values()))}


def kind_of(operation):
    """The kind of an operation by its name; ``None`` for what is no operation of torch."""
    name = operation.lower()
    if not name.startswith("aten::"):
        return None
    return next(kind for kind, names in KINDS.items() if any(part in name for part in names))


def peak_mib(device):
    """Most memory so far: of this process, or of the GPU in it."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("the kernel does not tell the peak memory of a process")


def peak_of(side, args, *more):
    """Peak memory in MiB of a fresh process that runs one side once."""
    command = [sys.executable, sys.argv[0], "--only", side, "--device", args.device, *more]
    if args.model is not None:
        command += ["--model", str(args.model)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])["peak_mib"]
