"""The one place where threads are bound.

Order matters: the environment is set before numerical libraries are imported, threadpoolctl
then limits the pools that are already loaded, and torch is set last because it keeps a count
of its own. After the work :func:`read_pools` says what the pools really were.
"""

import math
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "GOTO_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "RAYON_NUM_THREADS",
)


@dataclass(frozen=True)
class CpuBudget:
    """How many CPUs there are, and how many of them this process may use."""

    machine: int
    affinity: int
    cgroup: int | None
    slurm: int | None

    @property
    def usable(self) -> int:
        """The least of affinity, cgroup quota and Slurm allocation; at least 1."""
        limits = [self.affinity, self.cgroup, self.slurm]
        return max(1, min(limit for limit in limits if limit is not None))


@dataclass(frozen=True)
class Binding:
    """What was asked for, what was bound, and how many CPUs were found."""

    requested: int
    bound: int
    cpus: CpuBudget
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def oversubscription_risk(self) -> bool:
        """True when more threads were requested than there are usable CPUs."""
        return self.requested > self.cpus.usable


def find_cpu_budget(
    cgroup_root: Path = Path("/sys/fs/cgroup"),
    own_cgroup: Path = Path("/proc/self/cgroup"),
    environment: dict[str, str] | None = None,
) -> CpuBudget:
    """Read the CPUs this process may use from the kernel and the scheduler.

    Parameters
    ----------
    cgroup_root, own_cgroup
        Where the cgroup file system is mounted and where the process's own groups are listed
        (tests point these elsewhere).
    environment
        The environment to read Slurm's variables from; default ``os.environ``.
    """
    env = os.environ if environment is None else environment
    affinity = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return CpuBudget(
        machine=os.cpu_count() or 1,
        affinity=affinity,
        cgroup=_cgroup_quota(cgroup_root, own_cgroup),
        slurm=_slurm_cpus(env),
    )


def _slurm_cpus(env: Any) -> int | None:
    """CPUs of this task on this node, as Slurm says; None outside of a Slurm job."""
    if "SLURM_JOB_ID" not in env:
        return None
    for name in ("SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE"):
        value = env.get(name, "")
        if value.isdigit() and int(value) > 0:
            return int(value)
    return None


def _cgroup_quota(root: Path, own: Path) -> int | None:
    """The tightest CPU quota among this process's cgroups (v1 and v2), rounded up."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return None
    quotas = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            folders = _with_parents(root, path)
            quotas += [_quota_v2(folder / "cpu.max") for folder in folders]
        elif "cpu" in controllers.split(","):  # version 1
            for mount in (root / controllers, root / "cpu", root):
                folders = _with_parents(mount, path)
                quotas += [_quota_v1(folder) for folder in folders]
    found = [quota for quota in quotas if quota is not None]
    return min(found) if found else None


def _with_parents(root: Path, path: str) -> list[Path]:
    """The cgroup's folder and those above it: a quota anywhere on the way counts."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    return [root.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]


def _quota_v2(file: Path) -> int | None:
    try:
        quota, period = file.read_text().split()[:2]
    except (OSError, ValueError):
        return None
    return None if quota == "max" else max(1, math.ceil(int(quota) / int(period)))


def _quota_v1(folder: Path) -> int | None:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        period = int((folder / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
    return None if quota <= 0 or period <= 0 else max(1, math.ceil(quota / period))


def bind_threads(requested: int, cpus: CpuBudget | None = None) -> Binding:
    """Bind every thread pool of this process to ``requested`` threads, or to what is usable.

    Call it before numerical libraries are imported; pools that are loaded already are limited
    too. Asking for more than is usable binds what is usable and sets
    :attr:`Binding.oversubscription_risk`.

    Raises
    ------
    ValueError
        If ``requested`` is less than 1.
    """
    if requested < 1:
        raise ValueError(f"threads: {requested} is less than 1")
    cpus = find_cpu_budget() if cpus is None else cpus
    bound = min(requested, cpus.usable)
    environment = dict.fromkeys(THREAD_VARIABLES, str(bound))
    os.environ.update(environment)
    # A tokenizer that forks under threads prints a warning into every log.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    _limit_loaded_pools(bound)
    return Binding(requested, bound, cpus, environment)


def _limit_loaded_pools(threads: int) -> None:
    import threadpoolctl

    threadpoolctl.threadpool_limits(limits=threads)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(threads)


def read_pools() -> list[dict[str, Any]]:
    """The thread pools as they are now.

    Returns
    -------
    One entry a pool: ``library``, ``architecture`` (the BLAS kernel, where the library tells),
    ``version`` and ``num_threads``; torch's own pool is among them when torch is loaded.
    """
    import threadpoolctl

    pools = [
        {
            "library": pool["prefix"],
            "architecture": pool.get("architecture"),
            "version": pool.get("version"),
            "num_threads": pool["num_threads"],
        }
        for pool in threadpoolctl.threadpool_info()
    ]
    torch = sys.modules.get("torch")
    if torch is not None:
        pools.append(
            {
                "library": "torch",
                "architecture": torch.backends.cpu.get_cpu_capability(),
                "version": str(torch.__version__),
                "num_threads": torch.get_num_threads(),
            }
        )
    return sorted(pools, key=lambda pool: (pool["library"], str(pool["version"])))
