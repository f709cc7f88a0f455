"""A LoRA adapter on a base: put on, taken off again, and as the files of a peft folder."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import safetensors.torch
import torch
from torch import nn

from pharos.config import did_you_mean
from pharos.errors import CheckFailed, InputError
from pharos.finetune.data import random_seed
from pharos.models.load import without_peft_warning


@contextlib.contextmanager
def adapted_model(model: Any, config: Mapping[str, Any], base: Mapping[str, str]) -> Iterator[Any]:
    """``model`` with a fresh adapter (:func:`add_lora`), ready to be trained, for the duration.

    After it the base is as it was: its modules, its flags, and in mode ``eval``.
    """
    trained = {weight: weight.requires_grad for weight in model.parameters()}
    adapted = add_lora(model, config, base)
    try:
        yield adapted.train()
    finally:
        adapted.unload()
        model.eval()
        for weight, flag in trained.items():
            weight.requires_grad_(flag)


def add_lora(model: Any, config: Mapping[str, Any], base: Mapping[str, str]) -> Any:
    """``model`` with fresh LoRA layers on ``config["targets"]``, as a peft model.

    Raises
    ------
    InputError
        If a target is no linear layer of the model, or is its output layer where that is tied
        to the embedding (an update there would change both when merged), or if peft refuses it.
    """
    import peft

    output = model.get_output_embeddings()
    tied = output is not None and output.weight is model.get_input_embeddings().weight
    linear = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not (tied and module is output)
    }
    for target in config["targets"]:
        if target not in linear:
            raise InputError(
                f"adapter targets: the model has no linear layer {target!r} that can be adapted"
                f"{did_you_mean(target, sorted(linear))}"
            )
    torch.manual_seed(random_seed(config["seed"], "weights", 0))
    settings = peft.LoraConfig(
        r=config["rank"],
        lora_alpha=config["alpha"],
        lora_dropout=config["dropout"],
        target_modules=sorted(config["targets"]),
        task_type=peft.TaskType.CAUSAL_LM,
    )
    try:
        with without_peft_warning():
            adapted = peft.get_peft_model(model, settings)
    except ValueError as error:
        raise InputError(f"adapter targets: {error}") from None
    # peft fills in the folder on this machine; what counts is what the model is.
    settings.base_model_name_or_path = base["base_model_name_or_path"]
    settings.revision = base["revision"]
    return adapted


def check_gradients(model: Any) -> None:
    """After a backward pass: weights of the adapter have gradients, and no other weight may.

    Raises
    ------
    CheckFailed
        Naming the first weight of the base that would be trained, or if the adapter would not be.
    """
    adapter = f".{model.base_model.prefix}"
    base = [
        name
        for name, weight in model.named_parameters()
        if adapter not in name and (weight.requires_grad or weight.grad is not None)
    ]
    if base:
        raise CheckFailed(f"{len(base)} weights of the base are not frozen, the first is {base[0]}")
    if all(weight.grad is None for weight in model.parameters()):
        raise CheckFailed("no weight of the adapter has a gradient: nothing would be trained")


def adapter_files(model: Any) -> tuple[bytes, bytes]:
    """``adapter_model.safetensors`` and ``adapter_config.json`` as bytes."""
    import peft

    # Told not to look: peft would ask the hub whether the embedding has changed.
    saved = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in saved.items()}
    settings = model.peft_config[model.active_adapter].to_dict()
    settings["inference_mode"] = True
    # Sets have no order of their own; a file needs one.
    plain = {k: sorted(v) if isinstance(v, set) else v for k, v in settings.items()}
    text = json.dumps(plain, indent=2, sort_keys=True) + "\n"
    return safetensors.torch.save(weights, metadata={"format": "pt"}), text.encode()
