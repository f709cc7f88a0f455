"""Loading a fetched model: offline, from safetensors, on the device that was asked for."""

import contextlib
import json
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pharos.errors import CheckFailed, InputError
from pharos.models.cache import set_up_hub
from pharos.models.sources import base_identity, verified_folder
from pharos.runtime.platform import isa_level

if TYPE_CHECKING:
    from torch import Tensor

# Elsewhere bfloat16 is emulated, at a fifth to a quarter of the speed of float32.
CPU_LEVELS_WITH_BF16 = ("amx", "avx512_bf16")
GPU_CAPABILITY_WITH_BF16 = (8, 0)


@dataclass
class LoadedModel:
    """A model ready to be asked.

    ``device`` is ``"cpu"`` or ``"cuda"``, ``dtype`` ``"float32"`` or ``"bfloat16"``,
    ``precision`` ``"full"`` or ``"nf4"``, ``attention`` ``"sdpa"`` or ``"eager"``;
    ``context_length`` is in tokens, ``None`` where the model states no limit. ``originals`` are
    the stored values of weights that bfloat16 has rounded, for
    :func:`pharos.models.precision.in_float32`.
    """

    model: Any
    tokenizer: Any
    device: str
    dtype: str
    precision: str
    attention: str
    context_length: int | None
    originals: "dict[Tensor, Tensor]" = field(default_factory=dict, repr=False)

    @property
    def platform_dtype(self) -> str:
        """``dtype`` as an artifact's platform gives it: ``"bfloat16"``, ``"nf4/bfloat16"``."""
        return self.dtype if self.precision == "full" else f"{self.precision}/{self.dtype}"


def load_model(
    model_result: Mapping[str, Any],
    model_config: Mapping[str, Any],
    device: str = "cpu",
    adapter_dir: Path | str | None = None,
    exact: bool = False,
) -> LoadedModel:
    """Load a fetched model, and an adapter onto it, without touching the network.

    Parameters
    ----------
    model_result
        What :func:`pharos.models.prefetch.prefetch` returned.
    model_config
        ``models.<model>`` of the configuration, defaults filled in.
    device
        ``"cpu"`` or ``"cuda"``.
    adapter_dir
        A peft folder; ``None`` for the base alone.
    exact
        Keep what loading in bfloat16 rounds away, where the files hold more.

    Raises
    ------
    CheckFailed
        If ``"cuda"`` is asked for and no GPU is visible, or if a cached file is missing or
        damaged.
    InputError
        If the adapter cannot be read or names another base, or if the model has no such attention.
    """
    import torch

    check_device(device)
    if adapter_dir is not None:
        check_adapter(Path(adapter_dir), model_result)
    folder = verified_folder(model_result, model_config)
    set_up_hub(offline=True)
    import transformers

    from pharos.models import precision

    transformers.logging.disable_progress_bar()
    # A container may have set this to less; float32 is to mean float32.
    torch.set_float32_matmul_precision("highest")
    dtype = choose_dtype(model_config["dtype"], device)
    narrow_dtype = getattr(torch, dtype)
    four_bits = model_config["precision"] == "nf4"
    wide = precision.wide_weights(folder) if dtype == "bfloat16" else {}
    options: dict[str, Any] = {
        # 4-bit weights are made of the stored ones, so that they are the same in any dtype.
        "dtype": torch.float32 if four_bits and wide else narrow_dtype,
        "attn_implementation": model_config["attention"],
        "device_map": {"": device},
    }
    if four_bits:
        options["quantization_config"] = _four_bits(narrow_dtype)
    try:
        model, loading = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            **options,
        )
    except ValueError as error:
        if "attention implementation" not in str(error):
            raise
        raise InputError(
            f"models: attention: {model_config['attention']} is not there for this model; "
            "set attention: eager"
        ) from None
    _refuse_incomplete(loading)
    originals = {}
    if four_bits:
        _without_packing(model)
        originals = precision.narrow(model, narrow_dtype)
    elif exact and wide:
        originals = precision.read_originals(model, wide)
    if adapter_dir is not None:
        model = with_adapter(model, adapter_dir)
    model.eval().requires_grad_(False)
    return LoadedModel(
        model=model,
        tokenizer=load_tokenizer(folder),
        device=device,
        dtype=dtype,
        precision=model_config["precision"],
        attention=model_config["attention"],
        context_length=context_length_of(model.config),
        originals=originals if exact else {},
    )


def with_adapter(model: Any, folder: Path | str) -> Any:
    """``model`` with the adapter in ``folder`` put into it, for evaluation; no copy of it.

    :class:`pharos.models.restore.Snapshot` takes the adapter out again.
    """
    import peft

    with without_peft_warning():
        return peft.PeftModel.from_pretrained(model, str(folder), is_trainable=False).eval()


@contextlib.contextmanager
def without_peft_warning() -> Iterator[None]:
    """Silence that peft asks transformers by a deprecated name: nobody here can change it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is", FutureWarning)
        yield


def _refuse_incomplete(loading: Mapping[str, Any]) -> None:
    """Weights that the files lack would be random numbers, and the scores with them."""
    for what in ("missing_keys", "mismatched_keys", "error_msgs"):
        names = sorted(str(name) for name in loading.get(what) or ())
        if names:
            raise CheckFailed(
                f"the model's files do not hold all of its weights ({what.replace('_', ' ')}: "
                f"{names[0]}{f' and {len(names) - 1} more' if names[1:] else ''}); take a "
                "complete model"
            )


def load_tokenizer(folder: Path | str) -> Any:
    """The tokenizer of a model folder, without network and without remote code."""
    set_up_hub(offline=True)
    import transformers

    return transformers.AutoTokenizer.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False
    )


def context_length_of(config: Any) -> int | None:
    """The most tokens a model can read, from its transformers config; ``None`` if unstated."""
    text_config = config.get_text_config()
    length = getattr(text_config, "max_position_embeddings", None)
    return None if length is None else int(length)


def check_device(device: str) -> None:
    """Refuse a GPU that is not there: a model never runs on the CPU in its place."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        built = "" if torch.version.cuda else "; this torch is built without CUDA"
        raise CheckFailed(f"device: cuda is asked for, and no GPU is visible{built}")


def choose_dtype(asked: str, device: str) -> str:
    """``asked``, or for ``"auto"`` bfloat16 where the hardware multiplies it, else float32."""
    import torch

    if asked != "auto":
        return asked
    if device == "cuda":
        has_bf16 = torch.cuda.get_device_capability() >= GPU_CAPABILITY_WITH_BF16
    else:
        has_bf16 = isa_level() in CPU_LEVELS_WITH_BF16
    return "bfloat16" if has_bf16 else "float32"


def _four_bits(dtype: Any) -> Any:
    try:
        import bitsandbytes  # noqa: F401
    except ImportError:
        raise InputError("precision: nf4 needs the package bitsandbytes") from None
    import transformers

    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_use_double_quant=True,
    )


def _without_packing(model: Any) -> None:
    """Keep the layout of 4-bit weights as it was made.

    Where the processor has AVX-512 BF16, the library would pack them anew in their first
    product, round their scales to bfloat16, and compute in it whatever dtype is asked for.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def check_adapter(folder: Path, model_result: Mapping[str, Any]) -> None:
    """Refuse an adapter that is not whole or was trained on another base.

    Raises
    ------
    InputError
        With what the adapter records and what the base is.
    """
    path = folder / "adapter_config.json"
    try:
        recorded = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not JSON: {error}") from None
    if not (folder / "adapter_model.safetensors").is_file():
        raise InputError(f"{folder}: no adapter_model.safetensors (pickled adapters are refused)")
    for key, expected in base_identity(model_result).items():
        found = recorded.get(key) if isinstance(recorded, dict) else None
        if found != expected:
            raise InputError(
                f"{path}: {key} is {found!r}, and the base is {expected!r}: "
                "an adapter goes with the base it was trained on"
            )
