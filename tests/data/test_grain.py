"""Grain's MapDataset and IterDataset: exact order, states behind what was trained, and what is refused."""

import dataclasses
import itertools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxmpi
from jaxmpi.config import Data, Experiment
from jaxmpi.core.errors import TrainingError, UsageError
from jaxmpi.data import Loader, Sampler, open_source
from jaxmpi.trainer import main
from line_task import LINE, line, lines

grain = pytest.importorskip("grain")

ROWS = 10


def noisy(x: int, rng: np.random.Generator) -> dict[str, Any]:
    return {"image": np.array([x, rng.integers(1000)], np.float32), "label": x % 3}


def maps() -> Any:
    return grain.MapDataset.range(ROWS).seed(4).random_map(noisy)


def data(**kwargs: Any) -> Data:
    return Data("grain", **{"train": maps(), "validation": maps(), **kwargs})


class TestMaps:
    @staticmethod
    def batches(size: int, start: int) -> list[list[tuple[float, ...]]]:
        """Steps `start` to 5 of batches of 4, sorted."""
        steps = []
        for rank in range(size):
            source, sampler = open_source(data(), "train"), Sampler(ROWS, 4, rank, size, seed=1)
            with Loader(source, sampler, data(), train=True, start_step=start, stop_step=6) as loader:
                steps.append([[*map(tuple, batch.image[batch.weight > 0].tolist())] for batch in loader])
        return [sorted(itertools.chain(*parts)) for parts in zip(*steps, strict=True)]

    @pytest.mark.parametrize("size", [2, 3])
    def test_any_number_of_workers_sees_the_examples_of_one_after_a_resume_too(self, size):
        assert self.batches(size, start=2) == self.batches(1, start=0)[2:]

    def test_each_epoch_has_random_choices_of_its_own(self):
        steps = self.batches(1, start=0)
        for epoch in range(2):
            seen = sorted(itertools.chain(*steps[3 * epoch : 3 * epoch + 3]))
            expected = range(epoch * ROWS, (epoch + 1) * ROWS)
            assert seen == sorted(tuple(maps()[i]["image"].tolist()) for i in expected)
            assert [x for x, _ in seen] == [*range(ROWS)]


# ---------------------------------------------------------------- streams

POINTS = line(50)


def point(i: int, rng: np.random.Generator) -> dict[str, Any]:
    row = {name: values[i % 50] for name, values in POINTS.items()}
    return row | {"x": row["x"] + rng.normal(0, 0.1, 3).astype(np.float32)}


def keeps(row: dict[str, Any]) -> bool:
    return row["x"][0] < 1.0  # so that an example's place says nothing of its place in the file


def train(worker: int = 0, workers: int = 1) -> Any:
    rows = grain.MapDataset.range(50)[worker::workers].seed(3).shuffle().repeat().random_map(point)
    return rows.to_iter_dataset().filter(keeps)


def held_out(worker: int = 0, workers: int = 1) -> Any:
    rows = grain.MapDataset.range(13)[worker::workers].map(lambda i: {k: v[i] for k, v in line(13, 1).items()})
    return rows.to_iter_dataset()


ONE, EACH = data(train=train(), validation=held_out()), data(train=train, validation=held_out)


def streams(folder: Path, data: Data = ONE, **fields: Any) -> Experiment:
    lengths = {"eval_every": "0st", "checkpoint_every": "1st", "keep_checkpoints": 20, "train_for": "9st"}
    return lines(folder, LINE, **{"data": data} | lengths | fields)


def params(run_dir: str) -> bytes:
    return jaxmpi.load(run_dir).params["w"].tobytes()


class NoState(grain.IterDataset):
    def __iter__(self) -> Any:
        return Odd()


class Odd(grain.DatasetIterator):
    def __next__(self) -> Any:
        return {name: values[0] for name, values in POINTS.items()}

    def get_state(self) -> Any:
        return {"rng": np.random.default_rng()}

    def set_state(self, state: Any) -> None: ...


def only_first(worker: int, workers: int) -> Any:
    return held_out(worker, workers).filter(lambda row: worker == 0)


PARTS = ((data(train=grain.MapDataset.range(50).map(point), validation=held_out()), 1.0),)
REFUSED = {
    "ends": ({"data": data(train=held_out(), validation=held_out())}, r"data\.train has ended after 13 examples"),
    "endless": (
        {"data": data(train=train(), validation=train(), stall_timeout_s=0.2)},
        r"data\.validation: got \d+ examples in 0 s; expected a stream that ends",
    ),
    "empty": (
        {"data": data(train=train, validation=only_first), "devices": 2},
        r"data\.validation\(1, 2\): got no examples; expected >= 1: give each worker some",
    ),
    "part": ({"data": Data("mixture", train=PARTS)}, r"data\.validation: got an IterDataset"),
    "epochs": ({"train_for": "2ep"}, r"train_for: got 2ep with data\.train"),
    "evaluation": ({"eval_every": "1ep"}, "eval_every: got 1ep with"),
    "state": ({"data": data(train=NoState(), validation=held_out())}, r"data\.train: state: .*JSON"),
    "map": ({"data": data(train=lambda w, n: [1], validation=held_out())}, r"data\.train\(0, 1\): got list"),
}


class TestStreams:
    @pytest.mark.e2e
    @pytest.mark.slow  # runs with several workers
    def test_one_for_each_worker_is_evaluated_once(self, tmp_path):
        run = streams(tmp_path, EACH, devices=3)  # 13 examples: 5, 4 and 4
        figures = main.train(run, "lines")
        w, data = jaxmpi.load(run.run_dir).params["w"], line(13, 1)
        assert figures["eval_count"] == 13
        assert figures["eval_loss"] == pytest.approx(np.square(data["x"] @ w - data["y"]).mean(), rel=1e-5)

    @pytest.mark.e2e
    @pytest.mark.parametrize(
        ("data", "step"), [(ONE, 1), pytest.param(EACH, 4, marks=pytest.mark.slow)], ids=["one", "each"]
    )
    def test_a_resumed_run_is_that_which_did_not_end_and_one_stream_that_of_one_worker(self, data, step, tmp_path):
        whole = streams(tmp_path, data, devices=2)
        part = dataclasses.replace(whole, run_dir=str(tmp_path / "part"))
        want = main.train(whole, "lines")
        shutil.copytree(whole.run_dir, part.run_dir)
        for later in range(step + 1, 10):
            shutil.rmtree(Path(part.run_dir) / "checkpoints" / f"step_{later:08}")
        assert main.train(dataclasses.replace(part, resume=True), "lines") == want
        assert params(part.run_dir) == params(whole.run_dir)
        if data is ONE:
            alone = main.train(streams(tmp_path), "lines")
            assert alone["eval_count"] == want["eval_count"] == 13
            assert want["eval_loss"] == pytest.approx(alone["eval_loss"], rel=1e-5)

    @pytest.mark.slow
    def test_a_rollback_reads_the_stream_again(self, tmp_path):
        whole = streams(tmp_path)
        main.train(whole, "lines")
        back = streams(tmp_path, on_nonfinite="rollback", inject=("nan:step=6",))
        main.train(back, "lines")
        assert params(back.run_dir) == params(whole.run_dir)

    @pytest.mark.e2e
    @pytest.mark.slow  # three runs
    def test_one_continues_with_another_number_of_workers_and_others_do_not(self, tmp_path):
        for data in (ONE, EACH):
            run = streams(tmp_path, data, devices=2, train_for="4st")
            main.train(run, "lines")
            more = dataclasses.replace(run, devices=3, resume=True, train_for="8st")
            if data is EACH:
                with pytest.raises(UsageError, match=r"got a stream for each of 3 workers, expected .* each of 2"):
                    main.train(more, "lines")
                continue
            figures = main.train(more, "lines")
            alone = streams(tmp_path, data, train_for="8st")
            assert figures["eval_loss"] == pytest.approx(main.train(alone, "lines")["eval_loss"], rel=1e-5)

    @pytest.mark.parametrize(("fields", "match"), REFUSED.values(), ids=REFUSED)
    def test_what_they_cannot_do_is_refused(self, fields, match, tmp_path):
        with pytest.raises((UsageError, TrainingError), match=match):
            main.train(streams(tmp_path, **fields), "lines")
