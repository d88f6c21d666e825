"""Pictures of a GAN's points: true ones are green, generated ones red.

One is made after each evaluation.

mpirun -n 2 python -m jaxmpi.train experiments/callbacks/gan.py
"""

import dataclasses

import numpy as np

import jaxmpi
from jaxmpi.experiments.tasks.gan import experiment as gan

SIDE, LOW, HIGH = 64, (-1, -4), (5, 2)  # px; corners of the plane


class Points(jaxmpi.Callback):
    def after_evaluation(self, moment):
        counts = np.zeros((SIDE, SIDE, 3))
        for batch in moment.validation():
            is_real = batch["weight"] > 0
            for colour, points in enumerate((moment.predict(batch), batch["point"])):
                places = SIDE * (np.asarray(points)[is_real] - LOW) / np.subtract(HIGH, LOW)
                column, row = np.clip(places, 0, SIDE - 1).astype(int).T
                np.add.at(counts[..., colour], (SIDE - 1 - row, column), 1)
        counts = moment.sum(counts)
        shades = 255 * counts / np.maximum(counts.max((0, 1)), 1)
        moment.show("points", shades.repeat(4, 0).repeat(4, 1).astype(np.uint8))


experiment = dataclasses.replace(gan, callbacks=(Points(),))
