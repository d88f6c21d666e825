"""A GPT over bytes goes on from a prompt after each evaluation.

mpirun -n 2 python -m jaxmpi.train experiments/callbacks/text.py
"""

import dataclasses

import numpy as np

import jaxmpi
from jaxmpi.experiments.gpt import WINDOW
from jaxmpi.experiments.gpt import experiment as gpt


class Writes(jaxmpi.Callback):
    def __init__(self, prompt="def ", length=200, temperature=0.8):
        self.prompt, self.length, self.temperature = prompt, length, temperature

    def after_evaluation(self, moment):
        rng, text = np.random.default_rng(moment.step), [*self.prompt.encode()]
        for _ in range(self.length):
            seen = text[-WINDOW:]
            window = np.array([seen + [0] * (WINDOW - len(seen))], np.int32)  # one shape, so one program
            logits = np.asarray(moment.predict({"image": window}), np.float64)[0, len(seen) - 1] / self.temperature
            chances = np.exp(logits - logits.max())
            text.append(int(rng.choice(len(chances), p=chances / chances.sum())))
        moment.show("text", bytes(text).decode(errors="replace"))


experiment = dataclasses.replace(gpt, callbacks=(Writes(),))
