"""Model heads of transformers, made tiny from their configs, with rows that count unequally in a mean over labels."""

import tempfile

import torch
import transformers as tf

ROWS, LENGTH, WORDS, LABELS = 8, 12, 60, 5
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": WORDS,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TWO_SIDES = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
}
KEYS = {"num_key_value_heads": 2}
IMAGE = {**SMALL, "image_size": 16, "patch_size": 8, "num_channels": 3}
SOUND = {
    **SMALL,
    "conv_dim": (32, 32),
    "conv_stride": (5, 4),
    "conv_kernel": (10, 8),
    "num_feat_extract_layers": 2,
    "feat_extract_norm": "layer",
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_prob": 0.0,
}


def _lengths():
    return [3 + row for row in range(ROWS)]


def _text(**more):
    ids = torch.randint(5, WORDS, (ROWS, LENGTH))
    mask = torch.zeros(ROWS, LENGTH, dtype=torch.long)
    for row, length in enumerate(_lengths()):
        mask[row, :length] = 1
    return {"input_ids": torch.where(mask == 1, ids, 0), "attention_mask": mask, **more}


def _counted(high, mask):
    return torch.where(mask == 1, torch.randint(0, high, mask.shape), -100)


def tokens():
    text = _text()
    return {**text, "labels": _counted(LABELS, text["attention_mask"])}


def words():
    text = _text()
    return {**text, "labels": _counted(WORDS, text["attention_mask"])}


def masked_words():
    text = _text()
    some = text["attention_mask"] * (torch.rand(ROWS, LENGTH) < 0.5)
    some[:, 0] = 1
    return {**text, "labels": _counted(WORDS, some)}


def next_words():
    text = _text()
    return {**text, "labels": torch.where(text["attention_mask"] == 1, text["input_ids"], -100)}


def replaced():
    text = _text()
    return {**text, "labels": torch.randint(0, 2, (ROWS, LENGTH))}


def answers():
    """Of some rows the answer lies outside, and is ignored."""
    begins = torch.tensor([1, LENGTH + 5, 2, 0, LENGTH, 3, 1, LENGTH + 1])
    return _text(start_positions=begins, end_positions=begins + 1)


def classes():
    return _text(labels=torch.randint(0, LABELS, (ROWS,)))


def two_classes():
    return _text(labels=torch.randint(0, 2, (ROWS,)))


def several_labels():
    return _text(labels=torch.randint(0, 2, (ROWS, LABELS)).float())


def choices():
    text = {k: torch.stack([v, v.roll(1, 1)], 1) for k, v in _text().items()}
    return {**text, "labels": torch.randint(0, 2, (ROWS,))}


def closed_classes():
    """Each row ends once, as BART's head for sentences wants it."""
    batch = classes()
    batch["input_ids"] = torch.where(batch["input_ids"] == 2, 7, batch["input_ids"])
    for row, length in enumerate(_lengths()):
        batch["input_ids"][row, length - 1] = 2
    return batch


def _images():
    return torch.randn(ROWS, 3, 16, 16)


def images():
    return {"pixel_values": _images(), "labels": torch.randint(0, LABELS, (ROWS,))}


def masked_images():
    mask = torch.zeros(ROWS, 4, dtype=torch.bool)
    for row in range(ROWS):
        mask[row, : 1 + row % 3] = True
    return {"pixel_values": _images(), "bool_masked_pos": mask}


def plain_images():
    return {"pixel_values": _images()}


def segments():
    """Of each row another share is ignored."""
    labels = torch.randint(0, LABELS, (ROWS, 64, 64))
    for row in range(ROWS):
        labels[row, : 6 * row] = 255
    return {"pixel_values": torch.randn(ROWS, 3, 64, 64), "labels": labels}


def sounds():
    labels = torch.randint(3, WORDS, (ROWS, 4))
    for row in range(ROWS):
        labels[row, 1 + row % 4 :] = -100
    return {"input_values": torch.randn(ROWS, 1600), "labels": labels}


def sound_classes():
    return {
        "input_values": torch.randn(ROWS, 1600),
        "labels": torch.randint(0, LABELS, (ROWS,)),
    }


def spoken_words():
    labels = torch.randint(5, WORDS, (ROWS, 10))
    for row in range(ROWS):
        labels[row, 2 + row :] = -100
    return {"input_features": torch.randn(ROWS, 8, 60), "labels": labels}


def pairs():
    batch = _text(pixel_values=_images())
    return {**batch, "return_loss": True}


def without_dropout(config):
    for name, value in vars(config).items():
        if isinstance(value, float) and "drop" in name:
            setattr(config, name, 0.0)
    return config


def head(name, config, **settings):
    torch.manual_seed(1)
    made = without_dropout(config(**settings))
    for part in ("text_config", "vision_config"):
        if hasattr(made, part):
            without_dropout(getattr(made, part))
    net = getattr(tf, name)(made)
    if hasattr(net, "decode_head"):  # BatchNorm is no matter of the loss
        net.decode_head.batch_norm = torch.nn.Identity()
    return net


def trainer_of(folder, net, batch, **options):
    rows = [{k: v[i] for k, v in batch.items() if isinstance(v, torch.Tensor)} for i in range(ROWS)]
    rest = {k: v for k, v in batch.items() if not isinstance(v, torch.Tensor)}

    def collate(items):
        return {**{k: torch.stack([item[k] for item in items]) for k in items[0]}, **rest}

    arguments = tf.TrainingArguments(
        folder,
        per_device_train_batch_size=ROWS,
        per_device_eval_batch_size=ROWS,
        max_steps=1,
        learning_rate=1.0,
        optim="sgd",
        lr_scheduler_type="constant",
        max_grad_norm=0,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1,
        remove_unused_columns=False,
        **options,
    )
    return tf.Trainer(
        model=net, args=arguments, train_dataset=rows, eval_dataset=rows, data_collator=collate
    )


def trained(net, batch, callback_of=None, **options):
    """The change of one step of the Trainer, its loss, and the callback."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(folder, net, batch, **options)
        callback = None if callback_of is None else callback_of(trainer)
        if callback is not None:
            trainer.add_callback(callback)
        before = [p.detach().clone() for p in net.parameters()]
        torch.manual_seed(2)
        trainer.train()
        after = [p.detach() for p in net.parameters()]
        change = torch.cat([(a - b).flatten() for a, b in zip(after, before, strict=True)])
        loss = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    return change, loss, callback


HEADS = [
    ("BertForTokenClassification", tf.BertConfig, tokens, {"num_labels": LABELS}),
    ("BertForMaskedLM", tf.BertConfig, masked_words, {}),
    ("BertForQuestionAnswering", tf.BertConfig, answers, {}),
    ("BertForSequenceClassification", tf.BertConfig, classes, {"num_labels": LABELS}),
    (
        "BertForSequenceClassification",
        tf.BertConfig,
        several_labels,
        {"num_labels": LABELS, "problem_type": "multi_label_classification"},
    ),
    ("BertForMultipleChoice", tf.BertConfig, choices, {}),
    ("BertForNextSentencePrediction", tf.BertConfig, two_classes, {}),
    ("BertLMHeadModel", tf.BertConfig, next_words, {"is_decoder": True}),
    ("RobertaForMaskedLM", tf.RobertaConfig, masked_words, {}),
    ("RobertaForTokenClassification", tf.RobertaConfig, tokens, {"num_labels": LABELS}),
    ("DistilBertForQuestionAnswering", tf.DistilBertConfig, answers, {"dim": 32, "hidden_dim": 32}),
    ("ElectraForPreTraining", tf.ElectraConfig, replaced, {"embedding_size": 32}),
    ("AlbertForTokenClassification", tf.AlbertConfig, tokens, {"num_labels": LABELS}),
    ("DebertaV2ForMaskedLM", tf.DebertaV2Config, masked_words, {}),
    ("GPT2LMHeadModel", tf.GPT2Config, next_words, {}),
    ("GPT2ForSequenceClassification", tf.GPT2Config, classes, {"num_labels": LABELS}),
    ("GPT2ForTokenClassification", tf.GPT2Config, tokens, {"num_labels": LABELS}),
    ("LlamaForCausalLM", tf.LlamaConfig, next_words, {}),
    ("LlamaForTokenClassification", tf.LlamaConfig, tokens, {"num_labels": LABELS}),
    ("Qwen2ForSequenceClassification", tf.Qwen2Config, classes, {**KEYS, "num_labels": LABELS}),
    ("MixtralForCausalLM", tf.MixtralConfig, next_words, {**KEYS, "num_local_experts": 2}),
    ("MambaForCausalLM", tf.MambaConfig, next_words, {}),
    (
        "T5ForConditionalGeneration",
        tf.T5Config,
        words,
        {
            "d_model": 32,
            "d_kv": 16,
            "d_ff": 32,
            "num_layers": 1,
            "num_heads": 2,
            "decoder_start_token_id": 0,
        },
    ),
    (
        "BartForConditionalGeneration",
        tf.BartConfig,
        words,
        {**TWO_SIDES},
    ),
    (
        "BartForSequenceClassification",
        tf.BartConfig,
        closed_classes,
        {**TWO_SIDES, "num_labels": LABELS},
    ),
    (
        "WhisperForConditionalGeneration",
        tf.WhisperConfig,
        spoken_words,
        {
            **TWO_SIDES,
            "num_mel_bins": 8,
            "max_source_positions": 30,
            "decoder_start_token_id": 1,
        },
    ),
    ("ViTForImageClassification", tf.ViTConfig, images, {"num_labels": LABELS}),
    ("ViTForMaskedImageModeling", tf.ViTConfig, masked_images, {"encoder_stride": 8}),
    (
        "ViTMAEForPreTraining",
        tf.ViTMAEConfig,
        plain_images,
        {
            "decoder_hidden_size": 32,
            "decoder_num_hidden_layers": 1,
            "decoder_num_attention_heads": 2,
        },
    ),
    (
        "SegformerForSemanticSegmentation",
        tf.SegformerConfig,
        segments,
        {"num_labels": LABELS, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]},
    ),
    ("Wav2Vec2ForCTC", tf.Wav2Vec2Config, sounds, {"ctc_loss_reduction": "sum"}),
    ("Wav2Vec2ForCTC", tf.Wav2Vec2Config, sounds, {"ctc_loss_reduction": "mean"}),
    ("HubertForCTC", tf.HubertConfig, sounds, {}),
    ("Wav2Vec2ForSequenceClassification", tf.Wav2Vec2Config, sound_classes, {"num_labels": LABELS}),
    (
        "CLIPModel",
        tf.CLIPConfig,
        pairs,
        {"text_config": SMALL, "vision_config": IMAGE, "projection_dim": 8},
    ),
]


def settings_of(config, settings):
    name = config.__name__
    if "Wav2Vec2" in name or "Hubert" in name:
        return {**SOUND, **settings}
    if "ViT" in name:
        return {**IMAGE, **settings}
    return (
        settings
        if name in ("CLIPConfig", "SegformerConfig", "XLNetConfig")
        else {**SMALL, **settings}
    )
