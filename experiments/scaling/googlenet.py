"""A small GoogLeNet on silhouettes, scaled as in Ma et al. 2016.

jaxmpi train -n 8 scaling/googlenet

SUBGD with momentum, biases at twice the rate and without decay, the rate times (1 - e / 40)^0.5 in epoch e. Changed
from the paper of Theano-MPI (figure 5, table 1): data (`jaxmpi[animals]`), a sixteenth of the channels, four blocks and
their initialisation, 32 px, 12 epochs instead of 70. A quarter of the paper's batch, 8 images a worker for 32, as an
epoch has 7,769 images. Figures: docs/papers.md.
"""

from jaxmpi.config import Data, ExchangeConfig, Experiment, Optim, RuleConfig, Schedule
from jaxmpi.models.googlenet import googlenet_loss, googlenet_tiny

experiment = Experiment(
    model=googlenet_tiny(channels=1),
    loss=googlenet_loss,
    data=Data(source="animals", resize=32, mirror=True, channels=1, mean=(0.273,), std=(0.39,)),
    optim=Optim("momentum", lr=0.01, weight_decay=2e-4, bias_lr_factor=2.0, decay_bias=False),
    schedule=Schedule("poly_epoch", power=0.5, span="40ep"),
    rule=RuleConfig("subgd"),
    exchange=ExchangeConfig("asa32"),
    local_batch=8,
    train_for="12ep",
    eval_every="1ep",
    checkpoint_every="0st",
)
