"""Tasks: batches of any fields, figures by their definitions, N workers against one, bad parts named before a step."""

import dataclasses
import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmpi
from jaxmpi import Task
from jaxmpi.config import Data, Experiment, Schedule
from jaxmpi.core.errors import UsageError
from jaxmpi.data import Loader, Sampler
from jaxmpi.data.example import nested
from jaxmpi.data.sources.arrays import ArraySource, FieldSource
from jaxmpi.model import plain_model
from jaxmpi.tasks import classes, numbers
from jaxmpi.tasks.registry import TASKS
from jaxmpi.trainer import main
from launching import Ended, train, train_here
from line_task import BY_TOKEN, LINE, STEPS, line, lines, loss
from runs import column, record
from tolerances import U

EXAMPLES = sorted(Path("experiments/tasks").glob("*.py"))
FARTHEST = dataclasses.replace(LINE, maximize=("far",))
QUICK = ("regression", "segmentation")
WITHOUT = [file for file in EXAMPLES if file.stem != "gan"]  # which has a test of its own


@pytest.mark.e2e
@pytest.mark.parametrize(
    "file",
    [pytest.param(file, marks=[pytest.mark.slow] * (file.stem not in QUICK)) for file in WITHOUT],
    ids=lambda file: file.stem,
)
def test_the_examples_train(file, tmp_path):
    assert_improves("loss", train_here(str(file), *SHORT, "--run-dir", str(tmp_path / "run")))


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("ranks", "devices"), [(1, 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, 1), (8, 1)))]
)
def test_the_gan_trains_in_one_process_and_in_eight(ranks, devices, tmp_path):
    options = [*SHORT, "--effective-batch", "64", "--run-dir", str(tmp_path / "run"), "--replica-check-every", "4st"]
    gan = str(Path("experiments/tasks/gan.py"))
    ended = train(ranks, gan, *options) if ranks > 1 else train_here(gan, *options, "--devices", str(devices))
    assert f"{ranks * devices} workers x local batch {64 // ranks // devices}" in ended.out
    assert_improves("distance", ended)


SHORT = ["--train-for", "12st", "--eval-every", "4st"]


def assert_improves(figure: str, ended: Ended) -> None:
    """A figure of the last of three evaluations is less than that of the first."""
    assert ended.code == 0, ended.out
    values = [
        float(line.split(f" {figure} ")[1].split()[0]) for line in ended.out.splitlines() if "evaluation on" in line
    ]
    assert len(values) == 3
    assert values[-1] < values[0]


# ---------------------------------------------------------------- figures


def ratio(pair) -> float:
    """Sum over all examples by sum over all examples; the mean over columns with a count."""
    sums, counts = (np.asarray(x, np.float64).sum(0) for x in pair)
    return float(np.mean(sums[counts > 0] / counts[counts > 0])) if np.ndim(sums) else float(sums / counts)


def test_iou_is_the_mean_over_classes_of_all_images_together():
    rng = np.random.default_rng(0)
    logits, labels = rng.standard_normal((3, 4, 5, 3)).astype(np.float32), rng.integers(-1, 3, (3, 4, 5))
    predictions, counted = logits.argmax(-1), labels >= 0
    ratios = []
    for kind in range(3):
        both = ((predictions == kind) & (labels == kind) & counted).sum()
        either = (((predictions == kind) | (labels == kind)) & counted).sum()
        ratios.append(both / either)
    figures = classes.overlaps(jnp.asarray(logits), {"label": jnp.asarray(labels, jnp.int32)})
    assert ratio(figures["iou"]) == pytest.approx(np.mean(ratios), rel=4 * U)
    assert ratio(figures["accuracy"]) == pytest.approx((predictions == labels)[counted].mean(), rel=4 * U)


def test_f1_counts_all_answers_together():
    rng = np.random.default_rng(1)
    logits, labels = rng.standard_normal((6, 4)).astype(np.float32), rng.integers(0, 2, (6, 4)).astype(np.uint8)
    answers = logits > 0
    hits, misses = (answers & (labels == 1)).sum(), (answers != (labels == 1)).sum()
    figures = numbers.hits(jnp.asarray(logits), {"label": jnp.asarray(labels)})
    assert ratio(figures["f1"]) == pytest.approx(2 * hits / (2 * hits + misses), rel=4 * U)
    assert ratio(figures["exact"]) == pytest.approx((answers == labels).all(1).mean(), rel=4 * U)


def test_padding_counts_neither_in_the_loss_nor_in_the_figures_of_tokens():
    rng = np.random.default_rng(2)
    logits, labels = rng.standard_normal((4, 6, 5)).astype(np.float32), rng.integers(-1, 5, (4, 6)).astype(np.int32)
    labels[2] = -1  # an example of padding alone
    other = np.where(labels[..., None] < 0, 100 * rng.standard_normal(logits.shape), logits).astype(np.float32)
    for measure in (
        lambda x: classes.counted_cross_entropy(x, jnp.asarray(labels)),
        lambda x: classes.counted_top_k(x, {"label": jnp.asarray(labels)}),
    ):
        figures, other_figures = measure(jnp.asarray(logits)), measure(jnp.asarray(other))
        assert jax.tree.map(np.ndarray.tolist, jax.tree.map(np.asarray, figures)) == jax.tree.map(
            np.ndarray.tolist, jax.tree.map(np.asarray, other_figures)
        )


# ---------------------------------------------------------------- batches of any fields


def nested_fields(n: int) -> dict:
    i = np.arange(n)
    pair = i + 0.5, {"second": -i}
    z = {"z": np.stack([i, -i], 1)}
    return {"a": {"x": i * 1.0, "y": z}, "flag": i % 2 == 0, "small": i.astype(np.int8), "pair": pair}


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_a_batch_has_the_fields_of_its_examples(kind):
    source = FieldSource(nested_fields(10))
    with Loader(source, Sampler(10, 4, 0, 1, 0, shuffle=False), Data("array", loader=kind), False) as batches:
        got = [{name: value.copy() for name, value in batch.fields.items()} for batch in batches]
    whole = {name: np.concatenate([batch[name] for batch in got])[:10] for name in got[0]}
    assert whole["a/y/z"].dtype == np.int32  # whole numbers of at most 32 bits, floats of 32
    assert whole["a/x"].dtype == np.float32
    as_task_gets_it = {name: value for name, value in nested(whole).items() if name != "weight"}
    for leaf, expected in zip(*map(jax.tree.leaves, (as_task_gets_it, nested_fields(10))), strict=True):
        np.testing.assert_array_equal(leaf, expected)


@pytest.mark.parametrize("values", [np.array([[1.0], [-1e300]]), np.array([[1], [2**40]])], ids=["infinite", "wrapped"])
@pytest.mark.parametrize("source", [lambda x: ArraySource(x, [0, 0]), lambda x: FieldSource({"image": x})])
def test_numbers_that_a_batch_would_change_are_refused_by_field(values, source):
    with pytest.raises(UsageError, match=": image"):
        with Loader(source(values), Sampler(2, 2), Data("array", loader="threads"), False) as batches:
            next(iter(batches))


# ---------------------------------------------------------------- N workers against one


def by_hand(weigh) -> np.ndarray:
    """Params after STEPS steps of L = sum w l / sum w over the whole step, in 64 bits."""
    data, w, sampler = line(50), np.zeros(3), Sampler(50, 12, 0, 1, 0)
    for step in range(STEPS):
        indices = np.asarray(sampler.indices(step).indices)
        x, y, weights = data["x"][indices].astype(np.float64), data["y"][indices], weigh(data["tokens"][indices])
        w = w - 0.01 * (weights * 2 * (x @ w - y)) @ x / weights.sum()
    return w


@pytest.mark.parametrize(
    ("devices", "task", "weigh"), [(1, LINE, np.ones_like), (3, BY_TOKEN, np.asarray)], ids=["example", "token"]
)
def test_any_number_of_workers_makes_the_steps_of_one(devices, task, weigh, tmp_path):
    means = main.train(lines(tmp_path, task, devices=devices), "lines")
    data = line(13, 1)
    weights = weigh(data["tokens"]).astype(np.float64)
    losses = np.square(data["x"] @ by_hand(weigh) - data["y"])
    assert means["eval_count"] == 13
    # Seven steps of sums over 12 examples: a few hundred roundings, of values up to 100 times the loss.
    assert means["eval_loss"] == pytest.approx((losses * weights).sum() / weights.sum(), rel=2e4 * U)
    assert means["eval_far"] == pytest.approx(np.sqrt(losses).mean(), rel=2e4 * U)


def loss_with_scalars(params, model_state, batch, key, train):
    losses, model_state, errors = loss(params, model_state, batch, key, train)
    return losses, model_state, errors, {"signed": errors, "length": jnp.square(params["w"]).sum()}


@pytest.mark.parametrize(("devices", "fields"), [(1, {}), (3, {}), (1, {"micro_batch": 4})], ids=str)
def test_figures_of_training_are_those_of_all_examples_since_the_line_before(devices, fields, tmp_path):
    task = dataclasses.replace(LINE, loss=loss_with_scalars)
    run = lines(tmp_path, task, devices=devices, log_every=3, monitor="eval_signed", **fields)
    figures = main.train(run, "lines")
    data, w, sampler, totals = line(50), np.zeros(3), Sampler(50, 12, 0, 1, 0), []
    for step in range(STEPS):  # the fifth has two examples
        indices = np.asarray(sampler.indices(step).indices)
        x = data["x"][indices].astype(np.float64)
        errors = x @ w - data["y"][indices]
        totals.append((abs(errors).sum(), errors.sum(), len(errors) * w @ w, len(errors)))
        w = w - 0.01 * 2 * errors @ x / len(errors)
    # Lines come after steps 1, 3, 6 and 7.
    for row, part in zip(record(run.run_dir, "train"), (totals[:1], totals[1:3], totals[3:6], totals[6:]), strict=True):
        *sums, count = np.sum(part, axis=0)
        got = [row[f"train_{name}"] for name in ("far", "signed", "length")]
        np.testing.assert_allclose(got, np.divide(sums, count), rtol=2e4 * U, atol=2e4 * U)
    assert figures["eval_length"] == pytest.approx(w @ w, rel=2e4 * U)


def test_without_train_metrics_lines_have_the_loss_alone_and_metrics_see_evaluations_only(tmp_path):
    def outputs_of_evaluation(params, model_state, batch, key, train):
        losses, model_state, errors = loss(params, model_state, batch, key, train)
        return losses, model_state, None if train else errors

    run = lines(tmp_path, dataclasses.replace(LINE, loss=outputs_of_evaluation), train_metrics=False)
    assert "eval_far" in main.train(run, "lines")
    assert not any(name.startswith("train_") for row in record(run.run_dir, "train") for name in row)


def score_whole_set(outputs, labels):
    """Numbers that depend on every example and on their order, and a table."""
    nth = np.arange(1, len(outputs) + 1)
    return {
        "rank": np.corrcoef(outputs.argsort().argsort(), labels["y"].argsort().argsort())[0, 1],
        "place": (nth * labels["y"]).sum(),
        "by_sign": np.histogram2d(outputs > 0, labels["y"] > 0, bins=2)[0].astype(int),
    }


def test_a_function_of_the_whole_set_gets_all_examples_in_order(tmp_path):
    settings = {"whole_set": score_whole_set, "monitor": "eval_rank", "monitor_mode": "max", "eval_every": "3st"}
    run = lines(tmp_path, devices=3, **settings)
    figures = main.train(run, "lines")
    data = line(13, 1)
    expected = score_whole_set(data["x"] @ by_hand(np.ones_like) - data["y"], data)
    for name in ("rank", "place"):
        assert figures[f"eval_{name}"] == pytest.approx(expected[name], rel=1e-5)
    assert record(run.run_dir, "eval")[-1]["eval_rank"] == pytest.approx(expected["rank"], rel=1e-5)
    assert record(run.run_dir, "sample")[-1]["text"] == str(expected["by_sign"])
    assert jaxmpi.Trainer(run).evaluate()["eval_rank"] == pytest.approx(expected["rank"], rel=1e-5)


def test_an_evaluation_may_take_the_first_batches_alone(tmp_path):
    run = lines(tmp_path, devices=3, eval_for="5ex", data=DATA_OF_TWO_BATCHES)
    figures = main.train(run, "lines")
    data = line(24, 1)
    far = data["x"] @ by_hand(np.ones_like) - data["y"]
    assert figures["eval_count"] == 12
    assert figures["eval_far"] == pytest.approx(abs(far[:12]).mean(), rel=2e4 * U)
    assert jaxmpi.Trainer(run).evaluate()["eval_count"] == 24


SETS = {"clean": line(13, 1), "noisy": line(24, 2)}


@pytest.mark.parametrize(
    ("fields", "monitor", "best"),
    [
        ({"callbacks": (jaxmpi.EarlyStop(patience=9),)}, "eval_loss", ["eval_clean_loss", "min"]),
        ({"devices": 3, "task": FARTHEST}, "eval_noisy_far", ["eval_noisy_far", "max"]),
    ],
    ids=["one", "three"],
)
def test_several_validation_sets_are_evaluated_as_each_alone(fields, monitor, best, tmp_path, capsys):
    def train(validation, **more):
        data = Data("array", train=line(50), validation=validation, loader="threads")
        run = lines(tmp_path, data=data, whole_set=score_whole_set, eval_every="3st", **fields, **more)
        return run, main.train(run, "lines")

    run, figures = train(SETS, quiet=False, monitor=monitor)
    expected = {"eval_count": 37}
    for name, rows in SETS.items():
        alone = train(rows)[1]
        del alone["eval_count"]
        expected |= {figure.replace("eval", f"eval_{name}", 1): value for figure, value in alone.items()}
    assert figures == expected
    assert jaxmpi.Trainer(run).evaluate() == pytest.approx(expected, rel=1e-5)
    assert "evaluation on 37: clean_loss " in capsys.readouterr().out
    assert record(run.run_dir, "eval")[-1]["eval_noisy_far"] == pytest.approx(figures["eval_noisy_far"], rel=1e-5)
    assert {row["name"] for row in record(run.run_dir, "sample")} == {"clean_by_sign", "noisy_by_sign"}
    config = json.loads((Path(run.run_dir) / "config.json").read_text())["experiment"]
    assert [config["monitor"], config["monitor_mode"]] == best
    with pytest.raises(UsageError, match=r"monitor: got eval_far; .*eval_clean_far.*eval_noisy_loss"):
        main.train(lines(tmp_path, data=run.data, monitor="eval_far"), "lines")


DATA_OF_TWO_BATCHES = Data("array", train=line(50), validation=line(24, 1), loader="threads")


def test_a_dry_run_makes_two_steps_with_the_run_s_rates_and_leaves_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = lines(tmp_path, dry_run=True, train_for="900ep", schedule=Schedule("cosine", warmup="5ep"), quiet=False)
    figures = main.train(run, "lines")
    out = capsys.readouterr().out
    assert "step 2/2" in out
    assert "dry run: steps" in out
    assert figures["eval_count"] == 13
    assert not list(tmp_path.rglob("*lines-dry-run*"))
    assert not Path(run.run_dir).exists()


def pairwise(params, model_state, batch, key, train):
    """l_i: the mean over the worker's real examples j of (r_i - r_j)^2, r = x w - y."""
    errors, real = batch["x"] @ params["w"] - batch["y"], batch["weight"] > 0
    distances = jnp.where(real[None], jnp.square(errors[:, None] - errors[None]), 0)
    return distances.sum(-1) / jnp.maximum(real.sum(dtype=jnp.float32), 1), model_state, errors


def test_a_loss_that_compares_examples_sees_the_real_ones_of_its_worker(tmp_path):
    data, w = line(50), np.zeros(3)
    samplers = [Sampler(50, 12, worker, 3, 0) for worker in range(3)]
    for step in range(STEPS):  # the fifth has two examples
        gradient, examples = np.zeros(3), 0
        for sampler in samplers:
            mine = sampler.indices(step).indices
            x, y = data["x"][mine].astype(np.float64), data["y"][mine]
            r, n = x @ w - y, max(len(mine), 1)
            gradient += 2 / n * ((r[:, None] - r)[..., None] * (x[:, None] - x)).sum((0, 1))
            examples += len(mine)
        w = w - 0.01 * gradient / examples
    run = lines(tmp_path, dataclasses.replace(LINE, loss=pairwise), devices=3)
    main.train(run, "lines")
    np.testing.assert_allclose(jaxmpi.load(run.run_dir).params["w"], w, rtol=2e4 * U)


ROWS = {  # label_shape, classes, labels of n examples
    "classification": ((), 4, lambda rng, n: rng.integers(0, 4, n)),
    "language-model": ((6,), 4, lambda rng, n: rng.integers(0, 4, (n, 6))),
    "token-classification": ((6,), 4, lambda rng, n: rng.integers(-1, 4, (n, 6))),
    "segmentation": ((2, 3), 4, lambda rng, n: rng.integers(-1, 4, (n, 2, 3))),
    "regression": ((), 2, lambda rng, n: rng.standard_normal((n, 2), np.float32)),
    "multi-label": ((), 4, lambda rng, n: rng.integers(0, 2, (n, 4))),
}


SHORT_ROWS = ("classification", "token-classification", "regression")


@pytest.mark.e2e
@pytest.mark.parametrize("row", [pytest.param(r, marks=[pytest.mark.slow] * (r not in SHORT_ROWS)) for r in ROWS])
def test_every_row_makes_with_three_workers_the_steps_of_one(row, tmp_path):
    assert ROWS.keys() == TASKS.keys()
    shape, classes, label = ROWS[row]
    wide, rng = (*shape, classes), np.random.default_rng(0)
    model = plain_model(
        lambda key: {"w": jax.random.normal(key, (3, int(np.prod(wide))))},
        lambda params, x: (x @ params["w"]).reshape(len(x), *wide),
        name="linear",
        input_shape=(3,),
        classes=classes,
    )
    train, held_out = ({"image": line(n)["x"], "label": label(rng, n)} for n in (50, 13))
    settings = {"model": model._replace(label_shape=shape), "data": Data("array", train=train, validation=held_out)}
    figures, params = [], []
    for devices in (1, 3):
        run = lines(tmp_path, row, devices=devices, **settings)
        figures.append(main.train(run, row))
        params.append(jaxmpi.load(run.run_dir).params["w"])
    np.testing.assert_allclose(*params, rtol=2e4 * U, atol=U)
    assert figures[0]["eval_count"] == 13
    for name, value in figures[0].items():
        assert figures[1][name] == pytest.approx(value, rel=2e4 * U)


@pytest.mark.parametrize(
    ("task", "settings"),
    [(LINE, {"monitor_mode": "max"}), (FARTHEST, {}), (FARTHEST, {"monitor_mode": "max"})],
    ids=["by the flag", "by the metric", "by both"],
)
def test_the_best_checkpoint_is_that_of_the_monitored_figure(task, settings, tmp_path):
    settings = {"monitor": "eval_far", "keep_checkpoints": 1, "keep_best": 1, **settings}
    experiment = lines(tmp_path, task, train_for="4st", eval_every="1st", checkpoint_every="1st", **settings)
    main.train(experiment, "lines")
    assert jaxmpi.load(experiment.run_dir, best=True).step == 1
    # It only gets better, so the farthest is the first one.
    folders = sorted(path.name for path in (Path(experiment.run_dir) / "checkpoints").glob("step_*"))
    assert folders == ["step_00000001", "step_00000004"]


def test_scores_of_another_monitor_are_not_compared(tmp_path):
    periods = {"eval_every": "1st", "checkpoint_every": "1st", "keep_checkpoints": 9}
    experiment = lines(tmp_path, FARTHEST, train_for="2st", **periods)
    main.train(experiment, "lines")
    main.train(dataclasses.replace(experiment, train_for="4st", monitor="eval_far", resume=True), "lines")
    assert jaxmpi.load(experiment.run_dir, best=True).step == 3  # the first that was judged by `eval_far`


def test_training_stops_early_by_the_direction_of_the_metric(tmp_path):
    stop = jaxmpi.EarlyStop("eval_far", patience=2)
    run = lines(tmp_path, FARTHEST, eval_every="1st", callbacks=(stop,))
    main.train(run, "lines")
    assert column(run.run_dir, "stopped", "step") == [3]


def test_a_figure_of_the_whole_set_stops_a_run_by_the_direction_that_monitor_mode_gives(tmp_path):
    score = itertools.count()  # rises at each evaluation
    fields = {"whole_set": lambda outputs, labels: {"score": next(score)}, "eval_every": "1st", "train_for": "4st"}
    fields["callbacks"] = (jaxmpi.EarlyStop("eval_score", patience=2),)
    with pytest.raises(UsageError, match=r"EarlyStop: mode: got auto with monitor eval_score"):
        main.train(lines(tmp_path, **fields), "lines")
    run = lines(tmp_path, monitor="eval_score", monitor_mode="max", **fields)
    main.train(run, "lines")
    assert not record(run.run_dir, "stopped")


@pytest.mark.parametrize(
    ("task", "figure", "mode"),
    [("classification", "eval_top1", "max"), ("classification", "eval_loss", "min"), ("regression", "eval_mae", "min")],
)
def test_a_figure_of_normalised_images_is_monitored(task, figure, mode, tmp_path):
    outputs = {"classification": 2, "regression": 1}[task]
    image = np.random.default_rng(0).integers(0, 256, (16, 4, 4, 1), np.uint8)
    label = np.arange(16, dtype=np.int32) % 2 if outputs == 2 else image.mean((1, 2)).astype(np.float32)
    init, apply = lambda key: {"w": jnp.zeros((16, outputs))}, lambda p, x: x.reshape(len(x), -1) @ p["w"]
    examples = {"image": image, "label": label}
    experiment = Experiment(
        plain_model(init, apply, name="m", input_shape=(4, 4, 1), classes=outputs),
        task=task,
        data=Data("array", channels=1, mean=(0.3,), std=(0.4,), loader="threads", train=examples, validation=examples),
        effective_batch=8,
        train_for="1st",
        monitor=figure,
        run_dir=str(tmp_path / "run"),
    )
    main.train(experiment, "m")
    assert json.loads((tmp_path / "run" / "config.json").read_text())["experiment"]["monitor_mode"] == mode
    assert "eval_top5" not in (tmp_path / "run" / "record.jsonl").read_text()  # of two classes it is always 1


# ---------------------------------------------------------------- bad parts, named before the first step

MODEL = plain_model(
    lambda key: {"w": jnp.zeros((3, 2))}, lambda p, x: x @ p["w"], name="m", input_shape=(3,), classes=2
)


def with_loss(change) -> Task:
    return dataclasses.replace(LINE, loss=lambda *args: change(*loss(*args)))


def with_metrics(value) -> Task:
    return dataclasses.replace(LINE, metrics=lambda outputs, batch: {"far": value(outputs)})


BAD = {
    "mean": (with_loss(lambda losses, s, o: (losses.mean(), s, o)), r"loss: got float32\[\]; expected float32\[2\]"),
    "pair": (with_loss(lambda losses, s, o: (losses, s)), r"expected \(losses, model state, outputs\)"),
    "state": (with_loss(lambda losses, s, o: (losses, {"n": losses}, o)), "model_state/n: got float32"),
    "no count": (with_metrics(lambda o: o), r"far: got float32\[2\]; expected \(sums, counts\).*jnp\.ones"),
    "a scalar for a batch": (
        dataclasses.replace(LINE, predict=lambda *args: jnp.zeros(())),
        r"predict: outputs: got float32\[\]",
    ),
    "reserved": (
        dataclasses.replace(LINE, metrics=lambda o, b: {"loss": (o, o)}),
        "loss: there is a figure of this name",
    ),
    "scalars": (with_loss(lambda losses, s, o: (losses, s, o, {"kl": o[:, None]})), r"loss: kl: got float32\[2, 1\]"),
    "a name twice": (with_loss(lambda losses, s, o: (losses, s, o, {"far": o})), "far: there is a figure of this name"),
    "weight": (dataclasses.replace(LINE, weight=lambda b: b["x"]), r"weight: got float32\[2, 3\]; expected \[2\]"),
    "maximize": (dataclasses.replace(LINE, maximize=("near",)), "maximize: got .*near.*its metrics are far"),
    "no params": (dataclasses.replace(LINE, init=lambda key, batch: ({}, {})), "init: expected params, got none"),
}


REGRESSION = {"image": np.zeros((8, 3), np.float32), "label": np.zeros((8, 3), np.float32)}
SETTINGS = {
    "negative weight": (
        {"task": dataclasses.replace(LINE, weight=lambda batch: batch["tokens"] - 5)},
        r"weight: got \[.*expected 12 finite numbers >= 0",
    ),
    "unknown": ({"task": "clustering"}, "unknown task 'clustering'"),
    "both": ({"model": MODEL}, "a task of your own has its model in it"),
    "no model": ({"task": "regression"}, "the experiment has no model"),
    "monitor": ({"monitor": "eval_mae"}, "monitor: got eval_mae; task line gives eval_loss, eval_far"),
    "crop": ({"data": Data("array", train=line(9), validation=line(9), crop=2)}, r"data\.crop: got .*a dict of other"),
    "lengths": ({"data": Data("array", train={"x": np.zeros((4, 3)), "y": np.zeros(3)}, validation=line(9))}, "'y': 3"),
    "no fields": ({"data": Data("array", train={}, validation=line(9))}, r"data\.train: got"),
    "field": ({"data": Data("array", train={"weight": np.zeros(4)}, validation=line(9))}, "got a field 'weight'"),
    "labels of a regression": (
        {"task": "regression", "model": MODEL, "data": Data("array", train=REGRESSION, validation=REGRESSION)},
        r"got labels \[2, 3\] for outputs \[2, 2\]; expected as many numbers",
    ),
    "fields of a model": (
        {"task": "auto", "model": MODEL, "data": Data("array", train=line(9), validation=line(9))},
        "got examples of .*; expected image and label, which model",
    ),
    "whole set": ({"whole_set": lambda outputs, labels: 1.0}, "expected a dict"),
    "whole set, twice": ({"whole_set": lambda outputs, labels: {"far": 1.0}}, "far: got 1.0"),
    "whole set, monitor": (
        {"whole_set": lambda outputs, labels: {"near": 1.0}, "monitor": "eval_rank", "monitor_mode": "max"},
        "monitor: got eval_rank",
    ),
}


@pytest.mark.parametrize(("task", "match"), BAD.values(), ids=BAD)
def test_a_bad_part_of_a_task_is_named(task, match, tmp_path):
    with pytest.raises(UsageError, match=match):
        main.train(lines(tmp_path, task), "lines")


@pytest.mark.parametrize(("fields", "match"), SETTINGS.values(), ids=SETTINGS)
def test_settings_that_do_not_fit_are_named(fields, match, tmp_path):
    with pytest.raises(UsageError, match=match):
        main.train(lines(tmp_path, **fields), "lines")
