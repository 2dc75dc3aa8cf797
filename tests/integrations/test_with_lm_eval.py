"""lm-evaluation-harness: the same answers where memory is for fewer requests than a batch."""

import pytest
import torch

pytest.importorskip("lm_eval")
adapter = pytest.importorskip("brimful.integrations.lm_eval")
HFLM = pytest.importorskip("lm_eval.models.huggingface").HFLM
Instance = pytest.importorskip("lm_eval.api.instance").Instance
tiny = pytest.importorskip("tiny_language_models")
Limited = pytest.importorskip("test_evaluation_in_pieces").Limited


def requests_of(kind, arguments):
    return [Instance(kind, {}, given, number) for number, given in enumerate(arguments)]


def language_model(made_by, **options):
    model = tiny.causal_model().eval()
    lm = made_by(pretrained=model, tokenizer=tiny.tokenizer(), device="cpu", **options)
    return lm, model


@pytest.mark.parametrize("kind", ["loglikelihood", "generate_until"])
def test_requests_that_do_not_fit_together_are_answered_in_smaller_groups(kind):
    prompts = tiny.texts(11)
    second = (
        [" w1 w2", " w3"] if kind == "loglikelihood" else [{"until": ["w7"], "max_gen_toks": 6}]
    )
    given = [(prompt, other) for prompt in prompts for other in second]
    plain, model = language_model(HFLM, batch_size=8)
    expected = getattr(plain, kind)(requests_of(kind, given), disable_tqdm=True)
    with pytest.raises(torch.OutOfMemoryError):
        Limited(model, 3)
        getattr(plain, kind)(requests_of(kind, given), disable_tqdm=True)
    ours, model = language_model(adapter.BrimfulLM, max_batch_size=8)
    memory = Limited(model, 3)
    found = getattr(ours, kind)(requests_of(kind, given), disable_tqdm=True)
    assert memory.refusals > 0
    if kind == "generate_until":
        assert found == expected
    else:
        assert [answer for _, answer in found] == [answer for _, answer in expected]
        assert [value for value, _ in found] == pytest.approx([value for value, _ in expected])
