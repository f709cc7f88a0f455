"""``run.context``: what a job was given, as the first line of its log and in its artifacts."""

import os
from typing import Any

from pharos.runtime.threads import Binding, read_pools

SLURM_FACTS = {
    "job_id": "SLURM_JOB_ID",
    "array_task_id": "SLURM_ARRAY_TASK_ID",
    "restart_count": "SLURM_RESTART_COUNT",
    "partition": "SLURM_JOB_PARTITION",
    "cpus_per_task": "SLURM_CPUS_PER_TASK",
    "cpus_on_node": "SLURM_CPUS_ON_NODE",
    "mem_per_node_mb": "SLURM_MEM_PER_NODE",
    "gpus": "SLURM_JOB_GPUS",
}


def run_context(binding: Binding) -> dict[str, Any]:
    """Describe the CPUs, the thread limits, the pools as they are now, and the Slurm job.

    Node and user names are left out on purpose. ``slurm`` is ``None`` outside of a job.
    """
    slurm = {key: os.environ[name] for key, name in SLURM_FACTS.items() if name in os.environ}
    return {
        "event": "run.context",
        "machine_cpus": binding.cpus.machine,
        "usable_cpus": binding.cpus.usable,
        "requested_threads": binding.requested,
        "bound_threads": binding.bound,
        "thread_limits": {name: os.environ.get(name) for name in sorted(binding.environment)},
        "pools": read_pools(),
        "slurm": slurm or None,
        "oversubscription_risk": binding.oversubscription_risk,
    }
