"""VGG-16 after Theano-MPI (Ma et al. 2016), or on digits without data.

mpirun -n 8 python -m jaxmpi.train experiments/vgg16.py --data.dir /data/imagenet
mpirun -n 8 python -m jaxmpi.train experiments/vgg16.py

Batch 32 a worker; rate 0.002, divided by 10 after 15, 30 and 35 of 40 epochs, biases at twice the rate and without
decay. Theano-MPI's table 1 has no row for it; batch from section 4 of the paper, the rest from its code. Not run on
ImageNet here.

The second line trains a tiny model on digits, with 2 workers: 97 % top-1 (docs/results.md).
"""

from jaxmpi.config import Data, ExchangeConfig, Experiment, Optim, RuleConfig, Schedule
from jaxmpi.models.vgg import vgg16, vgg16_tiny

fallback = Experiment(
    model=vgg16_tiny(),
    data=Data(source="digits", resize=32, mean=(0.305,), std=(0.376,)),
    optim=Optim("adam", lr=1e-3, clip_norm=1.0),
    schedule=Schedule("poly", power=0.5, warmup="40st"),
    rule=RuleConfig("gradients"),
    exchange=ExchangeConfig("asa32"),
    effective_batch=32,
    train_for="10ep",
    eval_every="10ep",
    checkpoint_every="10ep",
)

experiment = Experiment(
    model=vgg16(classes=1000),
    data=Data(
        source="imagefolder",
        resize=256,
        crop=224,
        mirror=True,
        mean=(0.485, 0.456, 0.406),
        std=(1 / 255,) * 3,  # only the mean is subtracted, as the initialisation expects
    ),
    optim=Optim("momentum", lr=0.002, weight_decay=5e-4, bias_lr_factor=2.0, decay_bias=False),
    schedule=Schedule("step", boundaries=("15ep", "30ep", "35ep"), factor=0.1),
    rule=RuleConfig("subgd"),
    exchange=ExchangeConfig("asa32"),
    local_batch=32,
    train_for="40ep",
    fallback=fallback,
)
