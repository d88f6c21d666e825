"""A small AlexNet on silhouettes, scaled as in Ma et al. 2016.

jaxmpi train -n 8 scaling/alexnet --local-batch 4

SUBGD with momentum, biases at twice the rate and without decay. The rate is divided by 10 at a third and two thirds of
the epochs. All this is as in the paper of Theano-MPI (figure 4, table 1). Changed: data (`jaxmpi[animals]`), a
sixteenth of the channels and their initialisation, 64 px, 12 epochs instead of 62. An eighth of the paper's batch, 16
images a worker for 128 and 4 for 32, as an epoch has 7,769 images and not 1.28 million. Figures: docs/papers.md.
"""

from jaxmpi.config import Data, ExchangeConfig, Experiment, Optim, RuleConfig, Schedule
from jaxmpi.models.alexnet import alexnet_tiny

experiment = Experiment(
    model=alexnet_tiny(channels=1),
    data=Data(source="animals", resize=64, mirror=True, channels=1, mean=(0.273,), std=(0.39,)),
    optim=Optim("momentum", lr=0.01, weight_decay=5e-4, bias_lr_factor=2.0, decay_bias=False),
    schedule=Schedule("step", boundaries=("4ep", "8ep"), factor=0.1),
    rule=RuleConfig("subgd"),
    exchange=ExchangeConfig("asa32"),
    local_batch=16,
    train_for="12ep",
    eval_every="1ep",
    checkpoint_every="0st",
)
