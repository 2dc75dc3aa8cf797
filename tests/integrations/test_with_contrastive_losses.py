"""sentence-transformers' trainer with losses that compare the rows of a batch, in pieces."""

import pytest
import torch
from models import values_of
from trainers import Memory, same, under_torchrun

sentence_transformers = pytest.importorskip("sentence_transformers")
datasets = pytest.importorskip("datasets")
adapter = pytest.importorskip("brimful.integrations.transformers")
tiny = pytest.importorskip("tiny_language_models")
losses = tiny.losses()

ALL_DIRECTIONS = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")


class WithTerms(torch.nn.Module):
    """As the library's documentation has it: a dict of losses."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.pairs = losses.MultipleNegativesRankingLoss(model)
        self.spread = losses.GlobalOrthogonalRegularizationLoss(model)

    def forward(self, features, labels=None):
        embeddings = [self.model(column)["sentence_embedding"] for column in features]
        pairs = self.pairs.compute_loss_from_embeddings(embeddings, labels)
        return {"pairs": pairs, **self.spread.compute_loss_from_embeddings(embeddings, labels)}


class OfTokens(losses.MultipleNegativesRankingLoss):
    def forward(self, features, labels):
        tokens = self.model(features[0])["token_embeddings"]
        return super().forward(features, labels) + tokens.square().mean()


class OfLengths(losses.MultipleNegativesRankingLoss):
    """Without an error where there are no texts."""

    def forward(self, features, labels):
        longest = features[0].get("attention_mask", torch.zeros(1)).sum()
        return super().forward(features, labels) * (1 + longest)


class WithScale(losses.MultipleNegativesRankingLoss):
    def __init__(self, model):
        super().__init__(model)
        self.weight = torch.nn.Parameter(torch.ones(()))


def cached(model, **options):
    return losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=3, **options)


def guided(model, loss=losses.CachedGISTEmbedLoss, **options):
    guide = tiny.sentence_model(model.folder)
    with torch.no_grad():
        for p in guide.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(3)))
    return loss(model, guide, **options)


LOSSES = {
    "pairs": losses.MultipleNegativesRankingLoss,
    "all directions": lambda model: losses.MultipleNegativesRankingLoss(
        model, directions=ALL_DIRECTIONS, hardness_mode="in_batch_negatives", hardness_strength=2.0
    ),
    "cached": cached,
    "cached symmetric": lambda model: losses.CachedMultipleNegativesSymmetricRankingLoss(
        model, mini_batch_size=3
    ),
    "cached with a guide": lambda model: guided(model, mini_batch_size=3),
    "margin": lambda model: losses.MegaBatchMarginLoss(model, mini_batch_size=3),
    "ranks of scores": losses.CoSENTLoss,
    "angles": losses.AnglELoss,
    "a sum": lambda model: losses.ContrastiveLoss(model, size_average=False),
    "several widths": lambda model: losses.MatryoshkaLoss(
        model, losses.MultipleNegativesRankingLoss(model), [16, 8], [1.0, 0.5]
    ),
    "several widths, cached": lambda model: losses.MatryoshkaLoss(
        model, cached(model), [16, 8], [1.0, 0.5]
    ),
    "terms": WithTerms,
}


def trainer(folder, loss, memory=None, dtype=torch.float32, columns=2, evaluating=False, **options):
    def check(_, args):
        ids = args[0]["input_ids"]
        if evaluating and not torch.is_grad_enabled() and len(ids) > memory.rows:
            memory.refusals += 1
            raise torch.OutOfMemoryError("planted")
        if memory is not None:
            memory.check(ids)

    model = tiny.sentence_model(f"{folder}/model", check).to(dtype)
    model.folder = f"{folder}/model"
    arguments = sentence_transformers.SentenceTransformerTrainingArguments(
        output_dir=f"{folder}/out",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_steps=1,
        optim="sgd",
        seed=1,
        **{
            "per_device_train_batch_size": 8,
            "max_steps": 2,
            "learning_rate": 0.05,
            "save_strategy": "no",
            **options,
        },
    )
    texts = tiny.texts(32 * columns)
    data = {f"column {k}": texts[32 * k : 32 * (k + 1)] for k in range(columns)}
    data["score"] = [float(number % 3 > 0) for number in range(32)]
    return sentence_transformers.SentenceTransformerTrainer(
        model=model,
        args=arguments,
        train_dataset=datasets.Dataset.from_dict(data),
        eval_dataset=datasets.Dataset.from_dict(data),
        loss=loss(model),
    )


def in_pieces(made, **options):
    callback = adapter.BrimfulCallback(made, **options)
    made.add_callback(callback)
    return callback


@pytest.fixture(autouse=True)
def one_thread():
    """For models as small as these a second one waits for its turn."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def folder(tmp_path):
    tiny.save_bert(f"{tmp_path}/model")
    return str(tmp_path)


def gradients(made):
    """Of the first batch, with the trainer's own step."""
    made.model.train()
    inputs = next(iter(made.get_train_dataloader()))
    made.create_optimizer()
    made.current_gradient_accumulation_steps = 1
    loss = made.training_step(made.model, inputs)
    named = made.model.named_parameters()
    return loss.item(), {name: p.grad for name, p in named if p.grad is not None}


def off(one, other):
    assert list(one) == list(other)
    norm = sum(value.double().square().sum() for value in other.values()).sqrt()
    return (sum((one[n] - other[n]).double().square().sum() for n in other).sqrt() / norm).item()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float64) for name in LOSSES), ("pairs", torch.float32)],
)
def test_the_gradient_is_that_of_the_batch_in_one_piece(folder, name, dtype):
    loss, expected = gradients(trainer(folder, LOSSES[name], dtype=dtype))
    memory = Memory(3)
    ours = trainer(folder, LOSSES[name], memory, dtype)
    callback = in_pieces(ours)
    found_loss, found = gradients(ours)
    assert memory.refusals == callback.sizer.report().retries == 2
    assert found_loss == pytest.approx(loss, rel=1e-5)
    assert off(found, expected) < (1e-12 if dtype == torch.float64 else 1e-6)


@pytest.mark.parametrize(("name", "columns"), [("pairs", 3), ("terms", 2)])
def test_training_is_that_without_pieces(folder, name, columns):
    options = {"columns": columns, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5}
    plain = trainer(folder, LOSSES[name], **options)
    plain.train()
    memory = Memory(3)
    ours = trainer(folder, LOSSES[name], memory, **options)
    callback = in_pieces(ours)
    ours.train()
    assert memory.refusals == callback.sizer.report().retries == 2
    assert callback.sizer.report().history[-1].pieces > 1
    assert same(values_of(ours.model), values_of(plain.model))
    names = ["loss", "grad_norm"] + (["pairs", "gor_mean"] if name == "terms" else [])
    logs, expected = (
        [entry[n] for entry in run.state.log_history if "loss" in entry for n in names]
        for run in (ours, plain)
    )
    assert len(logs) == 2 * len(names)
    assert logs == pytest.approx(expected, rel=1e-4)


def test_the_library_s_cached_loss_gives_the_same_gradient_and_losses(folder):
    loss, expected = gradients(trainer(folder, cached))
    ours = trainer(folder, losses.MultipleNegativesRankingLoss, Memory(3))
    in_pieces(ours)
    found_loss, found = gradients(ours)
    assert found_loss == pytest.approx(loss, rel=1e-5)
    assert off(found, expected) < 1e-5
    curves = []
    for run in (
        trainer(folder, cached, max_steps=8),
        trainer(folder, LOSSES["pairs"], Memory(3), max_steps=8),
    ):
        if not curves:
            run.train()
        else:
            in_pieces(run)
            run.train()
        curves.append([entry["loss"] for entry in run.state.log_history if "loss" in entry])
    assert len(curves[0]) == 8
    assert curves[1] == pytest.approx(curves[0], rel=1e-4)


def test_a_run_is_resumed(folder):
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = trainer(folder, LOSSES["pairs"], Memory(3), **options)
    in_pieces(whole)
    whole.train()
    resumed = trainer(folder, LOSSES["pairs"], Memory(3), **options)
    in_pieces(resumed)
    resumed.train(resume_from_checkpoint=f"{folder}/out/checkpoint-2")
    assert resumed.state.global_step == 4
    assert same(values_of(resumed.model), values_of(whole.model))


@pytest.mark.parametrize("name", ["pairs", "cached", "cached with a guide", "terms"])
def test_evaluation_goes_on_in_pieces_with_the_loss_of_the_batch(folder, name):
    plain = trainer(folder, LOSSES[name], per_device_eval_batch_size=16)
    expected = plain.evaluate()["eval_loss"]
    memory = Memory(3)
    ours = trainer(folder, LOSSES[name], memory, evaluating=True, per_device_eval_batch_size=16)
    in_pieces(ours)
    memory.rows = 3 if name not in ("cached", "cached with a guide") else 2
    assert ours.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)
    assert memory.refusals > 0


def test_the_scores_of_a_cached_loss_are_never_all_there(folder):
    made = trainer(folder, LOSSES["pairs"])
    widths = []

    def watched(one, two):
        widths.append(len(one))
        return sentence_transformers.util.cos_sim(one, two)

    ours = trainer(folder, lambda model: cached(model, similarity_fct=watched))
    in_pieces(ours)
    _, found = gradients(ours)
    assert max(widths) == 3
    assert off(found, gradients(made)[1]) < 1e-6


REFUSED = {
    "its own parameter: weight": WithScale,
    "its own parameter: classifier": lambda model: losses.SoftmaxLoss(model, 16, 3),
    "its own parameter: model1": losses.ContrastiveTensionLoss,
    "take CachedGISTEmbedLoss": lambda model: guided(model, losses.GISTEmbedLoss),
    "the model's layers": lambda model: losses.AdaptiveLayerLoss(
        model, losses.MultipleNegativesRankingLoss(model)
    ),
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_no_function_of_the_embeddings_is_refused(folder, text):
    ours = trainer(folder, REFUSED[text])
    with pytest.raises(ValueError, match=rf"compares the rows.*{text}"):
        adapter.BrimfulCallback(ours)


@pytest.mark.parametrize(
    ("loss", "text"), [(OfTokens, "token_embeddings"), (OfLengths, "of texts: ")]
)
def test_what_the_first_step_finds_is_refused(folder, loss, text):
    ours = trainer(folder, loss)
    in_pieces(ours)
    before = {name: value.clone() for name, value in values_of(ours.model).items()}
    with pytest.raises(ValueError, match=rf"{loss.__name__}.*{text}.*rows_are_independent=True"):
        ours.train()
    assert same(values_of(ours.model), before)


def test_texts_that_are_one_row_are_refused(folder):
    ours = trainer(folder, LOSSES["pairs"])
    in_pieces(ours)
    ours.model.train()
    inputs = dict(next(iter(ours.get_train_dataloader())))
    inputs["column 0_cu_seq_lens_q"] = torch.arange(8)
    with pytest.raises(ValueError, match=r"cu_seq_lens_q.*unpad_inputs = False"):
        ours.training_step(ours.model, inputs)


def ranks_job(rank, folder, gathers):
    under_torchrun(rank)

    def loss(model):
        return losses.MultipleNegativesRankingLoss(model, gather_across_devices=gathers)

    options = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}
    plain = trainer(folder, loss, **options)
    plain.train()
    memory = Memory(2, here=rank.index == 1)
    ours = trainer(folder, loss, memory, **options)
    callback = in_pieces(ours)
    ours.train()
    assert (memory.refusals > 0) == (rank.index == 1)
    assert callback.sizer.report().retries > 0
    assert same(values_of(ours.model), values_of(plain.model))
    assert callback.sizer.report().history[-1].pieces == (1, 2)[rank.index]
    for entry, other in zip(ours.state.log_history, plain.state.log_history, strict=True):
        if "grad_norm" in entry:
            assert entry["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
    return values_of(ours.model)


@pytest.mark.parametrize("gathers", [False, True])
def test_ranks_compare_their_own_rows_or_those_of_all(ranks, folder, gathers):
    first, second = ranks(ranks_job, folder, gathers)
    assert same(first, second)


def uneven_job(rank, folder):
    """Batches of other sizes: each rank's loss weighs the same, as under torch's class."""
    under_torchrun(rank)
    made = [trainer(folder, LOSSES["pairs"]) for _ in range(2)]
    batch = next(iter(made[0].get_train_dataloader()))
    rows = (8, 4)[rank.index]
    inputs = {n: v[:rows] if isinstance(v, torch.Tensor) else v for n, v in batch.items()}
    plain, ours = made
    plain.model.train()
    plain.compute_loss(plain.model, dict(inputs)).backward()
    in_pieces(ours, pieces=2)
    wrapped = torch.nn.parallel.DistributedDataParallel(ours.model.train())
    ours.create_optimizer()
    ours.compute_loss(wrapped, dict(inputs)).backward()
    for one, other in zip(ours.model.parameters(), plain.model.parameters(), strict=True):
        if other.grad is not None:
            torch.distributed.all_reduce(other.grad)
            assert torch.allclose(one.grad, other.grad / 2, atol=1e-6)
    return True


def test_ranks_weigh_the_same_whatever_their_rows(ranks, folder):
    assert all(ranks(uneven_job, folder))
