"""ResNet-50 with the paper's rule, optimizer and initialisation, on 32 px digits.

jaxmpi train -n 2 experiments/papers/resnet50.py

The full model but for its 10 classes. Changed from the paper: data, 32 images a worker instead of 64, 6 epochs of which
one is warm-up, the rate divided by 10 after four, 2 workers. Figures: docs/results.md.
"""

import dataclasses

from jaxmpi.experiments.resnet50 import experiment as paper
from jaxmpi.experiments.resnet50 import fallback
from jaxmpi.models.resnet import resnet50

experiment = dataclasses.replace(
    paper,
    model=resnet50(classes=10, image_size=32),
    data=fallback.data,
    schedule=dataclasses.replace(paper.schedule, boundaries=("4ep",), warmup="1ep"),
    local_batch=32,
    train_for="6ep",
    eval_every="2ep",
    checkpoint_every="0st",
    fallback=None,
)
