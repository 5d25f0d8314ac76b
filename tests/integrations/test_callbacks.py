"""Training loops of other libraries drive schedules, evaluations and checkpoints."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bitwright.errors import BitwrightWarning
from bitwright.quantization import Quantizer
from bitwright.quantization.config import QATSchedule
from bitwright.quantization.spec.fake_quantize import FakeQuantizeImplBase
from tests.quantization.qat.networks import MODES, make_config

needs_trainer = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("transformers", "accelerate")),
    reason="the Trainer needs transformers and accelerate",
)
needs_lightning = pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="Lightning is not installed")


class Net(nn.Module):
    """A classifier with the signature of a transformers model."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x, labels=None):
        logits = self.out(F.relu(self.hidden(x)))
        return logits if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


def rows(scale=1.0):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(16, 4, generator=generator) * scale, torch.randint(0, 3, (16,), generator=generator)
    return [{"x": a, "labels": b} for a, b in zip(x, y, strict=True)]


SCHEDULE = QATSchedule(enable_fake_quant=2, disable_observer=5, least_bits={0: 8, 3: 1})


def make(mode="eager", kind="plain", with_labels=False, schedule=SCHEDULE):
    torch.manual_seed(0)
    quantizer = Quantizer(Net(), make_config(mode, kind, schedule=schedule))
    x = torch.randn(4, 4)
    if not with_labels:
        return quantizer, quantizer.prepare((x,))
    return quantizer, quantizer.prepare(
        example_kwargs={"x": x, "labels": torch.zeros(4, dtype=torch.long)},
        dynamic_shapes={key: {0: torch.export.Dim.AUTO} for key in ("x", "labels")} if mode == "graph" else None,
    )


def largest(prepared):
    found = [m.qparams_calculator for m in prepared.modules() if isinstance(m, FakeQuantizeImplBase)]
    return max(c.running_max.max().item() for c in found if hasattr(c, "running_max"))


@needs_trainer
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["plain", "lsq"])
def test_transformers_trainer(tmp_path, mode, kind):
    """Steps are counted per optimizer step, evaluation data is not observed, and a checkpoint resumes the count."""
    from transformers import Trainer, TrainingArguments

    from bitwright.integrations.transformers import QATCallback

    def trainer(quantizer, prepared, folder, resume=None, steps=4):
        arguments = TrainingArguments(
            output_dir=str(folder), max_steps=steps, per_device_train_batch_size=2, gradient_accumulation_steps=2,
            eval_strategy="steps", eval_steps=1, save_steps=2, report_to=[], use_cpu=True, disable_tqdm=True,
            learning_rate=1e-2, save_safetensors=False,
        ) if "save_safetensors" in TrainingArguments.__dataclass_fields__ else TrainingArguments(
            output_dir=str(folder), max_steps=steps, per_device_train_batch_size=2, gradient_accumulation_steps=2,
            eval_strategy="steps", eval_steps=1, save_steps=2, report_to=[], use_cpu=True, disable_tqdm=True,
            learning_rate=1e-2,
        )  # fmt: skip
        return Trainer(
            prepared,
            arguments,
            train_dataset=rows(),
            eval_dataset=rows(1e3),
            callbacks=[QATCallback(quantizer, resume)],
        )

    quantizer, prepared = make(mode, kind, with_labels=True)
    trainer(quantizer, prepared, tmp_path).train()
    assert quantizer.state_dict()["step_count"] == 4
    assert kind == "lsq" or largest(prepared) < 100
    again, fresh = make(mode, kind, with_labels=True)
    checkpoint = tmp_path / "checkpoint-2"
    trainer(again, fresh, tmp_path / "again", checkpoint).train(resume_from_checkpoint=str(checkpoint))
    assert again.state_dict() == quantizer.state_dict()
    for (name, one), other in zip(prepared.state_dict().items(), fresh.state_dict().values(), strict=True):
        assert torch.equal(one, other), name


def trained(quantizer, prepared, folder, *callbacks, resume=False, **options):
    from transformers import Trainer, TrainingArguments

    from bitwright.integrations.transformers import QATCallback

    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=4, per_device_train_batch_size=4, report_to=[], use_cpu=True,
        disable_tqdm=True, learning_rate=1e-2, save_strategy="steps", save_steps=2, **options,
    )  # fmt: skip
    data = {"train_dataset": rows(), "eval_dataset": {"first": rows(1e3), "second": rows(1e3)}}
    own = QATCallback(quantizer)
    trainer = Trainer(prepared, arguments, **data, callbacks=[own, *callbacks])
    for callback in callbacks:
        callback.trainer = trainer
    trainer.train(resume_from_checkpoint=resume)
    return own


@needs_trainer
def test_no_evaluation_of_transformers_moves_a_range(tmp_path):
    """One before training, those of several data sets, and those that somebody's own callback asks for."""
    from transformers import TrainerCallback

    class Asks(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            self.trainer.predict(rows(1e3))

    quantizer, prepared = make(with_labels=True)
    trained(quantizer, prepared, tmp_path / "a", Asks(), eval_strategy="steps", eval_steps=1, eval_on_start=True)
    again, fresh = make(with_labels=True)
    trained(again, fresh, tmp_path / "b")
    for (name, one), other in zip(prepared.state_dict().items(), fresh.state_dict().values(), strict=True):
        assert torch.equal(one, other), name


@needs_trainer
@pytest.mark.parametrize("named", [True, False])
def test_transformers_resume_finds_the_quantizers_state(tmp_path, named):
    """Beside the model's, by its folder or as the last one."""
    quantizer, prepared = make(with_labels=True)
    trained(quantizer, prepared, tmp_path)
    for path in (tmp_path / "checkpoint-4").iterdir():
        path.unlink()
    (tmp_path / "checkpoint-4").rmdir()
    again, fresh = make(with_labels=True)
    trained(again, fresh, tmp_path, resume=str(tmp_path / "checkpoint-2") if named else True)
    assert again.state_dict() == quantizer.state_dict()
    for (name, one), other in zip(prepared.state_dict().items(), fresh.state_dict().values(), strict=True):
        assert torch.equal(one, other), name


@needs_trainer
def test_transformers_resume_without_the_quantizers_state_is_told(tmp_path):
    quantizer, prepared = make(with_labels=True)
    trained(quantizer, prepared, tmp_path)
    for step in (2, 4):
        (tmp_path / f"checkpoint-{step}" / "bitwright_quantizer.json").unlink()
    again, fresh = make(with_labels=True)
    with pytest.warns(BitwrightWarning, match="schedules begin at step 0"):
        trained(again, fresh, tmp_path, resume=str(tmp_path / "checkpoint-2"))


@needs_trainer
def test_training_that_an_error_ended_can_be_closed(tmp_path):
    from transformers import TrainerCallback

    class Interrupted(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            raise KeyboardInterrupt

        def on_train_begin(self, args, state, control, **kwargs):
            handler = self.trainer.callback_handler.callbacks
            found.extend(callback for callback in handler if type(callback).__name__ == "QATCallback")

    found = []
    quantizer, prepared = make(with_labels=True)
    with pytest.raises(KeyboardInterrupt):
        trained(quantizer, prepared, tmp_path, Interrupted())
    with pytest.raises(RuntimeError, match=r"inside training mode.*close\(\)"):
        quantizer.finalize(backend="_torch")
    found[0].close()
    quantizer.finalize(backend="_torch")


@needs_trainer
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["plain", "lsq"])
def test_accelerate(tmp_path, mode, kind):
    """A loop of accelerate needs no callback: the quantizer itself is registered for its checkpoints."""
    from accelerate import Accelerator

    def run(steps, save=None, load=None):
        quantizer, prepared = make(mode, kind)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        optimizer = torch.optim.SGD(prepared.parameters(), lr=1e-2)
        quantizer.step_with(optimizer)
        model, wrapped = accelerator.prepare(prepared, optimizer)
        accelerator.register_for_checkpointing(quantizer)
        if load is not None:
            accelerator.load_state(str(load))
        with quantizer.training_mode():
            for step in steps:
                batch = rows()[4 * step % 16 :][:4]
                with accelerator.accumulate(model):
                    logits = model(torch.stack([row["x"] for row in batch]))
                    accelerator.backward(F.cross_entropy(logits, torch.stack([row["labels"] for row in batch])))
                    wrapped.step()
                    wrapped.zero_grad()
        if save is not None:
            accelerator.save_state(str(save))
        return quantizer, prepared

    whole, expected = run(range(8))
    assert whole.state_dict()["step_count"] == 4
    run(range(4), save=tmp_path / "middle")
    resumed, prepared = run(range(4, 8), load=tmp_path / "middle")
    assert resumed.state_dict() == whole.state_dict()
    for (name, one), other in zip(expected.state_dict().items(), prepared.state_dict().values(), strict=True):
        assert torch.equal(one, other) if torch.is_tensor(one) else one == other, name


@needs_lightning
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["plain", "lsq"])
def test_lightning(tmp_path, mode, kind):
    """The same through a Lightning trainer, with its own checkpoints: a resumed run is the uninterrupted one."""
    import lightning.pytorch as pl
    from torch.utils.data import DataLoader

    from bitwright.integrations.lightning import QATCallback

    class Module(pl.LightningModule):
        def __init__(self, prepared):
            super().__init__()
            self.prepared = prepared

        def training_step(self, batch, index):
            return F.cross_entropy(self.prepared(batch["x"]), batch["labels"])

        def validation_step(self, batch, index):
            self.prepared(batch["x"])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-2)

    def fit(quantizer, prepared, epochs, checkpoint=None):
        trainer = pl.Trainer(
            max_epochs=epochs, accumulate_grad_batches=2, accelerator="cpu", logger=False, enable_progress_bar=False,
            enable_checkpointing=False, enable_model_summary=False, callbacks=[QATCallback(quantizer)],
            default_root_dir=str(tmp_path),
        )  # fmt: skip
        loaders = DataLoader(rows(), batch_size=4), DataLoader(rows(1e3), batch_size=4)
        trainer.fit(Module(prepared), *loaders, ckpt_path=checkpoint)
        return trainer

    quantizer, prepared = make(mode, kind)
    trainer = fit(quantizer, prepared, 2)
    assert quantizer.state_dict()["step_count"] == 4
    assert kind == "lsq" or largest(prepared) < 100
    path = tmp_path / "last.ckpt"
    trainer.save_checkpoint(path)
    again, fresh = make(mode, kind)
    fit(again, fresh, 3, str(path))
    whole, expected = make(mode, kind)
    fit(whole, expected, 3)
    assert whole.state_dict()["step_count"] == 6
    assert again.state_dict() == whole.state_dict()
    for (name, one), other in zip(expected.state_dict().items(), fresh.state_dict().values(), strict=True):
        assert torch.equal(one, other) if torch.is_tensor(one) else one == other, name


def lightning_module(prepared):
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.prepared = prepared

        def training_step(self, batch, index):
            return F.cross_entropy(self.prepared(batch["x"]), batch["labels"])

        def validation_step(self, batch, index):
            self.prepared(batch["x"])

        test_step = predict_step = validation_step

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-2)

    return Module()


def lightning_trainer(quantizer, folder, *callbacks, epochs=2):
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    from bitwright.integrations.lightning import QATCallback

    own = [QATCallback(quantizer) if callback is None else callback for callback in callbacks or (None,)]
    return pl.Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[*own, ModelCheckpoint(str(folder), filename="{epoch}", save_top_k=-1)],
    )  # fmt: skip


def observing(prepared):
    prepared.eval()  # when switches are looked at
    return [m for m in prepared.modules() if isinstance(m, FakeQuantizeImplBase) and m.is_observing()]


def assert_equal_states(one, other):
    for (name, value), second in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(value, second) if torch.is_tensor(value) else value == second, name


@needs_lightning
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["plain", "lsq"])
def test_lightning_evaluations_of_a_checkpoint(tmp_path, mode, kind):
    """A checkpoint of the middle has observers on: neither the sanity check nor a test of it moves ranges."""
    from torch.utils.data import DataLoader

    data, large = DataLoader(rows(), batch_size=4), DataLoader(rows(1e3), batch_size=4)
    whole, expected = make(mode, kind, schedule=None)
    lightning_trainer(whole, tmp_path).fit(lightning_module(expected), data, large)
    first, last = (str(tmp_path / f"epoch={epoch}.ckpt") for epoch in range(2))
    resumed, fresh = make(mode, kind, schedule=None)
    trainer = lightning_trainer(resumed, tmp_path / "again")
    module = lightning_module(fresh)
    trainer.fit(module, data, large, ckpt_path=first)
    assert_equal_states(expected, fresh)
    assert not observing(fresh)
    for run in (trainer.test, trainer.validate, trainer.predict):
        run(module, large, ckpt_path=last)
        assert kind == "lsq" or largest(fresh) == largest(expected)
        assert len(observing(fresh)) == len([m for m in fresh.modules() if isinstance(m, FakeQuantizeImplBase)])
    with resumed.calibration_mode():
        trainer.predict(module, large)
    assert kind == "lsq" or largest(fresh) > 2 * largest(expected)


@needs_lightning
@pytest.mark.parametrize("mode", MODES)
def test_lightning_averages_of_weights(tmp_path, mode):
    """Averages of switches and zero points are refused; one of the weights is what the model is in the end, at rest."""
    from torch.utils.data import DataLoader

    callbacks = pytest.importorskip("lightning.pytorch.callbacks")
    if not hasattr(callbacks, "EMAWeightAveraging"):
        pytest.skip("this Lightning has no EMAWeightAveraging")
    data = DataLoader(rows(), batch_size=4)
    quantizer, prepared = make(mode)
    average = callbacks.EMAWeightAveraging(decay=0.5)
    trainer = lightning_trainer(quantizer, tmp_path, None, average)
    with pytest.raises(ValueError, match=r"EMAWeightAveraging: .*use_buffers=False"):
        trainer.fit(lightning_module(prepared), data)
    states = []
    for first in (True, False):
        quantizer, prepared = make(mode)
        average = callbacks.EMAWeightAveraging(decay=0.5, use_buffers=False)
        order = (None, average) if first else (average, None)
        trainer = lightning_trainer(quantizer, tmp_path / str(first), *order)
        trainer.fit(lightning_module(prepared), data, DataLoader(rows(1e3), batch_size=4))
        assert quantizer.state_dict()["step_count"] == 8
        assert largest(prepared) < 10
        assert not observing(prepared)
        assert all(int(v) == 1 for n, v in prepared.state_dict().items() if n.endswith("fake_quant_enabled"))
        states.append(prepared)
    assert_equal_states(*states)


@needs_trainer
@pytest.mark.parametrize("mode", MODES)
def test_transformers_evaluations_of_a_checkpoint(tmp_path, mode):
    """Neither evaluate() and predict() of a model with observers on, nor an evaluation at the start, move ranges."""
    from transformers import Trainer, TrainingArguments

    from bitwright.integrations.transformers import QATCallback

    def trainer(quantizer, prepared):
        arguments = TrainingArguments(
            output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=4, report_to=[], use_cpu=True,
            disable_tqdm=True, save_strategy="no", eval_on_start=True,
        )  # fmt: skip
        return Trainer(
            prepared, arguments, train_dataset=rows(), eval_dataset=rows(1e3), callbacks=[QATCallback(quantizer)]
        )

    quantizer, prepared = make(mode, schedule=None, with_labels=True)
    trained = trainer(quantizer, prepared)
    with quantizer.training_mode():
        prepared(**{key: torch.stack([row[key] for row in rows()]) for key in ("x", "labels")})
        checkpoint = {name: value.clone() for name, value in prepared.state_dict().items()}
    trained.train()
    assert 0 < largest(prepared) < 10
    quantizer, prepared = make(mode, schedule=None, with_labels=True)
    prepared.load_state_dict(checkpoint)
    assert observing(prepared)
    before = largest(prepared)
    evaluated = trainer(quantizer, prepared)
    for _ in range(2):
        evaluated.evaluate()
        evaluated.predict(rows(1e3))
        assert largest(prepared) == before
    with quantizer.calibration_mode():
        evaluated.predict(rows(1e3))
    assert largest(prepared) > 2 * before


@pytest.mark.parametrize("name", ["transformers", "lightning"])
def test_callbacks_by_hand(name):
    """The hooks in the order of a run: modes, steps, evaluation pauses and state."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    module = importlib.import_module(f"bitwright.integrations.{name}")
    quantizer, prepared = make()
    session = module.QATCallback(quantizer)._session
    session.begin()
    prepared(torch.randn(4, 4))
    session.step()
    session.pause()
    before = largest(prepared)
    prepared(torch.randn(4, 4) * 1e4)
    session.resume()
    assert largest(prepared) == before
    state = session.state_dict()
    session.step()
    session.load_state_dict(state)
    assert session.active
    session.end()
    assert quantizer.state_dict()["step_count"] == 1


@needs_trainer
def test_checkpoints_without_the_quantizers_state(tmp_path):
    """The error names folder and file, training can begin again from another one, and files are written whole."""
    from types import SimpleNamespace

    from bitwright.integrations.transformers import QATCallback

    quantizer, _ = make()
    args, state = SimpleNamespace(output_dir=str(tmp_path)), SimpleNamespace(global_step=2)
    callback = QATCallback(quantizer, resume_from=tmp_path / "checkpoint-2")
    for _ in range(2):
        with pytest.raises(FileNotFoundError, match=r"checkpoint-2' is no checkpoint .* no bitwright_quantizer\.json"):
            callback.on_train_begin(args, state, None)
    callback.on_save(args, state, None)
    file = tmp_path / "checkpoint-2" / "bitwright_quantizer.json"
    whole = file.read_text()
    callback._session.state_dict = lambda: {"step_count": object()}
    with pytest.raises(TypeError):
        callback.on_save(args, state, None)
    assert file.read_text() == whole
    file.write_text(whole[:-5])
    with pytest.raises(ValueError, match="does not hold a quantizer's state"):
        callback.on_train_begin(args, state, None)
    file.write_text(whole)
    callback.on_train_begin(args, state, None)
    callback.close()
