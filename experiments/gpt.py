"""A small GPT over bytes of the source of Python's standard library.

mpirun -n 2 python -m jaxmpi.train experiments/gpt.py

Bits per byte on modules that are held out: docs/text.md.
"""

from jaxmpi.config import Data, ExchangeConfig, Experiment, Optim, RuleConfig, Schedule
from jaxmpi.models.gpt import gpt

WINDOW = 128

experiment = Experiment(
    model=gpt(window=WINDOW, width=128, heads=4, layers=4),
    data=Data(source="stdlib", window=WINDOW),
    optim=Optim("adamw", lr=2e-3, weight_decay=0.1, decay_bias=False, clip_norm=1.0),
    schedule=Schedule("cosine", warmup="50st"),
    rule=RuleConfig("gradients"),
    exchange=ExchangeConfig("asa32"),
    effective_batch=32,
    train_for="1000st",
    eval_every="500st",
    checkpoint_every="500st",
    log_every=50,
)
