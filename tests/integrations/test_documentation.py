"""The blocks of docs/integrations.md run, on two ranks where they are of ranks."""

import itertools
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from models import classes
from trainers import dataset, net, under_torchrun

import brimful

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "integrations.md"
BLOCK = re.compile(r"^## (.*?)\n.*?^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = dict(BLOCK.findall(PAGE.read_text()))


def loss_fn(model, piece):
    return F.cross_entropy(model(piece[0]), piece[1])


def values_for(title, folder):
    """What the surroundings of a block would have."""
    module, data = net(), dataset(16)
    options = {"accelerator": "cpu", "devices": 2}
    if title == "Lightning":
        pl = pytest.importorskip("lightning.pytorch")

        class Module(pl.LightningModule):
            def __init__(self):
                super().__init__()
                self.net = module

            def training_step(self, batch, _):
                return loss_fn(self.net, batch)

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.1)

            def train_dataloader(self):
                return torch.utils.data.DataLoader(data, batch_size=4)

        options |= {"max_epochs": 1, "logger": False, "enable_checkpointing": False}
        return {"module": Module(), "options": options}
    if title == "Hugging Face Trainer":
        transformers = pytest.importorskip("transformers")
        config = transformers.BertConfig(
            hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
        )
        rows = [{"input_ids": torch.arange(4), "labels": torch.tensor(k % 2)} for k in range(8)]
        arguments = transformers.TrainingArguments(
            output_dir=folder, use_cpu=True, num_train_epochs=1, report_to=[], save_strategy="no"
        )
        net_of_it = transformers.BertForSequenceClassification(config)
        return {"net": net_of_it, "arguments": arguments, "data": rows}
    if title in ("TRL", "sentence-transformers", "lm-evaluation-harness"):
        return values_for_language_models(title, folder)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    found = {"net": module, "optimizer": optimizer, "batch": classes(4), "loss_fn": loss_fn}
    if title == "torch.distributed.checkpoint":
        scaler = torch.amp.GradScaler("cpu")
        model = brimful.DistributedDataParallel(module)
        sizer = brimful.BatchSizer(model, optimizer, scaler=scaler)
        found |= {"model": model, "sizer": sizer, "scaler": scaler, "loader": [1, 2]}
        return found | {"folder": folder, "brimful": brimful, "itertools": itertools}
    return found | {"options": {"cpu": True} if title == "Accelerate" else options}


def values_for_language_models(title, folder):
    datasets = pytest.importorskip("datasets")
    tiny = pytest.importorskip("tiny_language_models")
    options = {"output_dir": folder, "use_cpu": True, "report_to": [], "save_strategy": "no"}
    options["max_steps"] = 1
    if title == "lm-evaluation-harness":
        instance = pytest.importorskip("lm_eval.api.instance").Instance
        requests = [
            instance("loglikelihood", {}, (text, " w1"), number)
            for number, text in enumerate(tiny.texts(4))
        ]
        return {"net": tiny.causal_model(), "tokenizer": tiny.tokenizer(), "requests": requests}
    if title == "TRL":
        data = datasets.Dataset.from_dict({"text": tiny.texts(16)})
        values = {"net": tiny.causal_model(), "tokenizer": tiny.tokenizer(), "data": data}
        return {**values, "options": {**options, "bf16": False}}
    library = pytest.importorskip("sentence_transformers")
    model = tiny.sentence_model(f"{folder}/model")
    pairs = {"one": tiny.texts(16), "two": tiny.texts(16)[::-1], "score": [0.5] * 16}
    return {
        "net": model,
        "arguments": library.SentenceTransformerTrainingArguments(**options),
        "data": datasets.Dataset.from_dict(pairs),
        "loss": tiny.losses().CosineSimilarityLoss(model),
    }


def block_job(rank, title, folder):
    under_torchrun(rank)
    exec(compile(BLOCKS[title], title, "exec"), values_for(title, folder))


NEEDS = {
    "Lightning": "lightning",
    "Fabric": "lightning",
    "Accelerate": "accelerate",
    "Hugging Face Trainer": "transformers",
    "TRL": "trl",
    "lm-evaluation-harness": "lm_eval",
    "sentence-transformers": "sentence_transformers",
    "torch.distributed.checkpoint": "torch",
}


@pytest.mark.parametrize("title", NEEDS)
def test_a_block_of_the_page_runs(ranks, tmp_path, title):
    pytest.importorskip(NEEDS[title])
    if title == "sentence-transformers":  # of several processes one alone saves
        pytest.importorskip("tiny_language_models").save_bert(f"{tmp_path}/model")
    ranks(block_job, title, str(tmp_path))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_recipe_for_ray_train_runs(tmp_path, monkeypatch):
    ray = pytest.importorskip("ray")
    pytest.importorskip("ray.train.torch")
    monkeypatch.setenv("RAY_TRAIN_V2_ENABLED", "1")
    ray.init(num_cpus=3, object_store_memory=100 << 20, include_dashboard=False)
    try:
        values = {"folder": str(tmp_path)}
        exec(compile(BLOCKS["Ray Train"], "Ray Train", "exec"), values)
    finally:
        ray.shutdown()
    assert values["result"].metrics["loss"] > 0
    assert values["result"].metrics["retries"] == 0
    assert list(tmp_path.rglob("net.pt"))


def test_the_block_of_torchft_runs(monkeypatch):
    pytest.importorskip("torchft")
    coordination = pytest.importorskip("torchft.coordination")
    lighthouse = coordination.LighthouseServer(bind="127.0.0.1:0", min_replicas=1)
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    surroundings = {
        "TORCHFT_LIGHTHOUSE": lighthouse.address(),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "RANK": "0",
        "WORLD_SIZE": "1",
    }
    for name, value in surroundings.items():
        monkeypatch.setenv(name, value)
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    values = {"net": module, "optimizer": optimizer, "data": dataset(16), "loss_fn": loss_fn}
    exec(compile(BLOCKS["torchft"], "torchft", "exec"), values)
    assert values["fleet"].progress == 2
    lighthouse.shutdown()


def test_every_block_is_run():
    assert set(BLOCKS) == {*NEEDS, "Ray Train", "torchft"}
    assert PAGE.read_text().count("```python") == len(BLOCKS)
