"""GoogLeNet with the paper's rule, optimizer and initialisation, on 64 px digits.

jaxmpi train -n 2 experiments/papers/googlenet.py

The full model but for its 10 classes. Changed from the paper: data, the rate (0.0005 instead of 0.007), 16 images a
worker instead of 32, 300 steps, 2 workers. Why that rate: docs/results.md.
"""

import dataclasses

from jaxmpi.experiments.googlenet import experiment as paper
from jaxmpi.experiments.googlenet import fallback
from jaxmpi.models.googlenet import googlenet

experiment = dataclasses.replace(
    paper,
    model=googlenet(classes=10, image_size=64),
    data=fallback.data,
    optim=dataclasses.replace(paper.optim, lr=0.0005, lr_for_batch=16),
    local_batch=16,
    train_for="300st",
    eval_every="100st",
    checkpoint_every="0st",
    fallback=None,
)
