"""What decides a number: processor, kernels, libraries, device, dtype, attention path."""

import hashlib
import importlib.metadata
import json
import platform as stdlib_platform
import sys
from pathlib import Path
from typing import Any

# From the widest to the narrowest; the first that the processor has names its level.
ISA_LEVELS = (
    ("amx_bf16", "amx"),
    ("avx512_bf16", "avx512_bf16"),
    ("avx512f", "avx512"),
    ("avx2", "avx2"),
    ("avx", "avx"),
    ("sse4_2", "sse4.2"),
    ("sve", "sve"),
    ("asimd", "neon"),
)


def describe_platform(
    device: str = "cpu",
    dtype: str | None = None,
    attention: str | None = None,
    processes: int = 1,
) -> dict[str, Any]:
    """Describe the platform of this process, and give it a short fingerprint.

    Parameters
    ----------
    device
        ``"cpu"`` or ``"cuda"``: where the numbers were computed.
    dtype
        The floating-point type of the computation; ``None`` where nothing was computed in one.
    attention
        The attention path of the model; ``None`` where no model was run.
    processes
        How many processes added up their parts of the numbers; among the facts where it is more
        than one.

    Returns
    -------
    The facts, with ``fingerprint``: 16 hexadecimal digits of the SHA-256 over all of them.
    Host and user names are not among them, nor is the number of threads (that is in the
    context). ``torch`` is ``None`` for a job that did not load it.
    """
    facts: dict[str, Any] = {
        "system": stdlib_platform.system(),
        "machine": stdlib_platform.machine(),
        "cpu": _cpu(),
        "blas": _blas(),
        "numpy": _numpy(),
        "torch": _torch(),
        "gpu": _gpu() if device.startswith("cuda") else None,
        "device": device,
        "dtype": dtype,
        "attention": attention,
    }
    if processes > 1:
        facts["processes"] = processes
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return {"fingerprint": hashlib.sha256(text.encode()).hexdigest()[:16], **facts}


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """The feature flags of the first processor; empty where the kernel does not list them."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def isa_level(flags: frozenset[str] | None = None) -> str:
    """The widest instruction set of :data:`ISA_LEVELS` among ``flags``; else ``"baseline"``."""
    flags = cpu_flags() if flags is None else flags
    return next((level for flag, level in ISA_LEVELS if flag in flags), "baseline")


def _cpu() -> dict[str, Any]:
    model = None
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                model = value.strip()
                break
    except OSError:
        model = stdlib_platform.processor() or None
    return {"model": model, "isa": isa_level()}


def _blas() -> list[dict[str, Any]]:
    import threadpoolctl

    libraries = [
        {
            "library": pool["prefix"],
            "version": pool.get("version"),
            "architecture": pool.get("architecture"),
        }
        for pool in threadpoolctl.threadpool_info()
        if pool["user_api"] == "blas"
    ]
    return sorted(libraries, key=lambda library: json.dumps(library, sort_keys=True))


def _numpy() -> dict[str, Any] | None:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    simd = numpy.show_config(mode="dicts")["SIMD Extensions"]
    return {"version": str(numpy.__version__), "simd": simd.get("found", [])}


def _torch() -> dict[str, Any] | None:
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    return {
        "version": str(torch.__version__),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "onednn": bool(torch.backends.mkldnn.is_available()),
        "cuda": torch.version.cuda,
        "transformers": importlib.metadata.version("transformers"),
    }


def _gpu() -> dict[str, Any] | None:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "memory_mib": properties.total_memory // 2**20,
        "capability": f"{properties.major}.{properties.minor}",
        "driver": _driver_version(),
        "cudnn": torch.backends.cudnn.version(),
    }


def _driver_version() -> str | None:
    try:
        return Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        return None
