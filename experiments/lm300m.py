"""The ring-allreduce article's 300-million-parameter model (Gibiansky 2017), for benchmarks and plans.

jaxmpi bench -n 2 --tree lm300m --peers none
jaxmpi plan --experiment experiments/lm300m.py --step-s 1.0
mpirun -n 2 python -m jaxmpi.train experiments/lm300m.py --train-for 10st --eval-every 0st --checkpoint-every 0st

Data are bytes, and the vocabulary has more entries than there are bytes: exchange and step cost as much as over words.
With words: `jaxmpi data words stdlib words.json`, and `--data.tokenizer words.json`.
Plain SGD: params and gradients are 2.4 GB. A rank takes 7 to 9 GB at its peak, so two fit into 20. Not trained
to an end here.
"""

from jaxmpi.config import Data, ExchangeConfig, Experiment, Optim, RuleConfig
from jaxmpi.models.lstm import lm300m

WINDOW = 20

experiment = Experiment(
    model=lm300m(window=WINDOW),
    data=Data(source="stdlib", window=WINDOW),
    optim=Optim("sgd", lr=0.1, clip_norm=1.0),
    rule=RuleConfig("gradients"),
    exchange=ExchangeConfig("ring32"),
    local_batch=32,
    train_for="1ep",
    log_every=1,
)
