"""Studies of docs/results.md and docs/papers.md by name: their cells as data for `jaxmpi sweep`.

    python scripts/study.py batch wires periods elastic text --seeds 5 --out runs/study

Workers are devices of one process. In `elastic` and `strategies` they are ranks under mpirun, which asynchronous rules
and strategies of MPI need. The runs of a study are below OUT/NAME.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import harness
from harness import ROOT

from jaxmpi.tools import sweep
from jaxmpi.tools.sweep import Cell


class Study(NamedTuple):
    """A question and its cells, of which the first is the reference."""

    question: str
    experiment: str
    cells: Sequence[Cell]


def grid(common: Cell, vary: Mapping[str, Sequence[str]] | None = None) -> list[Cell]:
    """All combinations of values beside common settings, the last field fastest."""
    return [common | cell for cell in sweep.grid(vary or {})]


DIGITS = "experiments/digits.py"
EIGHT = {"devices": "8", "local-batch": "8", "train-for": "20ep", "eval-every": "5ep"}
FOUR = {"n": "4", "local-batch": "8", "train-for": "20ep", "eval-every": "5ep"}
TEXT = {"devices": "4", "local-batch": "8", "train-for": "400st"}
ONE, TWO = {"devices": "1", "local-batch": "8", "optim.b2": "0.95"}, {"devices": "2"}
PERIODS = ("1", "2", "5", "10", "20", "45")
STRATEGIES = ("ar", "asa32", "asa16", "ring32")
ADAMW = {"optim.name": "adamw", "optim.lr": "0.004", "train-for": "300st"}
STUDIES = {
    "batch": Study(
        "Does 8 x b cost accuracy against 1 x b? The same epochs; the rate as it is, and times 8.",
        DIGITS,
        grid(EIGHT | {"devices": "1", "optim.lr": "0.02"}) + grid(EIGHT, {"optim.lr": ("0.02", "0.05", "0.16")}),
    ),
    "wires": Study(
        "What do coarser exchanges cost?",
        DIGITS,
        grid(EIGHT, {"exchange.strategy": ("asa32", "asa16", "asabf16", "asa8", "lowrank4", "topk10")}),
    ),
    "periods": Study(
        "How far can H grow?",
        DIGITS,
        [
            *grid(EIGHT | {"rule.name": "gradients", "optim.lr": "0.05"}),
            *grid(EIGHT | {"rule.name": "local_sgd", "optim.lr": "0.05"}, {"rule.local-steps": PERIODS}),
            # The outer optimizer multiplies what workers move by eta / (1 - mu) = 7 in the long run.
            *grid(EIGHT | {"rule.name": "diloco", "optim.lr": "0.007"}, {"rule.local-steps": PERIODS[2:]}),
        ],
    ),
    "strategies": Study(
        "Does every rule learn over every strategy? SUBGD sums updates, so it runs 1/4 of the learning rate.",
        DIGITS,
        [
            *grid({"n": "4", "rule.name": "subgd", "optim.lr": "0.005"}, {"exchange.strategy": STRATEGIES}),
            *grid({"n": "4"}, {"rule.name": ("awagd", "gradients"), "exchange.strategy": STRATEGIES}),
        ],
    ),
    "elastic": Study(
        "Which alpha and tau for EASGD?",
        DIGITS,
        [
            FOUR,
            *grid(
                FOUR | {"rule.name": "easgd"},
                {"rule.tau": ("1", "4", "16"), "rule.alpha": ("0.1", "0.25", "0.5", "0.9")},
            ),
        ],
    ),
    "text": Study(
        "How far can H grow on text? Bits per byte.",
        "experiments/gpt.py",
        [
            TEXT | {"rule.name": "gradients"},
            *grid(TEXT | {"rule.name": "local_sgd"}, {"rule.local-steps": ("10", "50")}),
            # A third of the rate, as its outer optimizer makes more of it.
            *grid(TEXT | {"rule.name": "diloco", "optim.lr": "0.0007"}, {"rule.local-steps": ("10", "50")}),
        ],
    ),
    "muon": Study(
        "How many of AdamW's 300 steps does Muon need? Each at the rate that is best with seed 100. Bits per byte.",
        "experiments/gpt.py",
        [ONE | ADAMW, *grid(ONE | {"optim.name": "muon", "optim.lr": "0.04"}, {"train-for": ("225st", "150st")})],
    ),
    "figure4": Study(
        "Ma et al. 2016, figure 4 and table 1: what do more workers and 16 bits cost AlexNet, at the paper's rates?",
        "experiments/scaling/alexnet.py",
        [
            *grid({"local-batch": "16", "optim.lr": "0.01"}, {"devices": ("1", "2", "4")}),
            {"devices": "8", "local-batch": "16", "optim.lr": "0.005"},
            *grid({"devices": "8", "local-batch": "4", "optim.lr": "0.005"}, {"exchange.strategy": ("asa32", "asa16")}),
        ],
    ),
    "figure5": Study(
        "Ma et al. 2016, figure 5 and table 1: what do more workers and 16 bits cost GoogLeNet, at the paper's rates?",
        "experiments/scaling/googlenet.py",
        [
            *({"devices": n, "optim.lr": lr} for n, lr in (("1", "0.01"), ("2", "0.007"), ("4", "0.005"))),
            *grid({"devices": "8", "optim.lr": "0.005"}, {"exchange.strategy": ("asa32", "asa16")}),
        ],
    ),
    "alexnet": Study(
        "Does the paper's AlexNet learn? In pixels, and divided by their standard deviation.",
        "experiments/papers/alexnet.py",
        [TWO, TWO | {"data.std": "0.376"}],
    ),
    "vgg16": Study(
        "Does the paper's VGG-16 learn? In pixels, and divided by their standard deviation.",
        "experiments/papers/vgg16.py",
        [TWO, TWO | {"data.std": "0.376"}],
    ),
    "googlenet": Study(
        "Does the paper's GoogLeNet learn? At a rate for 10 classes, and at the paper's for 2 workers.",
        "experiments/papers/googlenet.py",
        [TWO, TWO | {"optim.lr": "0.007"}],
    ),
    "resnet50": Study("Does the paper's ResNet-50 learn?", "experiments/papers/resnet50.py", [TWO]),
    "googlenetbn": Study("Does the paper's GoogLeNetBN learn?", "experiments/papers/googlenetbn.py", [TWO]),
}


def make_sweep(study: Study, options: argparse.Namespace, out: Path) -> sweep.Sweep:
    """The sweep of a study; fields that all cells share, and those of --set, go to the words of all runs."""
    cells = [{**cell, **dict(options.set)} for cell in study.cells]
    cells = [cell for i, cell in enumerate(cells) if cell not in cells[:i]]
    common = set.intersection(*({*cell.items()} for cell in cells)) if len(cells) > 1 else set()
    train = sweep.train_words([str(ROOT / study.experiment)], dict(sorted(common)))
    varied = [{name: value for name, value in cell.items() if (name, value) not in common} for cell in cells]
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    return sweep.Sweep(train, varied, seeds, out)


def setting(text: str) -> tuple[str, str]:
    """A field and its value."""
    name, [value, *more] = sweep.setting(text)
    if more:
        raise argparse.ArgumentTypeError(f"got {text!r}; expected one value")
    return name, value


def main() -> None:
    """Run what is missing, print tables."""
    parser = harness.parser(__doc__)
    parser.add_argument("studies", nargs="+", choices=STUDIES)
    parser.add_argument("--set", type=setting, nargs="+", default=[], metavar="FIELD=VALUE", help="in every cell")
    parser.add_argument("--seeds", type=harness.positive, default=5, help="runs of every cell")
    parser.add_argument("--first-seed", type=int, default=0, help="to tune with other seeds than those reported")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "study", help="folder of all run directories")
    parser.add_argument("--show", action="store_true", help="tables of what is there; run nothing")
    options = parser.parse_args()
    for name in options.studies:
        chosen = make_sweep(STUDIES[name], options, options.out / name)
        if not options.show:
            sweep.run_missing(chosen)
        rows = sweep.table(sweep.summaries(chosen))
        print(f"{STUDIES[name].question} `{STUDIES[name].experiment}`", "", *rows, "", sep="\n", flush=True)


if __name__ == "__main__":
    main()
