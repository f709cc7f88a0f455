"""How large a model is, from its configuration alone: no weight is read or allocated."""

from typing import Any

from pharos.errors import InputError

BYTES = {"float32": 4, "bfloat16": 2}
# bitsandbytes nf4: 4 bits a weight; each block of 64 has an 8-bit scale, and each 256 of these a
# float32 of their own (double quantisation, Dettmers et al. 2023, QLoRA, section 3).
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)


def empty_model(config: Any, where: str) -> Any:
    """The model of a configuration, with the shape of its weights and nothing in them.

    Raises
    ------
    InputError
        If transformers has no model for generation of this configuration.
    """
    import torch
    import transformers

    try:
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except (ValueError, KeyError, TypeError, AttributeError, ImportError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"{where}: transformers has no model of this configuration: {reason}"
        ) from None


def model_sizes(config: Any, where: str) -> dict[str, Any]:
    """Parameters and bytes of a model.

    Parameters
    ----------
    config
        A configuration of transformers.
    where
        What to call the model in an error.

    Returns
    -------
    ``parameters`` (tied ones once) and, of these, ``embedding``, ``active`` (what one token
    passes through: fewer than all in a mixture of experts) and ``quantised`` (what nf4 keeps in
    4 bits); ``weight_bytes`` for ``float32``, ``bfloat16`` and ``nf4`` (the rest in bfloat16);
    ``kv_cache``: ``bytes_per_token`` for both dtypes over all layers that attend,
    ``attending_layers``, ``window`` (tokens, ``None`` without) and ``window_layers`` (those whose
    cache stops growing there); ``widths`` of what one token passes through: ``hidden``, ``query``
    and ``key_value`` (all heads together), ``mlp`` (of the experts it is sent to), ``vocabulary``,
    and the number of ``layers`` and ``heads``; ``linear``: for the linear layers of each name,
    how many there are and the sums of their ``inputs`` and ``outputs``.
    """
    model = empty_model(config, where)
    text = config.get_text_config()
    parameters = {name: weight.numel() for name, weight in model.named_parameters()}
    total = sum(parameters.values())
    experts = sum(count for name, count in parameters.items() if ".experts." in name)
    quantised = _quantised(model)
    nf4 = NF4_BYTES * quantised + BYTES["bfloat16"] * (total - quantised)
    return {
        "parameters": total,
        "embedding": model.get_input_embeddings().weight.numel(),
        "active": total - experts + round(experts * _share_of_experts(text)),
        "quantised": quantised,
        "weight_bytes": {
            **{dtype: size * total for dtype, size in BYTES.items()},
            "nf4": round(nf4),
        },
        "kv_cache": _kv_cache(text),
        "widths": widths_of(text),
        "linear": _linear(model),
    }


def _quantised(model: Any) -> int:
    """Weights that bitsandbytes keeps in 4 bits: linear layers, but not the output layer."""
    import torch

    output = model.get_output_embeddings()
    linear = (module for module in model.modules() if isinstance(module, torch.nn.Linear))
    return sum(layer.weight.numel() for layer in linear if layer is not output)


def _linear(model: Any) -> dict[str, dict[str, int]]:
    """Linear layers by the last part of their names, as adapters name their targets."""
    import torch

    found: dict[str, dict[str, int]] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and module is not model.get_output_embeddings():
            sums = found.setdefault(
                name.rpartition(".")[2], {"count": 0, "inputs": 0, "outputs": 0}
            )
            sums["count"] += 1
            sums["inputs"] += module.in_features
            sums["outputs"] += module.out_features
    return found


def widths_of(text: Any) -> dict[str, int]:
    """``widths`` of :func:`model_sizes`, of the text part of a configuration.

    A model without attention has 0 ``heads``; the state that its scan keeps for every token
    counts as ``mlp``.
    """
    hidden, heads, kv_heads, head = _heads(text)
    mlp = int(getattr(text, "intermediate_size", None) or 4 * hidden)
    if not heads:
        mlp *= int(getattr(text, "state_size", None) or 1)
    asked = getattr(text, "num_experts_per_tok", None)
    if asked:
        mlp = int(asked) * int(getattr(text, "moe_intermediate_size", None) or mlp)
    return {
        "hidden": hidden,
        "query": heads * head,
        "key_value": kv_heads * head,
        "mlp": mlp,
        "vocabulary": int(text.vocab_size),
        "layers": int(text.num_hidden_layers),
        "heads": heads,
    }


def _share_of_experts(text: Any) -> float:
    asked = getattr(text, "num_experts_per_tok", None)
    for name in ("num_local_experts", "num_experts", "n_routed_experts"):
        count = getattr(text, name, None)
        if asked and count:
            return float(asked) / float(count)
    return 1.0


def _kv_cache(text: Any) -> dict[str, Any]:
    layers = int(text.num_hidden_layers)
    kinds = list(getattr(text, "layer_types", None) or ["full_attention"] * layers)
    windowed = sum(kind in ("sliding_attention", "chunked_attention") for kind in kinds)
    attending = windowed + sum(kind == "full_attention" for kind in kinds)
    window = getattr(text, "sliding_window", None)
    if window and "layer_types" not in text.to_dict():
        windowed = attending
    _, _, kv_heads, width = _heads(text)
    numbers = 2 * attending * kv_heads * width  # a key and a value
    return {
        "bytes_per_token": {dtype: size * numbers for dtype, size in BYTES.items()},
        "attending_layers": attending,
        "window": int(window) if window and windowed else None,
        "window_layers": windowed if window else 0,
    }


def _heads(text: Any) -> tuple[int, int, int, int]:
    """Width of the hidden state, heads, key-value heads, and the width of one head."""
    hidden, heads = int(text.hidden_size), int(getattr(text, "num_attention_heads", None) or 0)
    if not heads:
        return hidden, 0, 0, 0
    kv_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    return hidden, heads, kv_heads, int(getattr(text, "head_dim", None) or hidden // heads)
