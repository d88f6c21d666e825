"""VGG-16 with the paper's rule, optimizer and initialisation, on 32 px digits.

jaxmpi train -n 2 experiments/papers/vgg16.py

Changed from the paper: data, a sixteenth of the channels (Glorot's initialisation follows them), 16 images a worker
instead of 32, half of the epochs, 2 workers. Figures, and what pixels divided by their deviation do to it:
docs/results.md.
"""

import dataclasses

from jaxmpi.experiments.vgg16 import experiment as paper
from jaxmpi.experiments.vgg16 import fallback
from jaxmpi.models.vgg import vgg16_tiny

experiment = dataclasses.replace(
    paper,
    model=vgg16_tiny(init="published"),
    data=dataclasses.replace(fallback.data, std=paper.data.std[:1]),
    local_batch=16,
    train_for="20ep",
    eval_every="5ep",
    checkpoint_every="0st",
    fallback=None,
)
