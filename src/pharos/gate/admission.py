"""What the shortcut gate's verdict means for the jobs behind it."""

from collections.abc import Mapping
from typing import Any

from pharos.errors import CheckFailed
from pharos.runtime.log import warn


def admit(gate: Mapping[str, Any], *, enforce: bool, where: str) -> dict[str, Any]:
    """Admit a corpus to evaluation and training.

    Parameters
    ----------
    gate
        ``result`` of a shortcut-gate artifact.
    enforce
        Whether a leaking corpus stops here.
    where
        The artifact's path, for the message.

    Raises
    ------
    CheckFailed
        If the corpus leaks and ``enforce`` is true.
    """
    verdict = gate["verdict"]
    leak = f"{'; '.join(gate['reasons'])}, see {where}"
    if verdict == "LEAK":
        if enforce:
            raise CheckFailed(f"{leak}; to go on all the same: shortcut_gate.enforce: false")
        warn(f"{leak}; going on, because shortcut_gate.enforce is false")
    elif verdict == "INCONCLUSIVE":
        warn(f"the corpus is too small for the shortcut gate to tell, see {where}")
    return {"verdict": verdict, "enforced": enforce, "surface_baseline": gate["surface_baseline"]}
