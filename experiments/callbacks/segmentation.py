"""Pictures of a segmentation after each evaluation: images, labels and predicted classes.

mpirun -n 2 python -m jaxmpi.train experiments/callbacks/segmentation.py
"""

import dataclasses

import numpy as np

import jaxmpi
from jaxmpi.experiments.tasks.segmentation import experiment as segmentation

COLOURS = np.array([[0, 0, 0], [230, 120, 30], [40, 130, 220]], np.uint8)  # background, disc, square


class Pictures(jaxmpi.Callback):
    def __init__(self, images=6):
        self.images = images

    def after_evaluation(self, moment):
        batch = next(moment.validation())
        found = np.asarray(moment.predict(batch)).argmax(-1)
        rows = np.repeat(batch["image"], 3, -1), COLOURS[batch["label"]], COLOURS[found]
        picture = np.vstack([np.hstack([*row[: self.images]]) for row in rows])
        moment.show("segmentation", picture.repeat(4, 0).repeat(4, 1))


experiment = dataclasses.replace(segmentation, callbacks=(Pictures(),))
