"""Run an experiment file for the launcher; answer facts as JSON."""

import json
import sys
from pathlib import Path

from jaxmpi.config import experiment_file
from jaxmpi.core.errors import UsageError, lookup
from jaxmpi.rules.registry import RULES
from jaxmpi.runtime import launchers

if __name__ == "__main__":
    parent, answer, *train_args = sys.argv[1:]
    launchers.end_with_parent(int(parent))
    try:
        experiment, _ = experiment_file.parse(train_args)
        rule = lookup(RULES, experiment.rule.name, "rule")
        facts = {
            "outlives_ranks": rule.is_asynchronous or experiment.on_rank_loss == "shrink",
            "run_dir": experiment.run_dir,
            "resume": experiment.resume,
            "from_start": experiment.from_start,
        }
    except UsageError as error:
        facts = {"error": str(error)}
    Path(answer).write_text(json.dumps(facts))
