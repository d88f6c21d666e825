"""Three questions about a handwritten digit: even, prime, with a hole?

mpirun -n 2 python -m jaxmpi.train experiments/tasks/multi_label.py
"""

import numpy as np

from jaxmpi.config import Data, Experiment, Optim
from jaxmpi.data import open_source
from jaxmpi.models.cnn import digits_cnn_tiny

ANSWERS = np.array([[d % 2 == 0, d in (2, 3, 5, 7), d in (0, 4, 6, 8, 9)] for d in range(10)], np.uint8)


def questions(split: str) -> dict[str, np.ndarray]:
    """Images u8[n, 8, 8, 1], answers u8[n, 3]."""
    digits = open_source(Data("digits", channels=1), split)
    images, labels = zip(*(digits[i] for i in range(len(digits))), strict=True)
    return {"image": np.stack(images), "label": ANSWERS[np.array(labels)]}


experiment = Experiment(
    model=digits_cnn_tiny(classes=3),
    task="multi-label",
    data=Data(
        "array", channels=1, mean=(0.305,), std=(0.376,), train=questions("train"), validation=questions("validation")
    ),
    optim=Optim("adam", lr=3e-3),
    monitor="eval_f1",
    effective_batch=32,
    train_for="5ep",
)
