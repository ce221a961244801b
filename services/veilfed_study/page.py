"""The page of results, in Markdown: all its tables come from the documents of studies, but for the paper's own."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from veilfed_study import tables
from veilfed_study.tables import OURS, Table, difference, gap, percent

__all__ = ["PLOTS", "many_clients", "page", "scale_name"]

Document = Mapping[str, Any]

# Plots of each task that the page shows; their files are TASK-NAME.svg.
PLOTS = ("accuracy", "conflict", f"matrix-{OURS}")

NAMES = {"rounds": "rounds", "classifier_rate": "rate of w_g", "transform_rate": "rate of X", "blocks": "r"}

# FEDOT (CVPR 2026), mean of FEMNIST, PACS, Office-Home, VLCS and TerraIncognita with CLIP ViT-B/32, per cent.
PAPER = Table(
    "the paper",
    ["method", "G", "P", "C"],
    [
        ["zero-shot (CLIP)", "67.31", "-", "-"],
        ["FedCLIP", "71.76", "77.16", "75.81"],
        ["PromptFL", "78.01", "84.97", "83.23"],
        ["VPT", "71.25", "83.36", "80.18"],
        ["FedGH, on CLIP", "-", "-", "34.85"],
        ["FedLT", "74.77", "88.43", "84.24"],
        ["FedAdapter", "77.99", "86.93", "84.57"],
        ["FEDOT, all global", "76.59", "84.09", "82.22"],
        ["FEDOT, all local", "-", "84.54", "-"],
        ["FEDOT", "76.04", "86.21", "83.65"],
        ["FEDOT(+B)", "78.67", "88.58", "86.10"],
    ],
)


def page(studies: Sequence[Document], scales: Sequence[Document], command: str, why: str) -> str:
    """The whole page. `why` is what is said to the figures by hand."""
    parts = [
        "# Results: FEDOT and its relatives\n\n"
        f"Written by `{command}`; every table and plot below is computed by it, but for the paper's own table; "
        "what is said to them in words is written by hand.\n",
        _how(studies),
        "## What the paper claims, and what was found\n\n" + _claims(studies).markdown(),
        why,
        *(_task(document) for document in studies),
        *([many_clients(scales)] if scales else []),
        "## The paper's own table\n\nMean of five sets of images with CLIP ViT-B/32, seeds 50, 77 and 98, per cent. "
        "Other data and another model: the figures stand beside each other and cannot be compared. With "
        "the files of the sets and the encoders installed, `veilfed study fedot --data DIR --set pacs --fm "
        "open_clip:ViT-B-32 --out results`, and so on for each set, computes the rows of those methods that are here "
        "(PromptFL and VPT are not, and FedGH is another variant), with the defaults of a job, or with "
        "`--settings FILE`, such as `veilfed study sweep` with the same options writes.\n\n" + PAPER.markdown(),
    ]
    return "\n".join(parts)


def _how(studies: Sequence[Document]) -> str:
    seeds = ", ".join(str(seed) for seed in studies[0]["seeds"])
    return (
        "One domain is held out at a time. G: the model alone on the held-out domain. P: the others on their own test "
        "rows, each with what it keeps. C: all cells of the matrix ([studies](studies.md), [methods](methods.md)).\n\n"
        "The rates and rounds of every method were chosen for each task from one grid, on validation folds of the "
        "training rows; r is 24 for all methods with blocks and was not searched ([how](choosing-rates.md)). The "
        "choice saw training rows of all domains, also of those that are held out later, so G is not that of a domain "
        "nobody had seen. The split into training and test rows is one for all seeds "
        f"(seed {studies[0]['split']}), so no row that this choice was made on is a test row anywhere; but the ranges "
        "of the grid and r were settled before, on other splits of the same samples "
        "([what was not blind](choosing-rates.md#all-methods-for-the-results)). The seeds "
        f"({seeds}) move first values and batches: mean ± standard deviation over them says what training leaves to "
        "chance, and nothing about other samples. The intervals of differences have both: 95 of 100 values are between "
        "the two numbers when test rows (by group) and seeds are drawn again, for both methods alike "
        "([how](studies.md)). What another training split would bring is in neither.\n"
    )


def best(document: Document, figure: str, without: Sequence[str] = ()) -> str:
    """The method with the largest mean."""
    known: dict[str, float] = {
        name: found[figure]["mean"]
        for name, found in document["methods"].items()
        if found[figure]["mean"] is not None and name not in without
    }
    return max(known, key=known.__getitem__)


def _claims(studies: Sequence[Document]) -> Table:
    """One row for each claim of the paper, one column for each task."""
    rows = [
        ["FEDOT(+B) has the highest C", *(_lead(document, "C") for document in studies)],
        ["and the highest P", *(_lead(document, "P") for document in studies)],
        ["and the highest G", *(_lead(document, "G") for document in studies)],
        ["blocks help: FEDOT(+B) above FEDOT in C", *_compare(studies, OURS, "fedot", "C")],
        ["aggregation helps: P above all-local", *_compare(studies, OURS, "all-local", "P")],
        ["the private transform helps: P above all-global", *_compare(studies, OURS, "all-global", "P")],
        ["and above averaging without one", *_compare(studies, OURS, "averaging", "P")],
        ["random rows do as well as class vectors: C", *_compare(studies, OURS, "fedot-b-text", "C")],
        ["steps conflict least with FEDOT, then FedLT, then FedAdapter", *(_order(document) for document in studies)],
        ["FedLT's condition number", *(_condition(document) for document in studies)],
        ["an unconstrained map costs G: FEDOT above FedLT", *_compare(studies, "fedot", "fedlt", "G")],
    ]
    return Table("claims", ["claim", *(document["task"] for document in studies)], rows)


def _lead(document: Document, figure: str) -> str:
    """Level where the difference to the best of the others could as well be none."""
    rival = best(document, figure, [OURS])
    found = gap(document, OURS, rival, figure)
    if found is None:
        return "-"
    mean, low, high = found
    verdict = "level" if low <= 0 <= high else "yes" if mean > 0 else "no"
    label = document["methods"][rival]["label"]
    return f"{verdict}: {difference(document, OURS, rival, figure)} against {label}"


def _compare(studies: Sequence[Document], one: str, other: str, figure: str) -> Iterator[str]:
    for document in studies:
        if {one, other} <= document["methods"].keys():
            yield difference(document, one, other, figure)
        else:
            yield "no text tower" if other.endswith("text") else "-"


def _order(document: Document) -> str:
    """Level where two neighbours in the order are no further apart than their standard deviations together."""
    names = ("fedot", "fedlt", "fedadapter")
    found = tables.early_conflict(document, names)
    pairs = [(found[one], found[other]) for one, other in itertools.pairwise(names)]
    gaps = [one["mean"] - other["mean"] for one, other in pairs]
    widths = [float(np.hypot(one["sd"] or 0, other["sd"] or 0)) for one, other in pairs]
    if any(gap < -width for gap, width in zip(gaps, widths, strict=True)):
        verdict = "no"
    elif any(gap <= width for gap, width in zip(gaps, widths, strict=True)):
        verdict = "level"
    else:
        verdict = "yes"
    values = ", ".join(tables.cosine(found[name]) for name in names)
    return f"{verdict}: {values} (rounds 1 to {tables.shared_rounds(document, names)})"


def _condition(document: Document) -> str:
    found = document["methods"]["fedlt"]["condition_number"]
    return f"mean {found['mean']:.2f}, largest {found['largest']:.2f}"


def _task(document: Document) -> str:
    name = document["task"]
    domains = ", ".join(f"{domain} ({count})" for domain, count in document["domains"].items())
    areas = (
        " AUC: area under the ROC curve, per cent." if any("areas" in m for m in document["methods"].values()) else ""
    )
    leader = best(document, "C")
    lines = [
        f"## {name}",
        f"{document['title'][:1].upper()}{document['title'][1:]}; {document['model']}, d = {document['dimension']}. "
        f"Samples: {domains}. Accuracy in per cent.{areas}",
        tables.figures(document).markdown(),
        f"Largest C: {document['methods'][leader]['label']}, {percent(document['methods'][leader]['C'])}. "
        "Points that FEDOT(+B) is ahead, with their intervals:",
        tables.differences(document).markdown(),
        *(f"![{name}: {plot}](figures/{name}-{plot}.svg)" for plot in PLOTS),
        _about_cosines(document),
        tables.geometry(document).markdown(),
        "One institution in one round:",
        tables.costs(document).markdown(),
        "Settings, as the jobs had them:",
        tables.settings(document).markdown(),
    ]
    return "\n\n".join(line.rstrip("\n") for line in lines) + "\n"


def _about_cosines(document: Document) -> str:
    known = [name for name, found in document["methods"].items() if found["conflict"] is not None]
    return (
        "Gradient conflict (mean cosine of two institutions' steps of w_g, over the rounds that all of these methods "
        f"have: 1 to {tables.shared_rounds(document, known)}; ± over the seeds) and condition numbers. The rates "
        "differ between the methods, so their cosines do not show the methods alone:"
    )


def many_clients(scales: Sequence[Document]) -> str:
    """G and P over the number of clients."""
    seeds = ", ".join(str(seed) for seed in scales[0]["seeds"])
    lines = [
        "## Many clients",
        "The samples of all domains but the one that is held out are divided among many clients, of which some take "
        "part; G is on the held-out domain's test rows, P the mean over those that take part, on theirs. Mean over "
        f"held-out domains, per cent; ± over the seeds ({seeds}), which here move the division too. More clients also "
        "bring more data. Rates and r are those of the task, chosen for few clients with all their domain's rows; the "
        "number of rounds is another.",
    ]
    for document in scales:
        used = [
            f"{label}: " + ", ".join(f"{NAMES[key]} {chosen[key]}" for key in NAMES if key in chosen)
            for label, chosen in document["settings"].items()
        ]
        lines += [
            f"{document['task']}, {document['split']}; {document['rows']:.0f} training rows a client on average; "
            f"{document['left_out']:.1f} further clients without training or test rows left out on average. "
            f"{'; '.join(used)}.",
            tables.clients(document).markdown(),
            f"![{document['task']}: clients](figures/{scale_name(document)}.svg)",
        ]
    return "\n\n".join(line.rstrip("\n") for line in lines) + "\n"


def scale_name(document: Document) -> str:
    return f"{document['task']}-scale-{document['split'].split(',')[0]}"
