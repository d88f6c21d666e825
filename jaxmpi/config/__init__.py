"""Settings of a run: frozen dataclasses that check themselves, flags, experiment files.

In reading order: `schema`, the experiment; `data`, `optim`, `rule_config` and `exchange_config`, its parts; `validate`,
words and ranges of fields; `durations`, turned into steps; `flags`, made from fields; `experiment_file`, file and
command line as one experiment.

It imports `core` and `runtime`.
"""

from jaxmpi.config.data import Data as Data
from jaxmpi.config.exchange_config import ExchangeConfig as ExchangeConfig
from jaxmpi.config.optim import Optim as Optim
from jaxmpi.config.optim import Schedule as Schedule
from jaxmpi.config.rule_config import RuleConfig as RuleConfig
from jaxmpi.config.schema import Experiment as Experiment
