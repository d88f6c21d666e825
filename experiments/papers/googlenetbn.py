"""GoogLeNetBN with the paper's rule, optimizer and initialisation, on 64 px digits.

jaxmpi train -n 2 experiments/papers/googlenetbn.py

The full model but for its 10 classes. Changed from the paper: data, 32 images a worker instead of 64, 6 epochs of which
one is warm-up, the rate divided by 10 after four, 2 workers. Figures: docs/results.md.
"""

import dataclasses

from jaxmpi.experiments.googlenetbn import experiment as paper
from jaxmpi.experiments.googlenetbn import fallback
from jaxmpi.models.googlenetbn import googlenetbn

experiment = dataclasses.replace(
    paper,
    model=googlenetbn(classes=10, image_size=64),
    data=fallback.data,
    schedule=dataclasses.replace(paper.schedule, boundaries=("4ep",), warmup="1ep"),
    local_batch=32,
    train_for="6ep",
    eval_every="2ep",
    checkpoint_every="0st",
    fallback=None,
)
