import dataclasses
import json
import sys
from typing import Any

import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmpi.config import experiment_file, flags
from jaxmpi.config.data import Data
from jaxmpi.config.durations import duration_steps, step_range
from jaxmpi.config.exchange_config import ExchangeConfig
from jaxmpi.config.optim import Optim, Schedule
from jaxmpi.config.rule_config import RuleConfig
from jaxmpi.config.schema import Experiment, local_batch
from jaxmpi.core.errors import UsageError, lookup
from launching import ROOT

DURATIONS = [
    # text, steps_per_epoch, effective_batch, total_steps -> steps
    ("90ep", 5004, 256, 0, 450360),
    ("0.5ep", 5, 1, 0, 2),  # to even
    (" 125 st", 7, 3, 0, 125),
    ("20000ex", 10, 256, 0, 78),
    ("10%", 10, 1, 450, 45),
    ("0st", 1, 1, 1, 0),
]


@pytest.mark.parametrize(("text", "epoch", "batch", "total", "expected"), DURATIONS)
def test_durations(text, epoch, batch, total, expected):
    assert duration_steps(text, epoch, batch, total) == expected


@pytest.mark.parametrize("text", ["", "10", "-1ep", "1e3st", "nanep", "٣st", "1_0ep", "1 0ep"])
def test_what_is_no_duration(text):
    with pytest.raises(UsageError, match="duration"):
        duration_steps(text, 1, 1, 1)


@pytest.mark.parametrize("text", ["5", "0:3", "4:3", "²:3", "1_0:20", "1:2:3"])
def test_what_is_no_range_of_steps(text):
    with pytest.raises(UsageError, match="10:20"):
        step_range(text, "profile")


@given(st.integers(0, 10**6), st.integers(1, 10**4))
def test_whole_numbers_of_steps_and_epochs_are_exact(number, epoch):
    assert duration_steps(f"{number}st", epoch, 32) == number
    assert duration_steps(f"{number}ep", epoch, 32) == number * epoch


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("adamm", r"unknown optimizer 'adamm'; did you mean 'adam'\? there are: adam, adamax, adamw, optim.lr"),
        ("adamW", "did you mean 'adamw'"),  # whatever the case
        ("adma", "did you mean 'adam'"),  # not adamax, to which it has more letters in order
        ("optim.learning-rate", "did you mean 'optim.lr'"),  # words of other libraries
        ("out", "did you mean 'run-dir'"),
        ("weight-decay", "did you mean 'optim.weight-decay'"),
        ("", "unknown optimizer ''; there are: "),
    ],
)
def test_an_unknown_name_lists_what_exists_and_the_nearest(name, message):
    with pytest.raises(UsageError, match=message):
        lookup(
            dict.fromkeys(["adam", "adamax", "adamw", "optim.lr", "optim.weight-decay", "run-dir"]), name, "optimizer"
        )


OUT_OF_RANGE: list[tuple[type, dict[str, Any]]] = [
    (Data, {"on_error": "ignore"}),
    (Data, {"channels": 0}),
    (Data, {"loaders": 2147483648}),
    (Data, {"loaders": 1.5}),
    (Data, {"group_size": 1.0}),
    (Data, {"prefetch": True}),
    (Data, {"shuffle_period": "500st"}),
    (Data, {"group_size": True}),
    (Data, {"mean": (0.5, 0.5)}),
    (Data, {"std": (1.0, 0.0, 1.0)}),
    (Data, {"mean": (0.5,), "mean_image": "a.npy"}),
    (Data, {"shuffle_by": "files", "memory": "partition"}),
    (Optim, {"lr": 0.0}),
    (Optim, {"lr": float("nan")}),
    (Optim, {"momentum": 1.0}),
    (Schedule, {"warmup_from": 1.5}),
    (RuleConfig, {"alpha": 0.0}),
    (RuleConfig, {"alpha": 1.5}),
    (RuleConfig, {"server_alpha": -0.1}),
    (RuleConfig, {"tau": 0}),
    (RuleConfig, {"p": 1.1}),
    (RuleConfig, {"staleness": -1}),
    (RuleConfig, {"servers": -1}),
    (RuleConfig, {"momentum": 1.0}),
    (RuleConfig, {"local_steps": 0}),
    (RuleConfig, {"outer_lr": 0.0}),
    (RuleConfig, {"outer_momentum": 1.0}),
    (ExchangeConfig, {"bucket_bytes": 3}),
    (ExchangeConfig, {"bucket_bytes": 4096.0}),
    (ExchangeConfig, {"gather_wire": "16"}),
    (Experiment, {"run_dir": "-x"}),
    (Experiment, {"local_batch": 8, "effective_batch": 32}),
    (Experiment, {"resume": True, "from_start": True}),
    (Experiment, {"log_every": 0}),
    (Experiment, {"log_every": 1.5}),
    (Experiment, {"seed": np.float32(1.0)}),
    (Experiment, {"seed": 2**32}),
    (Experiment, {"comm": "xal"}),
    (Experiment, {"train_for": "ten epochs"}),
    (Experiment, {"eval_for": "3epochs"}),
    (Schedule, {"boundaries": ("30",)}),
    (Experiment, {"optim": optax.lion(1e-3)}),  # which a function of the experiment gives
    (Experiment, {"schedule": optax.cosine_decay_schedule(1.0, 10)}),
]


@pytest.mark.parametrize(("part", "fields"), OUT_OF_RANGE)
def test_fields_check_themselves(part, fields):
    with pytest.raises(UsageError, match=next(iter(fields))):
        part(**fields)


BATCHES = [
    # experiment, workers -> local batch
    ({}, 4, 32),
    ({"local_batch": 8}, 4, 8),
    ({"effective_batch": 252}, 4, 63),
    ({"effective_batch": 64, "micro_batch": 16}, 2, 32),
]


@pytest.mark.parametrize(("fields", "workers", "expected"), BATCHES)
def test_local_batch(fields, workers, expected):
    assert local_batch(Experiment(**fields), workers) == expected


INDIVISIBLE = [
    ({"effective_batch": 250}, 4, "effective_batch 250 is not divisible by 4 workers; nearest that are: 248 or 252"),
    ({"local_batch": 10, "micro_batch": 4}, 1, r"local batch 10 is not divisible by 4 \(micro_batch\); .*: 8 or 12"),
]


@pytest.mark.parametrize(("fields", "workers", "message"), INDIVISIBLE)
def test_batches_that_do_not_divide_name_the_nearest_that_do(fields, workers, message):
    with pytest.raises(UsageError, match=message):
        local_batch(Experiment(**fields), workers)


def test_resolved_is_json_and_holds_every_field_but_the_fallback_recipe():
    def squared(outputs, labels):
        return outputs

    experiment = Experiment(loss=squared, fallback=Experiment(), data=Data(train=[1], mean=(0.5,)), optim=Optim(lr=0.5))
    plain = flags.to_json(experiment)
    assert json.loads(json.dumps(plain)) == plain
    assert set(plain) == {field.name for field in dataclasses.fields(Experiment)} - {"fallback"}
    assert (plain["loss"], plain["data"]["mean"], plain["optim"]["lr"]) == ("squared", [0.5], 0.5)
    assert plain["data"]["train"] == [1]


def test_a_mean_image_on_the_command_line_replaces_the_experiments_mean():
    digits = str(ROOT / "experiments/digits.py")
    for flag, mean in (("m.npy", ()), ("", (0.305,))):  # the other as of a variable that is not set
        data = experiment_file.parse([digits, "--data.mean-image", flag])[0].data
        assert (data.mean, data.std, data.mean_image) == (mean, (0.376,), flag)


def test_another_source_on_the_command_line_leaves_the_objects_of_the_file_s_out(tmp_path):
    file = tmp_path / "mine.py"
    data = "Data('array', train=[1], validation=[2])"
    file.write_text(f"from jaxmpi.config import Data, Experiment\nexperiment = Experiment(data={data})\n")
    data = experiment_file.parse([str(file), "--data.source", "digits"])[0].data
    assert (data.source, data.train, data.validation) == ("digits", None, None)


OWN_RULE = '''
import dataclasses
from jaxmpi.config import Experiment, RuleConfig

@dataclasses.dataclass(frozen=True)
class Inner:
    pace: float = 0.5

if True:
    @dataclasses.dataclass(frozen=True)
    class Mine(RuleConfig):
        """A text whose lines
are not indented."""
        inner: Inner = Inner()

experiment = Experiment(rule=Mine())
'''


def test_settings_of_ones_own_may_be_nested_and_their_text_indented_as_it_likes(tmp_path):
    (tmp_path / "mine.py").write_text(OWN_RULE)
    rule: Any = experiment_file.parse([str(tmp_path / "mine.py"), "--rule.inner.pace", "0.25"])[0].rule
    assert rule.inner.pace == 0.25


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("import no_such_package", "No module named 'no_such_package'"),
        ("import sys; sys.exit(0)", "ends the program"),
        (
            "from jaxmpi.config import Experiment\nExperiment(lerning_rate=1)",
            r"mine.py:2: Experiment has no field 'lerning_rate'; did you mean 'optim.lr'",
        ),
        (
            "from jaxmpi.config import Optim\nOptim(wieght_decay=1)",
            "Optim has no field 'wieght_decay'; did you mean 'optim.weight_decay'",
        ),
    ],
)
def test_an_experiment_that_cannot_be_imported_is_one_sentence(line, message, tmp_path):
    (tmp_path / "mine.py").write_text(line)
    with pytest.raises(UsageError, match=message):
        experiment_file.load(tmp_path / "mine.py")


def test_an_experiment_imports_what_lies_beside_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "beside_it.py").write_text("WORKERS = 3\n")
    (tmp_path / "mine.py").write_text(
        "from beside_it import WORKERS\nfrom jaxmpi.config import Experiment\nexperiment = Experiment(seed=WORKERS)\n"
    )
    assert experiment_file.parse([str(tmp_path / "mine.py")])[0].seed == 3


@pytest.mark.parametrize("number", [np.int64, np.array])
def test_numbers_of_numpy_are_as_pythons(number):
    def experiment_of(as_number: Any) -> Experiment:
        return Experiment(
            local_batch=as_number(8),
            seed=as_number(3),
            data=Data(crop=as_number(24), mean=(as_number(0), as_number(0), as_number(1)), group_size=as_number(2)),
            optim=Optim(lr=as_number(1), momentum=as_number(0)),
            schedule=Schedule("step", factor=as_number(2)),
            rule=RuleConfig(tau=as_number(4)),
            exchange=ExchangeConfig(bucket_bytes=as_number(64)),
        )

    experiment = experiment_of(number)
    assert experiment == experiment_of(int)
    assert json.dumps(dataclasses.asdict(experiment)) == json.dumps(dataclasses.asdict(experiment_of(int)))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--seed", "3", "--seed=4"], {"seed": 4}),
        (["--resume", "--data.no-mirror", "--optim.no-decay-bias"], {"resume": True}),
        (["--data.mean", "0.5", "-1e-3", "--data.crop-area"], {"data": Data(mean=(0.5, -0.001), channels=2)}),
        (["--inject", "kill", "--inject=nan"], {"inject": ("kill", "nan")}),
        (["--exchange.bucket_bytes", "None"], {"exchange": ExchangeConfig(bucket_bytes=None)}),
        (
            ["--data.group-size", "4", "--data.shuffle-period", "5"],
            {"data": Data(group_size=4, shuffle_period=5)},
        ),
    ],
)
def test_flags_become_values_of_their_types(words, expected):
    base = Experiment(data=Data(channels=2)) if "--data.mean" in words else Experiment()
    got = flags.replace_fields(base, flags.parse_flags(words, flags.flags(base)))
    assert {name: getattr(got, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seed", "x"], "--seed: got 'x'; expected int"),
        (["--seed"], "--seed: got nothing; expected int"),
        (["--seed", "1", "2"], "--seed: got '1 2'"),
        (["--data.crop-aspect", "1"], r"expected tuple\[float, float\]"),
        (["--resume", "yes"], "--resume: got 'yes'; expected no value"),
        (["stray", "--resume"], "got 'stray'; expected --field value"),
        (["--restarts", "2"], "option of jaxmpi train: jaxmpi train --restarts"),
        (["-n", "2"], "got '-n'; expected --field value; to start N ranks: jaxmpi train -n N"),
        (["--rule", "easgd"], "did you mean 'rule.name'"),
        (["--data.no-dir"], "unknown field --data.no-dir; did you mean 'data.dir'"),
    ],
)
def test_flags_without_sense_are_refused(words, message):
    with pytest.raises(UsageError, match=message):
        flags.parse_flags(words, flags.flags(Experiment()))


def test_functions_of_an_experiment_file_stay_beside_a_flags_words():
    base = Experiment(sinks=("csv", print))
    assert flags.parse_flags(["--sinks", "wandb"], flags.flags(base)) == {"sinks": ("wandb", print)}
