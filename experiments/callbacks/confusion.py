"""A confusion matrix after each evaluation, as counts and as a picture.

mpirun -n 2 python -m jaxmpi.train experiments/callbacks/confusion.py
"""

import dataclasses

import numpy as np

import jaxmpi
from jaxmpi.experiments.digits import experiment as digits

CLASSES = 10


class Confusion(jaxmpi.Callback):
    def after_evaluation(self, moment):
        counts = np.zeros((CLASSES, CLASSES))
        for batch in moment.validation():
            said = np.asarray(moment.predict(batch)).argmax(-1)
            np.add.at(counts, (batch["label"], said), batch["weight"] > 0)
        counts = moment.sum(counts)
        share = counts / np.maximum(counts.sum(1, keepdims=True), 1)  # a row is a class, a column what was said
        moment.write("confusion", counts=counts.astype(int).tolist())
        moment.show("confusion", np.kron(255 * (1 - share), np.ones((24, 24))).astype(np.uint8))


experiment = dataclasses.replace(digits, callbacks=(Confusion(), jaxmpi.EarlyStop(patience=3)))
