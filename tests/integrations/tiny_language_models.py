"""A tokenizer and models that are made here, for tests that would else download them."""

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

WORDS = [f"w{number}" for number in range(60)]


def tokenizer():
    names = ["<pad>", "<eos>", "<unk>", *WORDS]
    words = Tokenizer(models.WordLevel({n: k for k, n in enumerate(names)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def causal_model(hidden=32, layers=2, vocabulary=64):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        vocab_size=vocabulary,
        num_hidden_layers=layers,
        num_attention_heads=2,
        max_position_embeddings=128,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=1,
    )
    return transformers.LlamaForCausalLM(config)


def texts(rows, longest=24):
    generator = torch.Generator().manual_seed(5)
    found = []
    for _ in range(rows):
        length = int(torch.randint(4, longest, (), generator=generator))
        picked = torch.randint(0, len(WORDS), (length,), generator=generator)
        found.append(" ".join(WORDS[int(k)] for k in picked))
    return found


def losses():
    from sentence_transformers.sentence_transformer import losses

    return losses


def save_bert(folder):
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=64,
        attention_probs_dropout_prob=0.0,
        hidden_dropout_prob=0.0,
    )
    transformers.BertModel(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def sentence_model(folder, hook=None):
    """Embeds texts by what lies in the folder. The hook runs before it."""
    import sentence_transformers
    from sentence_transformers.sentence_transformer import modules

    words = modules.Transformer(folder)
    if hook is not None:
        words.register_forward_pre_hook(hook)
    pooling = modules.Pooling(words.get_embedding_dimension())
    return sentence_transformers.SentenceTransformer(modules=[words, pooling], device="cpu")
