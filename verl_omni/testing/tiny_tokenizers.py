"""Tokenizers for the tiny models: they know some whole words and spell out the rest.

So other prompts give other ids, and longer prompts give longer sequences. Nothing is trained: the merges are written
down, which gives the same files on every machine. The chat template that Qwen-Image puts before a prompt has 34 tokens,
as with the real tokenizer.
"""

from collections.abc import Iterable

from tokenizers.pre_tokenizers import ByteLevel
from transformers import CLIPTokenizer, Qwen2Tokenizer, T5Tokenizer

# Every word of Qwen-Image's chat template, so that it has one token a word, and some that prompts are likely to use.
WORDS = """the image by detailing color shape size texture quantity text spatial relationships of objects and background
a an in on at with under over next to red green blue yellow black white orange purple small large round square circle
triangle cat dog bird fox boat house tree river mountain lamp clock sign that says photo painting drawing night morning
light snow rain paper glass wooden quiet bright blurry""".split()
TEMPLATE_WORDS = ["system", "user", "assistant", "Describe"]
QWEN_SPECIAL = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|image_pad|>", "<|video_pad|>"),
]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def qwen_tokenizer() -> Qwen2Tokenizer:
    """Byte-level BPE with Qwen's special tokens and a plain chat template."""
    # Earlier merges win: words after a space (Ġ) and those of the template must not be broken by the merges of others.
    words = [f"Ġ{w}" for w in WORDS] + TEMPLATE_WORDS + WORDS
    vocab, merges = _bpe(QWEN_SPECIAL, sorted(ByteLevel.alphabet()), [list(w) for w in words])
    return Qwen2Tokenizer(
        vocab=vocab,
        merges=merges,
        eos_token="<|im_end|>",
        additional_special_tokens=QWEN_SPECIAL[1:],
        chat_template=CHAT_TEMPLATE,
        model_max_length=4096,
    )


def clip_tokenizer() -> CLIPTokenizer:
    """Byte-level BPE, lower case, at most 77 tokens with start and end."""
    letters = sorted(ByteLevel.alphabet())
    alphabet = letters + [f"{c}</w>" for c in letters]  # CLIP marks the last letter of a word
    words = [[*w[:-1], f"{w[-1]}</w>"] for w in WORDS]
    vocab, merges = _bpe(["<|startoftext|>", "<|endoftext|>"], alphabet, words)
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=77)


def t5_tokenizer() -> T5Tokenizer:
    """Unigram: the words, and the printable ASCII characters to spell others. Anything else is `<unk>`, as in T5."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    pieces += [(chr(c), -8.0) for c in range(ord("!"), ord("~") + 1)]
    pieces += [(f"▁{w}", -4.0) for w in WORDS]
    return T5Tokenizer(vocab=pieces, model_max_length=512)


def _bpe(
    special: list[str], alphabet: list[str], words: Iterable[list[str]]
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges in which each word, given as its letters, is one token that grows letter by letter."""
    tokens = dict.fromkeys([*special, *alphabet])
    merges: dict[tuple[str, str], None] = {}
    for first, *rest in words:
        for letter in rest:
            merges[first, letter] = None
            first += letter
            tokens[first] = None
    return {token: i for i, token in enumerate(tokens)}, list(merges)
