"""ResNet-50 after Kumar et al. 2018 (arXiv:1711.00705), or on digits without data.

mpirun -n 8 python -m jaxmpi.train experiments/resnet50.py --data.dir /data/imagenet
mpirun -n 8 python -m jaxmpi.train experiments/resnet50.py

Batch b = 64 a worker, or --local-batch; the rate rises from 0.1 to 0.1 b n / 256 with n workers over 5 epochs (after
Goyal et al. 2017; the paper gives no length) and is divided by 10 every 30 of 90. Crops of random area and aspect. Not
run on ImageNet here.

The second line on digits: 96 % top-1 with 2 workers (docs/results.md).
"""

from jaxmpi.config import Data, ExchangeConfig, Experiment, Optim, RuleConfig, Schedule
from jaxmpi.models.resnet import resnet50

fallback = Experiment(
    model=resnet50(classes=10, image_size=32),
    data=Data(source="digits", resize=32, mean=(0.305,), std=(0.376,)),
    optim=Optim("momentum", lr=0.02, weight_decay=1e-4, decay_bias=False),
    schedule=Schedule("poly", power=1.0, warmup="20st"),
    rule=RuleConfig("gradients"),
    exchange=ExchangeConfig("asa32"),
    effective_batch=64,
    train_for="4ep",
    eval_every="4ep",
    checkpoint_every="4ep",
    log_every=5,
)

experiment = Experiment(
    model=resnet50(classes=1000),
    data=Data(
        source="imagefolder",
        resize=256,
        crop=224,
        crop_area=(0.08, 1.0),
        mirror=True,
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
    ),
    optim=Optim("momentum", lr=0.1, lr_for_batch=256, weight_decay=1e-4),
    schedule=Schedule(
        "step",
        boundaries=("30ep", "60ep"),
        factor=0.1,
        warmup="5ep",
        warmup_lr=0.1,
    ),
    rule=RuleConfig("gradients"),
    exchange=ExchangeConfig("asa32"),
    local_batch=64,
    train_for="90ep",
    fallback=fallback,
)
