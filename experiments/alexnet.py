"""AlexNet after Theano-MPI (Ma et al. 2016), or on digits without data.

mpirun -n 8 python -m jaxmpi.train experiments/alexnet.py --data.dir /data/imagenet
mpirun -n 8 python -m jaxmpi.train experiments/alexnet.py

Batch 128 a worker; rate 0.01 with up to 4 workers, 0.005 with 8, divided by 10 every 20 of 70 epochs, biases at twice
the rate and without decay. SUBGD sums the workers' updates. With --devices 8
give --optim.lr 0.005; --local-batch 32 is table 1's other row of 8 workers. Not run on ImageNet here.
It differs from the paper in taking a mean per channel and not a mean image. It also differs in resizing the shorter
side, aspect kept.

The second line trains a tiny model on digits, with 2 workers: 97 % top-1 (docs/results.md).
"""

from jaxmpi.config import Data, ExchangeConfig, Experiment, Optim, RuleConfig, Schedule
from jaxmpi.models.alexnet import alexnet, alexnet_tiny
from jaxmpi.runtime.process import launched_workers

fallback = Experiment(
    model=alexnet_tiny(),
    data=Data(source="digits", resize=64, mean=(0.305,), std=(0.376,)),
    optim=Optim("adam", lr=2e-3, clip_norm=1.0),
    schedule=Schedule("poly", power=0.5, warmup="20st"),
    rule=RuleConfig("gradients"),
    exchange=ExchangeConfig("asa32"),
    effective_batch=32,
    train_for="10ep",
    eval_every="10ep",
    checkpoint_every="10ep",
)

experiment = Experiment(
    model=alexnet(classes=1000),
    data=Data(
        source="imagefolder",
        resize=256,
        crop=227,
        mirror=True,
        mean=(0.485, 0.456, 0.406),
        std=(1 / 255,) * 3,  # only the mean is subtracted, as the initialisation expects
    ),
    optim=Optim(
        "momentum",
        lr=0.01 if launched_workers() <= 4 else 0.005,
        weight_decay=5e-4,
        bias_lr_factor=2.0,
        decay_bias=False,
    ),
    schedule=Schedule("step", boundaries=("20ep", "40ep", "60ep"), factor=0.1),
    rule=RuleConfig("subgd"),
    exchange=ExchangeConfig("asa32"),
    local_batch=128,
    train_for="70ep",
    fallback=fallback,
)
