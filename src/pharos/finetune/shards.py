"""A base whose weights lie in shards, one a process, for a model that one GPU does not hold."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from pharos.finetune.team import Team
from pharos.models.load import LoadedModel, choose_dtype, load_model


def load_base(
    fetched: Mapping[str, Any], model_config: Mapping[str, Any], device: str, team: Team
) -> LoadedModel:
    """Load the base of a training, whole or, where ``team.shards``, this process's shards of it.

    Parameters and errors are those of :func:`pharos.models.load.load_model`; every process of the
    team calls this. For shards the model is read into main memory, by one process after the other,
    and goes to the GPU in pieces. A layer is whole on each GPU only while it is computed.
    """
    if not team.shards:
        return load_model(fetched, model_config, device)
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(device, (team.size,))
    whole = {**model_config, "dtype": choose_dtype(model_config["dtype"], device)}

    def load() -> LoadedModel:
        loaded = load_model(fetched, whole, "cpu")
        _shard(loaded.model, mesh)
        return dataclasses.replace(loaded, device=device)

    return team.in_turn(load)


def _shard(model: Any, mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    layers = set(model._no_split_modules or ())
    for module in list(model.modules()):
        if type(module).__name__ in layers:
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
