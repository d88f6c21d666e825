"""Fine-tuning of a digits model's last layer; --params takes another run's params.

mpirun -n 2 python -m jaxmpi.train experiments/tasks/fine_tuning.py
"""

import jax
import optax

from jaxmpi.config import Data, Experiment, Optim
from jaxmpi.models.cnn import digits_cnn_tiny


def only_logits(schedule):
    def kind(params):
        name = jax.tree_util.keystr
        return jax.tree_util.tree_map_with_path(lambda p, _: "train" if "logits" in name(p) else "freeze", params)

    return optax.multi_transform({"train": optax.adam(schedule), "freeze": optax.set_to_zero()}, kind)


experiment = Experiment(
    model=digits_cnn_tiny(),
    data=Data("digits", channels=1, mean=(0.305,), std=(0.376,)),
    optim=Optim("only_logits", transform=only_logits, lr=0.01),
    effective_batch=32,
    train_for="3ep",
)
