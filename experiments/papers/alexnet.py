"""AlexNet with the paper's rule, optimizer and initialisation, on 64 px digits.

jaxmpi train -n 2 experiments/papers/alexnet.py

The full model but for its 10 classes. Changed from the paper: data, 16 images a worker instead of 128, 200 steps,
2 workers. Figures, and what pixels divided by their deviation do to it: docs/results.md.
"""

import dataclasses

from jaxmpi.experiments.alexnet import experiment as paper
from jaxmpi.experiments.alexnet import fallback
from jaxmpi.models.alexnet import alexnet

experiment = dataclasses.replace(
    paper,
    model=alexnet(classes=10, image_size=64),
    data=dataclasses.replace(fallback.data, std=paper.data.std[:1]),
    optim=dataclasses.replace(paper.optim, lr=0.01),
    local_batch=16,
    train_for="200st",
    eval_every="50st",
    checkpoint_every="0st",
    fallback=None,
)
