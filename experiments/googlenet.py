"""GoogLeNet after Theano-MPI (Ma et al. 2016), or on digits without data.

mpirun -n 8 python -m jaxmpi.train experiments/googlenet.py --data.dir /data/imagenet
mpirun -n 8 python -m jaxmpi.train experiments/googlenet.py

Batch 32 a worker; rate 0.01 with one worker, 0.007 with two, 0.005 with more, under AWAGD times the number of workers,
which is the batch / 32; in epoch e times (1 - e / 240)^0.5; biases at twice the rate and without decay. With --devices
give --optim.lr.

The second line trains the same model under SUBGD with the same momentum and decay. It differs where 1,437 images in two
minutes ask for it: images of 32 px; He's initialisation, since Theano-MPI's stays at chance for hundreds of steps; a
batch of 32 and the rate 0.01 over all workers together, which falls over 200 steps after a warm-up of 10. With a rate
of 0.02 the loss begins to fall twice as late.

The first line has not been run on ImageNet here. It differs from the paper in taking a mean per channel and not a mean
image. It also differs in resizing the shorter side, aspect kept.
"""

from jaxmpi.config import Data, ExchangeConfig, Experiment, Optim, RuleConfig, Schedule
from jaxmpi.models.googlenet import googlenet, googlenet_loss
from jaxmpi.runtime.process import launched_workers

fallback = Experiment(
    model=googlenet(classes=10, image_size=32, init="he_all"),
    loss=googlenet_loss,
    data=Data(source="digits", resize=32, mean=(0.305,), std=(0.376,)),
    optim=Optim("momentum", lr=0.01 / launched_workers(), weight_decay=2e-4),
    schedule=Schedule("poly", power=0.5, warmup="10st"),
    rule=RuleConfig("subgd"),
    exchange=ExchangeConfig("asa32"),
    effective_batch=32,
    train_for="200st",
    eval_every="200st",
    checkpoint_every="200st",
    log_every=5,
)

experiment = Experiment(
    model=googlenet(classes=1000),
    loss=googlenet_loss,
    data=Data(
        source="imagefolder", resize=256, crop=224, mirror=True, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)
    ),
    optim=Optim(
        "momentum",
        lr={1: 0.01, 2: 0.007}.get(launched_workers(), 0.005),
        lr_for_batch=32,
        weight_decay=2e-4,
        bias_lr_factor=2.0,
        decay_bias=False,
    ),
    schedule=Schedule("poly_epoch", power=0.5, span="240ep"),
    rule=RuleConfig("awagd"),
    exchange=ExchangeConfig("asa32"),
    local_batch=32,
    train_for="90ep",
    fallback=fallback,
)
