"""``results/report/index.html``: one page, made from artifacts alone, that needs nothing else."""

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from pharos.errors import CheckFailed
from pharos.report.figures import TRIANGLE, interval_strip, loss_curve, null_histogram
from pharos.report.leaderboard import (
    METRICS,
    baseline_of,
    floors_of,
    gate_of,
    leaderboard_rows,
    write_leaderboard,
)
from pharos.report.sources import Source, load_sources
from pharos.runtime.artifacts import write_text_atomic

Paths = Iterable[Path | str]
NAMES = {
    "f1": "F1",
    "accuracy": "Accuracy",
    "auroc": "AUROC",
    "precision": "Precision",
    "recall": "Recall",
}
KINDS = {
    "shortcut-gate": "shortcut gate",
    "model": "prefetch",
    "evaluation": "evaluation",
    "training": "fine-tuning",
    "promotion-gate": "promotion gate",
}
DRAWN = ("f1", "accuracy", "auroc")
# Good, bad or open: the three colours of a verdict.
TONES = {
    "PROMOTE": "good",
    "PASS": "good",
    "REJECT": "bad",
    "LEAK": "bad",
    "INCONCLUSIVE": "open",
}
NOT_KNOWN = "not recorded"
NBSP = "\u00a0"
SHOWN_FEATURES = 8


def build_report(
    *,
    shortcuts: Paths,
    models: Paths,
    evaluations: Paths,
    trainings: Paths,
    promotions: Paths,
    out_dir: Path | str,
    title: str,
) -> Path:
    """Write ``index.html`` and ``leaderboard.csv`` into ``out_dir``.

    Each list names artifacts of one kind and may be empty; what is missing is said on the page.
    The page links to the artifacts by relative paths. The same artifacts give the same bytes.

    Returns
    -------
    The path of the page.

    Raises
    ------
    InputError
        If an artifact cannot be read, or is of another kind than its list.
    CheckFailed
        If a number was made with another version of a model than the one fetched.
    """
    out_dir = Path(out_dir)
    gates = load_sources(shortcuts, "shortcut-gate", out_dir)
    fetched = load_sources(models, "model", out_dir)
    asked = load_sources(evaluations, "evaluation", out_dir)
    trained = load_sources(trainings, "training", out_dir)
    judged = load_sources(promotions, "promotion-gate", out_dir)
    _refuse_stale(fetched, [*asked, *trained])
    everything = [*gates, *fetched, *trained, *asked, *judged]

    environment = Environment(
        loader=PackageLoader("pharos", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["sentence"] = _sentence
    page = environment.get_template("page.html.j2").render(
        title=title,
        promotions=[_promotion(source) for source in sorted(judged, key=_best_first)],
        promotion_counts=_counts(judged, ("PROMOTE", "REJECT", "INCONCLUSIVE")),
        adapters_trained=bool(trained),
        gates=[_gate(source, asked) for source in gates],
        gate_counts=_counts(gates, ("PASS", "LEAK", "INCONCLUSIVE")),
        platforms=_platforms(asked, gates),
        concerns=[source for source in asked if source.result["concerns"]],
        unconcerned=[source for source in asked if not source.result["concerns"]],
        trainings=[_training(source) for source in trained],
        models=[_model(source) for source in fetched],
        runs=[_run(source) for source in everything],
        oversubscribed=sum(_is_oversubscribed(source) for source in everything),
        code=_code(everything),
        tones=TONES,
        triangle=TRIANGLE,
        sources=everything,
    )
    path = out_dir / "index.html"
    write_leaderboard(out_dir / "leaderboard.csv", leaderboard_rows(asked, gates, judged))
    write_text_atomic(path, page)
    return path


def _sentence(text: str) -> str:
    """The sentence with "n = 160", "p = 0.01" and "95 %" kept on one line."""
    return re.sub(
        r"(?<=\b[np]) = (?=\d)|(?<=\d) (?=%)", lambda gap: gap[0].replace(" ", NBSP), text
    )


def _counts(sources: Sequence[Source], verdicts: Sequence[str]) -> list[dict[str, Any]]:
    found = Counter(source.result["verdict"] for source in sources)
    return [
        {"verdict": verdict, "count": found[verdict], "tone": TONES[verdict]}
        for verdict in verdicts
        if found[verdict]
    ]


def _promotion(source: Source) -> dict[str, Any]:
    """One adapter's verdict, its headline, and the two F1 it rests on."""
    result = source.result
    floors = {"always positive": result["floors"]["always_positive_f1"]}
    sides = []
    for name, side in (("base", "base"), (source.variant, "adapter")):
        score = result[side]["f1"]
        if score["value"] is not None:
            sides.append({"name": name, **_drawn("F1", score, floors, f"F1 of {name}")})
    # The gate lists its reasons with the deciding ones first; the marks come along.
    reasons = sorted(result["checks"], key=lambda check: result["reasons"].index(check["says"]))
    wanted = {"REJECT": (False,), "INCONCLUSIVE": (False, None)}.get(result["verdict"], ())
    return {
        "source": source,
        "verdict": result["verdict"],
        "tone": TONES[result["verdict"]],
        "headline": _headline(source),
        "sides": sides,
        "gain": result["f1_gain"],
        "auroc": _auroc_says(result["base"]["auroc"], result["adapter"]["auroc"]),
        "n": result["n"],
        "floor": result["floors"]["always_positive_f1"],
        "deciding": [check for check in reasons if check["holds"] in wanted],
        "others": [check for check in reasons if check["holds"] not in wanted],
        "caveats": result["caveats"],
    }


def _auroc_says(base: Mapping[str, Any], adapter: Mapping[str, Any]) -> str | None:
    """The change in AUROC, where both sides have one: how well they rank, wherever they cut."""
    if base["value"] is None or adapter["value"] is None:
        return None
    before, after = (
        f"{side['value']:.3f} (95 % interval {side['low']:.3f} to {side['high']:.3f})"
        for side in (base, adapter)
    )
    change = adapter["value"] - base["value"]
    return f"AUROC goes from {before} to {after}, a change of {change:+.3f}."


def _best_first(source: Source) -> tuple[Any, ...]:
    return list(TONES).index(source.result["verdict"]), source.cell


def _headline(source: Source) -> str:
    adapter, verdict = source.variant, source.result["verdict"]
    if verdict == "PROMOTE":
        return f"{adapter} is better than its base"
    if verdict == "INCONCLUSIVE":
        return f"It cannot be told whether {adapter} is better than its base"
    failed = {check["name"] for check in source.result["checks"] if check["holds"] is False}
    if failed & {"f1_gain", "mcnemar"}:
        return f"{adapter} is not better than its base"
    if "unparsed" in failed:
        return f"{adapter} leaves too many answers that cannot be parsed"
    return f"{adapter} does not clear its floors"


def _drawn(
    name: str, metric: Mapping[str, Any], floors: Mapping[str, float], label: str
) -> dict[str, Any]:
    """A metric's numbers as text, and its strip; ``None`` for what has no value."""
    if metric["value"] is None:
        return {"value": None, "reason": metric.get("reason", "no value"), "floors": floors}
    value, low, high = metric["value"], metric["low"], metric["high"]
    said = ", ".join(f"{what} {floor:.3f}" for what, floor in floors.items()) or "no floor"
    return {
        "value": f"{value:.3f}",
        "interval": f"{low:.3f}–{high:.3f}",
        "floors": floors,
        "strip": interval_strip(
            value,
            low,
            high,
            floors,
            f"{label}: {value:.3f}, interval {low:.3f} to {high:.3f}, {said}",
        ),
    }


def _refuse_stale(models: Sequence[Source], made: Sequence[Source]) -> None:
    """Numbers of a model's earlier version do not stand under its present one."""
    versions = {source.model: source.result["version"] for source in models}
    for source in made:
        version, present = source.result["model_version"], versions.get(source.model)
        if present is not None and version != present:
            raise CheckFailed(
                f"{source.path}: made with version {version[:12]} of {source.model}, fetched is "
                f"{present[:12]}; make it again: snakemake --forcerun evaluate finetune"
            )


def _gate(source: Source, evaluations: Sequence[Source]) -> dict[str, Any]:
    """One corpus at the shortcut gate, with its null distribution drawn."""
    result = source.result
    baseline, null = baseline_of(source), result["null"]
    figure = None
    if null is not None:
        counts, bin_ = null["histogram"]["counts"], null["histogram"]["bin"]
        # The artifact counts distances from 0.5; the axis is AUC.
        start = 0.5 + null["histogram"]["start"]
        figure = null_histogram(
            [start + bin_ * number for number in range(len(counts) + 1)],
            counts,
            baseline,
            result["ceiling"],
            f"Null distribution of {source.task} seed {source.seed}: AUC {baseline:.3f} observed, "
            f"ceiling {result['ceiling']:.3f}",
        )
    used = any((one.task, one.seed) == (source.task, source.seed) for one in evaluations)
    return {
        "source": source,
        "verdict": result["verdict"],
        "tone": TONES[result["verdict"]],
        "headline": _gate_headline(source, used),
        "says": _gate_says(source, baseline),
        "concerns": result["concerns"],
        "figure": figure,
        "probes": [
            {
                "name": name,
                "auc": float(probe["auc"]["decimal"]),
                "folds": [
                    (fold["group"], float(fold["auc"]["decimal"])) for fold in probe["folds"]
                ],
            }
            for name, probe in result["probes"].items()
        ],
        "features": [
            {"name": feature["name"], "auc": float(feature["auc"]["decimal"])}
            for feature in result["features"][:SHOWN_FEATURES]
        ],
    }


def _gate_says(source: Source, baseline: float) -> list[str]:
    """The gate's numbers in sentences, each with its n and what it is held against."""
    result, null = source.result, source.result["null"]
    worst = result["probes"].get(result["worst_probe"])
    auc = baseline if worst is None else float(worst["auc"]["decimal"])
    turned = f", {auc:.3f} the other way round" if auc < 0.5 else ""
    says = [
        f"AUC {baseline:.3f} ({result['worst_probe']} probe{turned}, n = {result['n']:,} lines in "
        f"{result['clusters']:,} clusters) against a ceiling of {result['ceiling']:.3f}."
    ]
    if null is not None:
        beyond = "beyond chance" if result["beyond_chance"] else "not beyond chance"
        says += [
            f"Shuffled labels reach {0.5 + null['mean']['value']:.3f} on average and "
            f"{0.5 + null['quantiles']['0.95']['value']:.3f} one time in twenty: "
            f"p = {result['p_value']:.3f} from {null['permutations']:,} shuffles, {beyond}.",
        ]
        if result["smallest_leak"] is not None:
            least = result["smallest_leak"]
            says.append(f"The smallest leak that would have shown 4 times in 5: {least:.3f}.")
    return says


def _gate_headline(source: Source, used: bool) -> str:
    corpus = f"{source.task}, seed {source.seed}"
    match source.result["verdict"]:
        case "PASS":
            return f"{corpus}: shape alone does not tell the labels"
        case "LEAK" if used:
            return f"{corpus}: the labels leak; it was evaluated all the same"
        case "LEAK":
            return f"{corpus}: the labels leak, so no model was put to it"
    return f"{corpus}: too small to tell whether its labels leak"


def _platforms(evaluations: Sequence[Source], gates: Sequence[Source]) -> list[dict[str, Any]]:
    """The leaderboards: one a fingerprint, cut by task and seed. Platforms are never mixed."""
    by_print = sorted(evaluations, key=lambda source: (source.fingerprint, source.cell))
    boards = []
    for fingerprint, of_platform in itertools.groupby(by_print, key=lambda s: s.fingerprint):
        sources = list(of_platform)
        tables = [
            {
                "task": task,
                "seed": seed,
                "rows": [_row(source, gates) for source in of_corpus],
            }
            for (task, seed), of_corpus in itertools.groupby(
                sources, key=lambda source: (source.task, source.seed)
            )
        ]
        for table in tables:
            first = next(s for s in sources if (s.task, s.seed) == (table["task"], table["seed"]))
            table["gate"] = gate_of(first, gates)
        boards.append(
            {
                "fingerprint": fingerprint,
                "facts": _platform_facts(sources[0].artifact.get("platform", {})),
                "tables": tables,
            }
        )
    return boards


def _row(source: Source, gates: Sequence[Source]) -> dict[str, Any]:
    result, floors = source.result, floors_of(source, gates)
    who = f"{source.model} {source.variant}"
    metrics = {
        name: _drawn(NAMES[name], result["metrics"][name], floors[name], f"{NAMES[name]} of {who}")
        for name in METRICS
    }
    return {
        "source": source,
        "metrics": metrics,
        "drawn": [(NAMES[name], metrics[name]) for name in DRAWN],
        "all": [(NAMES[name], metrics[name]) for name in METRICS],
        "n": result["n"],
        "clusters": result["clusters"],
        "unparsed": result["unparsed"],
        "fragile": result["fragile"]["count"],
        "settled": (result.get("settled") or {"count": 0})["count"],
        "confusion": result["confusion"],
        "concerns": len(result["concerns"]),
    }


def _platform_facts(platform: Mapping[str, Any]) -> list[str]:
    cpu, torch, gpu = (platform.get(key) or {} for key in ("cpu", "torch", "gpu"))
    facts = [
        platform.get("device"),
        platform.get("dtype"),
        gpu.get("name"),
        cpu.get("model"),
        cpu.get("isa"),
        torch and f"torch {torch.get('version')}",
        platform.get("attention") and f"{platform['attention']} attention",
    ]
    return [str(fact) for fact in facts if fact]


def _training(source: Source) -> dict[str, Any]:
    """One adapter's training: its loss curve, and what it cost."""
    result, timing = source.result, source.artifact.get("timing", {})
    losses, parameters = result["losses"], result["parameters"]
    facts = [
        ("weights trained", f"{parameters['trainable']:,}"),
        ("of all weights", f"{100 * parameters['share']:.2f}{NBSP}%"),
        ("training events", f"{result['examples']:,}"),
        ("steps", f"{result['steps']:,} in {_plural(result['epochs'], 'epoch')}"),
        ("loss, last tenth", f"{result['final_loss']:.4f}"),
    ]
    if timing.get("wall_s") is not None:
        facts.append(("wall time", _duration(timing["wall_s"])))
    if timing.get("tokens_per_s") is not None:
        facts.append(("tokens a second", f"{timing['tokens_per_s']:,.0f}"))
    label = f"Training loss of {source.variant} on {source.model}"
    return {
        "source": source,
        "facts": facts,
        "figure": loss_curve(range(1, len(losses) + 1), losses, label) if losses else None,
    }


def _plural(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _model(source: Source) -> dict[str, Any]:
    result = source.result
    origin = result.get("source", {})
    named = {
        "wheel": f"wheel {origin.get('package')} {origin.get('version')}",
        "hub": f"{origin.get('repository')} at {str(origin.get('commit'))[:12]}",
        "dir": "a folder of your own",
    }
    size = sum(facts.get("bytes", 0) for facts in result.get("files", {}).values())
    return {
        "source": source,
        "origin": named.get(origin.get("kind", ""), NOT_KNOWN),
        "version": str(result.get("version") or NOT_KNOWN),
        "licence": result.get("licence") or NOT_KNOWN,
        "size": f"{size / 1e6:,.0f} MB" if size else NOT_KNOWN,
    }


def _run(source: Source) -> dict[str, Any]:
    """What ran where: threads and kernels as they were read back after the work."""
    context, timing = source.artifact.get("context", {}), source.artifact.get("timing", {})
    platform = source.artifact.get("platform", {})
    pools = [
        f"{pool['library']} {pool['architecture'] or ''}".strip() + f" × {pool['num_threads']}"
        for pool in context.get("pools", [])
    ]
    bound, requested = context.get("bound_threads"), context.get("requested_threads")
    threads = NOT_KNOWN if bound is None else str(bound)
    if requested not in (None, bound):
        threads += f" of {requested} asked for"
    return {
        "source": source,
        "what": _what(source),
        "fingerprint": source.fingerprint,
        "device": (platform.get("gpu") or {}).get("name") or platform.get("device") or NOT_KNOWN,
        "dtype": platform.get("dtype") or "–",
        "threads": threads,
        "pools": ", ".join(pools) or NOT_KNOWN,
        "wall": _duration(timing["wall_s"]) if "wall_s" in timing else NOT_KNOWN,
        "oversubscribed": _is_oversubscribed(source),
    }


def _what(source: Source) -> str:
    cell = [source.model, source.task, f"seed {source.seed}" if source.task else "", source.variant]
    return f"{KINDS[source.kind]}: {' · '.join(part for part in cell if part)}"


def _is_oversubscribed(source: Source) -> bool:
    return bool(source.artifact.get("context", {}).get("oversubscription_risk"))


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _code(sources: Sequence[Source]) -> list[dict[str, Any]]:
    """Which code made how many of the artifacts."""
    found: Counter[tuple[Any, ...]] = Counter()
    for source in sources:
        stated = source.artifact.get("provenance", {})
        found[tuple(stated.get(key) for key in ("version", "commit", "dirty", "reason"))] += 1
    return [
        {
            "version": version or NOT_KNOWN,
            "commit": commit or NOT_KNOWN,
            "tree": {True: "with uncommitted changes", False: "clean"}.get(dirty, "state unknown"),
            "reason": reason,
            "count": count,
        }
        for (version, commit, dirty, reason), count in sorted(found.items(), key=str)
    ]
