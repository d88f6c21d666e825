"""Settings of a run: frozen dataclasses that check themselves, flags made from them, experiment files.

In reading order: `schema` (Experiment), `data`, `optim`, `rule_config`, `exchange_config`, `choices`, `durations`,
`flags`, `experiment_file`.

It imports `core` and `runtime`.
"""

from jaxmpi.config.data import Data as Data
from jaxmpi.config.exchange_config import ExchangeConfig as ExchangeConfig
from jaxmpi.config.optim import Optim as Optim
from jaxmpi.config.optim import Schedule as Schedule
from jaxmpi.config.rule_config import RuleConfig as RuleConfig
from jaxmpi.config.schema import Experiment as Experiment
