"""Linear regression of diabetes' progress on ten measurements (Efron et al. 2004).

mpirun -n 2 python -m jaxmpi.train experiments/tasks/regression.py
"""

import numpy as np
from sklearn.datasets import load_diabetes

from jaxmpi.config import Data, Experiment, Optim
from jaxmpi.model import plain_model

x, y = (np.asarray(a, np.float32) for a in load_diabetes(return_X_y=True))
x, y, held_out = x / x.std(0), (y - y.mean()) / y.std(), np.arange(len(y)) % 5 == 0

experiment = Experiment(
    model=plain_model(
        lambda key: {"w": np.zeros((10, 1), np.float32), "b": np.zeros(1, np.float32)},
        lambda params, x: x @ params["w"] + params["b"],
        name="linear",
        input_shape=(10,),
        classes=1,
    ),
    task="regression",
    data=Data(
        "array",
        train={"image": x[~held_out], "label": y[~held_out]},
        validation={"image": x[held_out], "label": y[held_out]},
    ),
    optim=Optim("adam", lr=0.02),
    monitor="eval_mae",
    effective_batch=32,
    train_for="20ep",
    eval_every="5ep",
)
