"""The page of results of one shot against many rounds, in Markdown; all its figures come from the study."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from veilfed_study import shot_tables
from veilfed_study.shot_tables import gap, verdict
from veilfed_study.tables import Table

__all__ = ["Found", "page"]

Document = Mapping[str, Any]

AFL, CGS, AVERAGING, FEDOT = "afl-gcv-1", "fedcgs-1", "averaging", "fedot-b"
OPAL = "fedopal-gcv-1-mu0.1-e1"
MEAN, FREE, FIXED, LONGER = (
    f"{OPAL}-reextract",
    "fedopal-gcv-1-mu0-e1",
    "fedopal-gcv-1-muinf-e1",
    "fedopal-gcv-1-mu0.1-e3",
)

# What is asked, by variants: the first minus the second.
BESIDE = [
    ("FedOPAL minus AFL", OPAL, AFL),
    ("FedOPAL minus FedCGS", OPAL, CGS),
    ("FedOPAL with reextract minus AFL", MEAN, AFL),
    ("FedOPAL with reextract minus FedOPAL", MEAN, OPAL),
    ("FedOPAL minus averaging in many rounds", OPAL, AVERAGING),
    ("FedOPAL minus FEDOT(+B) in many rounds", OPAL, FEDOT),
    ("AFL minus FedCGS", AFL, CGS),
]
SWEPT = [
    ("prompts as drawn (mu infinite) minus AFL, which has none", FIXED, AFL),
    ("prompts tuned with mu 0.1 minus as drawn", OPAL, FIXED),
    ("prompts tuned with mu 0 minus as drawn", FREE, FIXED),
    ("three epochs of tuning minus one", LONGER, OPAL),
]
ROUNDS = [
    ("AFL minus averaging", AFL, AVERAGING),
    ("AFL minus FEDOT(+B)", AFL, FEDOT),
    ("AFL minus FedCGS", AFL, CGS),
    ("AFL minus AFL with classes from 5 samples on", AFL, "afl-gcv-5"),
]


@dataclass(frozen=True)
class Found:
    """The three studies of a task: on all rows, with FedOPAL on some of them, and its tunings on those."""

    whole: Document
    beside: Document
    sweep: Document


def page(found: Sequence[Found], command: str, why: str) -> str:
    """The whole page. `why` is what is said to the figures by hand."""
    parts = [
        "# Results: one shot against many rounds\n\n"
        f"Written by `{command}`; every table and plot is computed by it, what is said to them in words is written by "
        "hand.\n",
        _how(found),
        "## What was found\n\nDifferences of accuracies on the test rows, in points, with intervals; level where zero "
        "is in the interval. Lambda by GCV.\n\n" + _claims(found).markdown(),
        "On all rows, with 10 and with 100 clients:\n\n" + _rounds(found).markdown(),
        why,
        *(_task(one) for one in found),
    ]
    return "\n".join(part for part in parts if part)


def _how(found: Sequence[Found]) -> str:
    first = found[0].whole
    seeds = ", ".join(map(str, first["seeds"]))
    rounds = next(variant for variant in first["variants"] if variant["name"] == FEDOT)["settings"]["rounds"]
    return (
        "[Studies](studies.md#one-shot-against-many-rounds) says what is divided and measured. All methods have the "
        "same clients, training rows and test rows, and all but FedOPAL the same cached embeddings: FedOPAL's are made "
        "anew with each client's prompts. Accuracies are in per cent, mean ± standard deviation over the seeds "
        f"({seeds}), which draw the division among clients, first values and batches, and FedOPAL's first prompts; the "
        f"split into training and test rows is one (seed {first['split']}). Intervals are those of "
        "[studies](studies.md): test rows (by group) and seeds are drawn again, for both methods alike. Lambda was not "
        "chosen on validation data: the rows show what each value gives on the test rows, and GCV is the one that "
        f"chooses by itself, from the sums alone. Averaging and FEDOT(+B) have {rounds} rounds; their rates and r are "
        "those that were [chosen](choosing-rates.md) for institutions that are domains, not for these clients. FedOPAL "
        "has the defaults of a [job](../reference/job.md), with gradients, but for batches of 16: clients are small, "
        "and the first batch of a tuning moves no prompts. None of this was chosen on these data.\n\n"
        "Bytes are of one client in the whole job. Seconds are the processor's, of all clients and the aggregator one "
        "after the other in one process with one thread, without evaluation and without the model, whose seconds stand "
        "apart: they do not grow with what else the machine does, but for caches and memory that are shared. Costs are "
        "those at the largest alpha.\n"
    )


def _claims(found: Sequence[Found]) -> Table:
    columns: list[str] = []
    rows: dict[str, list[str]] = {label: [] for label, *_ in (*BESIDE, *SWEPT)}
    for one in found:
        (clients,) = one.beside["clients"]
        for alpha in one.beside["alphas"]:
            columns.append(f"{one.beside['task']}, alpha {alpha:g}")
            for pairs, document in ((BESIDE, one.beside), (SWEPT, one.sweep)):
                for label, mine, other in pairs:
                    rows[label].append(verdict(gap(document, clients, alpha, mine, other)))
    return Table("claims", ["", *columns], [[label, *values] for label, values in rows.items()])


def _rounds(found: Sequence[Found]) -> Table:
    rows = []
    for one in found:
        for clients in one.whole["clients"]:
            for label, mine, other in ROUNDS:
                values = (verdict(gap(one.whole, clients, alpha, mine, other)) for alpha in one.whole["alphas"])
                rows.append([f"{one.whole['task']}, {clients} clients: {label}", *values])
    return Table("rounds", ["", *(f"alpha {alpha:g}" for alpha in found[0].whole["alphas"])], rows)


def _task(found: Found) -> str:
    whole, beside = found.whole, found.beside
    (clients,) = beside["clients"]
    lines = [
        f"## {whole['task']}",
        f"{whole['title'][:1].upper()}{whole['title'][1:]}; {whole['model']}, d = {whole['dimension']}, "
        f"{len(whole['classes'])} classes.",
        f"### FedOPAL beside AFL and FedCGS, {clients} clients",
        f"On {_rows(beside)}, drawn from all of them, since every gradient and every new embedding is a pass of the "
        "model. Accuracy on the test rows with the model alone, FedOPAL's with the mean prompt:",
        shot_tables.accuracies(beside, clients, "accuracy", costly=False).markdown(),
        "On each client's own mix of classes, FedOPAL's with the client's own prompts:",
        shot_tables.accuracies(beside, clients, "own", costly=False).markdown(),
        "Costs: bytes of one client, the rest of all clients together. Embeddings are those of the training rows, "
        "which all methods need once; FedOPAL's are made after the tuning, with its prompts. Lambda changes no cost: "
        "of variants that differ in it alone the first is shown.",
        shot_tables.costs(beside, clients).markdown(),
        f"How FedOPAL's prompts are tuned, on the same rows, at alpha {found.sweep['alphas'][0]:g} (mu infinite is AFL "
        "on the features of the first prompts):",
        shot_tables.accuracies(found.sweep, clients, "accuracy", costly=False).markdown(),
        shot_tables.costs(found.sweep, clients).markdown(),
        "### All rows",
        f"On {_rows(whole)}. What a client sends for AFL, once, is what it sends in {_worth(whole):.0f} rounds of "
        "FEDOT(+B).",
        f"![Accuracy over alpha](figures/analytic-{whole['task']}.svg)",
    ]
    for count in whole["clients"]:
        lines += [
            f"{count} clients, accuracy on the test rows with the model alone:",
            shot_tables.accuracies(whole, count, "accuracy").markdown(),
            f"{count} clients, on each client's own mix of classes:",
            shot_tables.accuracies(whole, count, "own", costly=False).markdown(),
        ]
    return "\n\n".join(line.rstrip("\n") for line in lines) + "\n"


def _worth(document: Document) -> float:
    """An upload of AFL in rounds of FEDOT(+B)."""
    cells = {variant["name"]: variant["cells"][0] for variant in document["variants"]}
    return float(cells[AFL]["bytes_sent"] / (cells[FEDOT]["bytes_sent"] / cells[FEDOT]["rounds"]))


def _rows(document: Document) -> str:
    return f"{document['rows']['training']:,} training rows and {document['rows']['test']:,} test rows"
