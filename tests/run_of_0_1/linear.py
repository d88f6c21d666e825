"""A linear model on scikit-learn's digits: an experiment as 0.1.0 had it."""

import numpy as np

from jaxmpi.config import Data, ExchangeConfig, Experiment, Optim, RuleConfig, Schedule
from jaxmpi.model import plain_model

FIRST = 0.01 * np.random.default_rng(1).standard_normal((64, 10)).astype(np.float32)

experiment = Experiment(
    model=plain_model(
        name="linear",
        init=lambda key: {"w": FIRST},
        apply=lambda params, image: image.reshape(image.shape[0], -1) @ params["w"],
        input_shape=(8, 8, 1),
        classes=10,
    ),
    data=Data(source="digits", channels=1, mean=(0.305,), std=(0.376,)),
    optim=Optim("momentum", lr=0.02, lr_scaling="none", momentum=0.9),
    schedule=Schedule("poly", power=1.0, warmup="1ep"),
    rule=RuleConfig("gradients"),
    exchange=ExchangeConfig("asa32"),
    effective_batch=32,
    train_for="8st",
    eval_every="4st",
    checkpoint_every="4st",
    log_every=1,
)
