"""Figures of BrimfulCallback reach whatever prints or reports a Hugging Face Trainer's logs, as they do its history."""

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
BrimfulCallback = pytest.importorskip("brimful.integrations.transformers").BrimfulCallback

MEMORY = {"peak_bytes", "used_bytes"}
FIGURES = MEMORY | {"pieces", "retries"}


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 1)

    def forward(self, x, labels=None):
        return {"loss": self.linear(x).square().mean()}


class Reporter(transformers.TrainerCallback):
    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **_):
        self.logs.append(dict(logs))


def trainer_of(folder, *callbacks, **options):
    arguments = transformers.TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        max_steps=2,
        logging_steps=1,
        **{"report_to": [], **options},
        disable_tqdm=True,
        save_strategy="no",
        remove_unused_columns=False,
    )
    data = [{"x": torch.randn(3)} for _ in range(16)]
    return transformers.Trainer(
        model=Net(), args=arguments, train_dataset=data, callbacks=list(callbacks)
    )


def test_a_reporter_gets_what_the_history_has(tmp_path, capsys):
    reporter = Reporter()
    trainer = trainer_of(tmp_path, reporter)
    trainer.add_callback(BrimfulCallback(trainer))
    trainer.train()
    history = [{k: v for k, v in e.items() if k != "step"} for e in trainer.state.log_history]
    assert len(history) == 3 and all(entry.keys() >= FIGURES for entry in history)
    assert reporter.logs == history
    assert capsys.readouterr().out.count("'peak_bytes'") == 3  # the Trainer's own printer
    evaluated = trainer.evaluate(trainer.train_dataset)
    assert reporter.logs[-1] == evaluated and evaluated.keys() >= FIGURES


def test_tensorboard_has_them(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    trainer = trainer_of(tmp_path, report_to="tensorboard")
    trainer.add_callback(BrimfulCallback(trainer))
    trainer.train()
    (file,) = (tmp_path / "events").rglob("*tfevents*")
    events = EventAccumulator(str(file)).Reload()
    history = trainer.state.log_history
    for name in FIGURES:
        found = events.Scalars(f"train/{name}")
        assert [event.step for event in found] == [entry["step"] for entry in history]
        assert [event.value for event in found] == pytest.approx([e[name] for e in history])


def test_a_callback_that_is_not_there_reports_nothing(tmp_path):
    trainer = trainer_of(tmp_path)
    callback = BrimfulCallback(trainer)
    trainer.add_callback(callback)
    trainer.remove_callback(callback)
    trainer.train()
    assert not any(entry.keys() & FIGURES for entry in trainer.state.log_history)


def test_without_a_trainer_those_that_come_later_get_them(tmp_path):
    before, after = Reporter(), Reporter()
    trainer = trainer_of(tmp_path, before, BrimfulCallback())
    trainer.add_callback(after)
    trainer.train()
    assert all(entry.keys() >= MEMORY for entry in trainer.state.log_history)
    assert all(logs.keys() >= MEMORY for logs in after.logs) and len(after.logs) == 3
    assert not any(logs.keys() & MEMORY for logs in before.logs)
