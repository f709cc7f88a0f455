"""The workflow's probe of one model, without a workflow: the target ``probe`` calls the same.

python benchmarks/probe.py --model FOLDER [--device cuda] --output FILE.json
"""

import json
from pathlib import Path

import ground
from ground import RUNNING, Ground

from pharos.cluster.probe import check_gpus, device_memory, named, probe_model
from pharos.errors import explained


def main():
    """Take the model along the path of the work, print, and write the artifact."""
    args = ground.parser(__doc__.splitlines()[0], Path(__file__).name).parse_args()
    check_gpus(args.device, None)
    setting = Ground(args)
    tasks = {"watch": (setting.task["prompt"], setting.items("test"))}
    memory = device_memory(setting.device)
    with named(setting.name):
        loaded, result, measured = probe_model(
            setting.fetched,
            setting.model_config,
            setting.device,
            tasks,
            setting.config["evaluation"],
            setting.adapter,
        )
    print(json.dumps({**result, **measured}, indent=2))
    if args.output is not None:
        RUNNING.write(
            args.output,
            "benchmark",
            inputs=[],
            config=setting.config["evaluation"],
            device=loaded.device,
            dtype=loaded.dtype,
            attention=loaded.attention,
            timing={"memory": memory, **measured},
            result={**setting.facts(loaded), **result},
        )


if __name__ == "__main__":
    with explained():
        main()
