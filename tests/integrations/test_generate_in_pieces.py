"""generate where memory runs out: inputs, callbacks and results of transformers, in pieces as for the whole batch."""

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
adapter = pytest.importorskip("brimful.integrations.transformers")
tiny = pytest.importorskip("tiny_language_models")

ROWS, FIT = 8, 3
SIZES = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
}
SETTINGS = {"max_new_tokens": 8, "do_sample": False}


class Limited:
    """Memory for so many rows of a forward."""

    def __init__(self, model, rows=FIT, error=None):
        self.rows, self.refused = rows, []
        self.error = error or torch.OutOfMemoryError("planted")
        model = model.get_base_model() if hasattr(model, "get_base_model") else model
        model.register_forward_pre_hook(self.check, with_kwargs=True)

    def check(self, _, args, kwargs):
        entries = [*args, *kwargs.values()]
        sizes = [len(entry) for entry in entries if isinstance(entry, torch.Tensor) and entry.dim()]
        if max(sizes, default=0) > self.rows:
            self.refused.append(max(sizes))
            raise self.error


def llama(**settings):
    model = tiny.causal_model().eval()
    model.generation_config.update(**settings)
    return model


def prompts(rows=ROWS):
    generator = torch.Generator().manual_seed(3)
    return torch.randint(2, 64, (rows, 6), generator=generator)


def whole_and_pieces(model, call, rows=FIT):
    """What the call gives with room, and in pieces, twice: later calls begin with them."""
    torch.manual_seed(1)
    expected = call(model)
    adapter.generate_in_pieces(model)
    memory = Limited(model, rows)
    torch.manual_seed(1)
    found = call(model)
    assert memory.refused
    return expected, found, memory


def assert_same_in_pieces(model, call, rows=FIT):
    expected, found, memory = whole_and_pieces(model, call, rows)
    assert torch.equal(found, expected)
    whole = max(memory.refused)
    memory.refused.clear()
    assert torch.equal(call(model), expected)
    assert whole not in memory.refused


def whisper():
    torch.manual_seed(0)
    config = transformers.WhisperConfig(
        vocab_size=40,
        num_mel_bins=4,
        max_source_positions=50,
        max_target_positions=40,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        **SIZES,
    )
    model = transformers.WhisperForConditionalGeneration(config).eval()
    model.generation_config.update(pad_token_id=0, eos_token_id=2, decoder_start_token_id=1)
    return model


def sounds(rows=ROWS):
    return torch.randn(rows, 4, 100, generator=torch.Generator().manual_seed(2))


def bart():
    torch.manual_seed(0)
    config = transformers.BartConfig(
        vocab_size=40, pad_token_id=0, bos_token_id=1, eos_token_id=2, **SIZES
    )
    config.decoder_start_token_id = 2
    return transformers.BartForConditionalGeneration(config).eval()


def image_to_text():
    torch.manual_seed(0)
    vision = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        image_size=8,
        patch_size=4,
    )
    text = transformers.GPT2Config(
        vocab_size=40,
        n_positions=32,
        n_embd=16,
        n_layer=1,
        n_head=2,
        add_cross_attention=True,
        is_decoder=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = transformers.VisionEncoderDecoderModel(
        transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(vision, text)
    ).eval()
    model.generation_config.update(pad_token_id=0, eos_token_id=2, decoder_start_token_id=1)
    return model


def of_whisper(model):
    return model.generate(input_features=sounds(), **SETTINGS)


def of_whisper_by_position(model):
    return model.generate(sounds(), **SETTINGS)


def of_images(model):
    images = torch.randn(ROWS, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    return model.generate(pixel_values=images, **SETTINGS)


def of_embeddings(model):
    embeddings = model.get_input_embeddings()(prompts())
    return model.generate(inputs_embeds=embeddings, **SETTINGS)


def of_encoder_outputs(model):
    tokens = prompts() % 40
    mask = torch.ones_like(tokens)
    encoded = model.get_encoder()(input_ids=tokens, attention_mask=mask)
    return model.generate(encoder_outputs=encoded, attention_mask=mask, **SETTINGS)


def of_decoder_inputs(model):
    tokens = prompts() % 40
    begun = torch.cat([torch.full((ROWS, 1), 2), tokens[:, :2]], 1)
    return model.generate(tokens, decoder_input_ids=begun, **SETTINGS)


def adapted():
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(
        llama(), peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    ).eval()


def of_prompts(model):
    return model.generate(prompts(), **SETTINGS)


@pytest.mark.parametrize(
    ("make", "call"),
    [
        (adapted, of_prompts),
        (whisper, of_whisper),
        (whisper, of_whisper_by_position),
        (image_to_text, of_images),
        (llama, of_embeddings),
        (bart, of_encoder_outputs),
        (bart, of_decoder_inputs),
    ],
)
def test_whatever_has_the_rows_is_cut(make, call):
    assert_same_in_pieces(make(), call)


def test_what_all_rows_share_is_not_cut_though_it_is_as_long():
    """Two rows, and two tokens that end them."""
    model, tokens = llama(), prompts(2)
    first = model.generate(tokens, **SETTINGS)[0]
    ends = [int(first[10]), int(first[9])]
    for end in (ends, torch.tensor(ends)):
        assert_same_in_pieces(
            llama(), lambda m, end=end: m.generate(tokens, eos_token_id=end, **SETTINGS), 1
        )


@pytest.mark.parametrize("beams", [2, 3])
def test_beams_are_padded_as_those_of_the_whole_batch(beams):
    """A beam search fills with the end where the padding is token 0."""
    tokens = prompts(4)

    def call(model):
        return model.generate(tokens, num_beams=beams, **SETTINGS)

    first, widths = call(llama()), set()
    for end in first[:, 8].unique().tolist():
        expected, found, _ = whole_and_pieces(llama(eos_token_id=end), call, beams)
        assert torch.equal(found, expected)
        widths |= {int((row[6:] == end).nonzero()[0]) for row in expected if end in row[6:]}
    assert len(widths) > 1


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"num_beams": 2},
        {"do_sample": True, "num_return_sequences": 3},
    ],
)
def test_a_constraint_gets_the_numbers_of_the_batchs_rows(more):
    tokens, each = prompts(), more.get("num_return_sequences", 1)
    allowed = [list(range(6 * row + 2, 6 * row + 7)) for row in range(ROWS)]
    seen = set()

    def constraint(row, _):
        seen.add(row)
        return allowed[row]

    def call(model):
        return model.generate(tokens, prefix_allowed_tokens_fn=constraint, **{**SETTINGS, **more})

    width = FIT * max(each, more.get("num_beams", 1))
    expected, found, _ = whole_and_pieces(llama(eos_token_id=None), call, width)
    assert seen == set(range(ROWS))
    for number, row in enumerate(found[:, 6:].tolist()):
        assert set(row) <= set(allowed[number // each])
    if not more.get("do_sample"):
        assert torch.equal(found, expected)


class CountsTokens(transformers.LogitsProcessor):
    """Another token each time that it is called."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        scores = scores.clone()
        scores[:, 5 + self.calls] += 100
        return scores


class OfRow(transformers.LogitsProcessor):
    def __init__(self, forced):
        self.forced = forced

    def __call__(self, input_ids, scores):
        for row, token in enumerate(self.forced):
            scores[row, token] += 100
        return scores


class OfSomeRows(OfRow):
    def of_rows(self, begin, end):
        return OfSomeRows(self.forced[begin:end])


def with_processor(make):
    """A new one each time, as a program that keeps a state in it has to have."""
    tokens = prompts()
    return lambda model: model.generate(tokens, logits_processor=[make()], **SETTINGS)


kinds = transformers.generation.logits_process
PROCESSORS = {
    "counts": CountsTokens,
    "says": lambda: OfSomeRows(list(range(2, 2 + ROWS))),
    "constraint": lambda: kinds.PrefixConstrainedLogitsProcessor(
        lambda row, _: [row + 2, row + 20], 1
    ),
    "encoder": lambda: kinds.EncoderRepetitionPenaltyLogitsProcessor(0.01, prompts()),
    "no_repeat": lambda: kinds.EncoderNoRepeatNGramLogitsProcessor(1, prompts()),
    "penalty": lambda: kinds.RepetitionPenaltyLogitsProcessor(9.0, torch.arange(ROWS) % 5),
    "watermark": lambda: kinds.SynthIDTextWatermarkLogitsProcessor(
        5, [654, 400, 836], 64, 0, 8, "cpu"
    ),
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_logits_processors_act_on_the_rows_that_they_would_have_acted_on(name):
    assert_same_in_pieces(llama(eos_token_id=None), with_processor(PROCESSORS[name]))


def test_guidance_by_other_prompts_is_cut_with_the_rows():
    negative = prompts().flip(0)

    def call(model):
        return model.generate(
            prompts(), negative_prompt_ids=negative, guidance_scale=2.0, **SETTINGS
        )

    assert_same_in_pieces(llama(eos_token_id=None), call)


def test_a_processor_with_an_entry_for_each_row_is_refused_with_a_remedy():
    call = with_processor(lambda: OfRow(list(range(2, 2 + ROWS))))
    with pytest.raises(ValueError, match=rf"OfRow.forced: {ROWS}.*of_rows\(begin, end\)"):
        whole_and_pieces(llama(), call)


class Cannot(transformers.LogitsProcessor):
    def __deepcopy__(self, memo):
        raise TypeError("planted")

    def __call__(self, input_ids, scores):
        return scores


def test_a_processor_that_cannot_be_copied_is_refused_with_a_remedy():
    with pytest.raises(ValueError, match=r"Cannot: TypeError\('planted'\).*of_rows"):
        whole_and_pieces(llama(), with_processor(Cannot))


class EndsRows(transformers.StoppingCriteria):
    """Each row at another length."""

    def __call__(self, input_ids, scores, **_):
        return torch.tensor([int(row[0]) % 4 + 9 <= len(row) for row in input_ids])


class EndsAll(transformers.StoppingCriteria):
    def __call__(self, input_ids, scores, **_):
        return input_ids.shape[1] > 9


def test_criteria_end_rows_and_not_pieces():
    def ended(criterion):
        return lambda model: model.generate(prompts(), stopping_criteria=[criterion], **SETTINGS)

    assert_same_in_pieces(llama(eos_token_id=63), ended(EndsRows()))
    with pytest.raises(ValueError, match=r"criterion: EndsAll\); return a tensor"):
        whole_and_pieces(llama(), ended(EndsAll()))


def test_what_cannot_be_cut_is_refused_and_runs_whole_where_it_fits():
    model, tokens = llama(eos_token_id=None), prompts()
    adapter.generate_in_pieces(model)
    memory = Limited(model)
    streamed = []

    class Streamer:
        def put(self, value):
            streamed.append(value)

        def end(self):
            pass

    scores = {"return_dict_in_generate": True, "output_scores": True}
    for named, text in (
        ({"streamer": Streamer()}, "streamer: Streamer"),
        ({"past_key_values": transformers.DynamicCache()}, "past_key_values: DynamicCache"),
        ({"synced_gpus": True}, "synced_gpus: True"),
        (scores, r"output_scores: True\); leave it out"),
        ({"position_ids": torch.zeros(3, 6, dtype=torch.long)}, r"position_ids: \(3, 6\), rows: 8"),
    ):
        with pytest.raises(ValueError, match=f"memory ran out.*{text}"):
            model.generate(tokens, **named, **SETTINGS)
    assert memory.refused
    streamed.clear()
    few = model.generate(tokens[:1], streamer=Streamer(), **SETTINGS)
    assert len(streamed) == 1 + SETTINGS["max_new_tokens"]
    memory.rows = ROWS
    found = model.generate(tokens, **scores, **SETTINGS)
    assert len(found.scores) == SETTINGS["max_new_tokens"]
    assert torch.equal(found.sequences[:1], few)


@pytest.mark.parametrize("beams", [1, 2])
def test_a_result_that_is_a_dict_is_one_of_all_rows(beams):
    tokens = prompts()

    def call(model):
        more = {"num_beams": beams, "output_scores": False, "return_dict_in_generate": True}
        return model.generate(tokens, **more, **SETTINGS)

    end = int(llama().generate(tokens, num_beams=beams, **SETTINGS)[2, 9])
    expected, found, _ = whole_and_pieces(llama(eos_token_id=end), call, FIT * beams)
    assert type(found) is type(expected)
    assert torch.equal(found.sequences, expected.sequences)
    assert found.get("past_key_values", found.get("cache")) is None
    if beams > 1:
        assert torch.equal(found.beam_indices, expected.beam_indices)


def test_segments_and_times_of_whisper_are_those_of_all_rows():
    def call(model):
        model.generation_config.alignment_heads = [[0, 0], [0, 1]]
        return model.generate(sounds(), return_token_timestamps=True, **SETTINGS)

    expected, found, _ = whole_and_pieces(whisper(), call)
    assert torch.equal(found["sequences"], expected["sequences"])
    torch.testing.assert_close(found["token_timestamps"], expected["token_timestamps"])


def spoken(count, labelled):
    generator = torch.Generator().manual_seed(7)
    found = []
    for number, sound in enumerate(sounds(count)):
        row = {"input_features": sound}
        if labelled:
            labels = torch.randint(3, 40, (6,), generator=generator)
            labels[2 + number % 5 :] = -100
            row["labels"] = labels
        found.append(row)
    return found


def seq2seq_trainer(folder, **more):
    arguments = transformers.Seq2SeqTrainingArguments(
        output_dir=folder,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        per_device_eval_batch_size=ROWS,
        predict_with_generate=True,
        remove_unused_columns=False,
        **{"generation_max_length": 10, **more},
    )
    return transformers.Seq2SeqTrainer(model=whisper(), args=arguments)


@pytest.mark.parametrize("labelled", [True, False])
@pytest.mark.parametrize("longest", [10, 30])
def test_a_trainer_that_generates_predicts_and_evaluates_in_pieces(tmp_path, labelled, longest):
    data = spoken(11, labelled)
    plain = seq2seq_trainer(str(tmp_path), generation_max_length=longest)
    expected = plain.predict(data)
    ours = seq2seq_trainer(str(tmp_path), generation_max_length=longest)
    adapter.BrimfulCallback(ours)
    memory = Limited(ours.model)
    found = ours.predict(data)
    assert memory.refused
    assert found.predictions.tolist() == expected.predictions.tolist()
    assert ("test_loss" in found.metrics) == labelled
    if labelled:
        assert found.label_ids.tolist() == expected.label_ids.tolist()
        assert found.metrics["test_loss"] == pytest.approx(expected.metrics["test_loss"])
        losses = [run.evaluate(data)["eval_loss"] for run in (plain, ours)]
        assert losses[0] == pytest.approx(losses[1])


def test_a_model_that_the_trainer_makes_itself_generates_in_pieces(tmp_path):
    made = []

    def make(_=None):
        made.append(llama())
        return made[-1]

    rows = [{"input_ids": row, "labels": row} for row in prompts()]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to=[], max_steps=1, save_strategy="no"
    )
    run = transformers.Trainer(model_init=make, args=arguments, train_dataset=rows)
    run.add_callback(adapter.BrimfulCallback(run))
    run.train()
    assert len(made) > 1 and hasattr(run.model.generate, "_whole")


@pytest.mark.parametrize(
    "error",
    [RuntimeError("CUDA error: out of memory"), RuntimeError("CUBLAS_STATUS_ALLOC_FAILED")],
    ids=str,
)
def test_a_shortage_that_has_lost_its_type_is_one(error):
    model = llama(eos_token_id=None)
    expected = model.generate(prompts(), **SETTINGS)
    adapter.generate_in_pieces(model)
    memory = Limited(model, error=error)
    assert torch.equal(model.generate(prompts(), **SETTINGS), expected)
    assert memory.refused
