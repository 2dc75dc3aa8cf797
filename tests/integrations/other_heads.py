"""Ten heads of transformers that nothing was written for: chosen when the rules were done, and apart from those."""

import torch
import transformers as tf
from model_heads import (
    IMAGE,
    LABELS,
    LENGTH,
    ROWS,
    SOUND,
    TWO_SIDES,
    answers,
    images,
    masked_words,
    next_words,
    sound_classes,
    tokens,
    two_classes,
    words,
)


def boxed_tokens():
    return {**tokens(), "bbox": torch.randint(0, 30, (ROWS, LENGTH, 4)).sort(-1).values}


def spectrograms():
    return {
        "input_values": torch.randn(ROWS, 24, 16),
        "labels": torch.randint(0, LABELS, (ROWS,)),
    }


def words_and_order():
    """Two losses in one: a mean over labels, and one over rows."""
    batch = masked_words()
    return {**batch, "next_sentence_label": two_classes()["labels"]}


ENCODER = {"d_model": 32, "n_layer": 1, "n_head": 2, "d_inner": 32, "vocab_size": 60}
HEADS = [
    ("XLNetForQuestionAnsweringSimple", tf.XLNetConfig, answers, ENCODER),
    ("MarianMTModel", tf.MarianConfig, words, {**TWO_SIDES, "decoder_start_token_id": 0}),
    ("PegasusForConditionalGeneration", tf.PegasusConfig, words, TWO_SIDES),
    (
        "MobileBertForMaskedLM",
        tf.MobileBertConfig,
        masked_words,
        {"embedding_size": 32, "intra_bottleneck_size": 32, "normalization_type": "layer_norm"},
    ),
    ("DeiTForImageClassification", tf.DeiTConfig, images, {**IMAGE, "num_labels": LABELS}),
    (
        "ASTForAudioClassification",
        tf.ASTConfig,
        spectrograms,
        {"max_length": 24, "num_mel_bins": 16, "patch_size": 8, "num_labels": LABELS},
    ),
    (
        "WavLMForXVector",
        tf.WavLMConfig,
        sound_classes,
        {
            **SOUND,
            "num_labels": LABELS,
            "tdnn_dim": (32, 32),
            "tdnn_kernel": (3, 3),
            "tdnn_dilation": (1, 1),
            "xvector_output_dim": 16,
        },
    ),
    ("LayoutLMForTokenClassification", tf.LayoutLMConfig, boxed_tokens, {"num_labels": LABELS}),
    (
        "OPTForCausalLM",
        tf.OPTConfig,
        next_words,
        {"ffn_dim": 32, "word_embed_proj_dim": 32},
    ),
    ("ErnieForPreTraining", tf.ErnieConfig, words_and_order, {}),
]
