"""How byte-level tokenizers split text before merges, by `tokenizer.ggml.pre` of a GGUF file.

Sources: names, and which of them share a pattern, are those of llama.cpp, src/llama-vocab.cpp. Where it approximates
the pattern of the model's own tokenizer.json (classes of letters, possessive quantifiers, digits by code), the pattern
is the model's, as llama.cpp's comments or the model's tokenizer state it. NFC is the normalizer of the model's own
tokenizer.json (transformers: Qwen2Tokenizer, GPTNeoXTokenizer, CohereTokenizer), which GGUF files do not state.
Not covered: names of encoders alone (jina-*, roberta-bpe, modern-bert, granite-embed-*, whitespace).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Split:
    """A way of splitting text before BPE: each pattern splits the pieces of the one before."""

    patterns: tuple[str, ...]
    add_bos: bool = False
    """Whether prompts begin with the start token if the file has no `add_bos_token`."""
    whole_words: bool = False
    """Whether a piece that is a token stays whole, even if merges do not lead to it."""
    compose: bool = False
    """Whether text is normalized to NFC."""


_SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BREAKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA3 = rf"{_SHORT}|{_WORD}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_BREAKS}"
_QWEN2 = rf"{_SHORT}|{_WORD}|\p{{N}}|{_SYMBOLS}|{_BREAKS}"
_QWEN35 = rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_BREAKS}"
_EXAONE_MOE = (
    rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"""
_CHINESE = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_CHINESE_KOREAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_LLM = (
    r"[\r\n]",
    # The model's list of the letters of scripts with cases, which is that of an older Unicode.
    r"\s?[\p{Lu}\p{Ll}\p{Lt}&&[^\u0560-\u0588\u10c6-\u10ff\u1c80-\u1c8a\u2d00-\u2d2f\ua78f-\ua7ff\uab30-\uab6f"
    r"\x{10570}-\x{105bf}\x{10d50}-\x{10d8f}\x{16e40}-\x{16e7f}\x{1d400}-\x{1d7ff}\x{1df00}-\x{1dfff}]]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _CHINESE_KOREAN,
    r"\p{N}",
)
_AFMOE_SCRIPTS = (
    "[\u0e40-\u0eff\u1000-\u109f\u1100-\u11ff\u1780-\u17ff\u2f00-\u2fdf\u3040-\u30ff\u3400-\u4dbf\u4e00-\ufaff"
    "\uff65-\uff9f]+"
)
_YOUTU_SCRIPTS = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f"
    f"\ufe30-\ufe4f]+|[\u3105-\u312f]+|{_CHINESE}"
)
_CHAMELEON = ("<sentinel:[0-9]+>", "IMGIMG[A-I]{1,4}Z", r"[\t\n]|    |  ", r"\p{N}", r"[\p{P}!-/:-@\[-`{-~]", _GPT2)
_JAIS_SPACES = "|".join(rf"\s{{{count}}}(?!\S)" for count in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2"))
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"


def _cases(end: str, numbers: str, symbols: str = r" ?[^\s\p{L}\p{N}]+[\r\n/]*", but: str = "") -> str:
    """Return the pattern of words that are split where a small letter precedes a capital, as in OpenAI's o200k_base.

    Args:
        end: what a word may end with, such as `_SHORT`.
        numbers: pattern.
        symbols: pattern.
        but: what a class of letters leaves out.
    """
    first = r"[^\r\n\p{L}\p{N}]?"
    upper, lower = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]", rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]"
    return rf"{first}{upper}*{lower}+{end}|{first}{upper}+{lower}*{end}|{numbers}|{symbols}|{_BREAKS}"


_O200K = _cases(f"{_SHORT}?", r"\p{N}{1,3}")
_KIMI_K2 = r"\p{Han}+|" + _cases(f"{_SHORT}?", r"\p{N}{1,3}", _SYMBOLS, but=r"&&[^\p{Han}]")

_ROWS = (
    ("gpt-2 phi-2 gigachat a.x-4.0 mellum exaone4 jais trillion granite-docling", Split((_GPT2,))),
    ("olmo mpt", Split((_GPT2,), compose=True)),
    ("smollm starcoder refact codeshell exaone minerva-7b mellum2", Split((r"\p{N}", _GPT2))),
    ("command-r", Split((r"\p{N}", _GPT2), compose=True)),
    (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
        Split((_LLAMA3,), add_bos=True, whole_words=True),
    ),
    ("smaug-bpe dbrx chatglm-bpe", Split((_LLAMA3,))),
    ("glm4 glm5", Split((_LLAMA3,), whole_words=True)),
    ("minicpm5", Split((r"\p{N}{1,3}", _LLAMA3), whole_words=True)),
    ("jais-2", Split((_LLAMA3.removesuffix(r"\s+(?!\S)|\s+") + _JAIS_SPACES + r"|\s",))),
    ("qwen2 deepseek-r1-qwen stablelm2 hunyuan megrez kormo f2llmv2", Split((_QWEN2,), compose=True)),
    ("grok-2 solar-open bailingmoe bailingmoe2 llada-moe", Split((_QWEN2,))),
    ("qwen35", Split((_QWEN35,), compose=True)),
    ("ufakzeka", Split((_QWEN2.removeprefix(f"{_SHORT}|"),))),
    ("laguna", Split((r"[^\n]+|\n+", _QWEN2))),
    ("seed-coder", Split((rf"{_SHORT}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_BREAKS}",))),
    ("exaone-moe", Split((_EXAONE_MOE,))),
    ("deepseek-v3 joyai-llm hunyuan-dense hy_v4", Split((r"\p{N}{1,3}", _CHINESE, rf"{_DEEPSEEK3}[\r\n]*|{_BREAKS}"))),
    ("spark2_5", Split((r"\p{N}{1,3}", _CHINESE, rf"{_DEEPSEEK3}|[\r\n]|\s+(?!\S)|\s+", r"\p{N}"))),
    ("afmoe", Split((r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", _AFMOE_SCRIPTS, rf"{_DEEPSEEK3}[\r\n]*|{_BREAKS}"))),
    ("deepseek-llm", Split(_DEEPSEEK_LLM)),
    ("deepseek-coder", Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CHINESE_KOREAN, r"\p{N}"))),
    ("gpt-4o kanana2 talkie minimax-m2", Split((_O200K,))),
    ("llama4", Split((_O200K,), whole_words=True)),
    ("tekken", Split((_cases("", r"\p{N}"),), add_bos=True, whole_words=True)),
    ("tiny_aya cohere2moe", Split((r"\d{1,3}(?=(?:\d{3})*\b)", _O200K), compose=True)),
    ("kimi-k2", Split((_KIMI_K2,), whole_words=True)),
    ("youtu", Split((_YOUTU_SCRIPTS, _cases(f"{_SHORT}?", r"\p{N}")), whole_words=True)),
    ("superbpe", Split((r"\p{N}+", r"(?=(\d{3})+(?!\d))"))),
    ("falcon", Split((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"))),
    ("chameleon", Split(_CHAMELEON, add_bos=True)),
    ("bloom poro-chat gpt3-finnish", Split((_BLOOM,))),
    ("viking", Split((_BLOOM, r"\p{N}"))),
    # What llama.cpp uses for files of before May 2024, which do not name a way of splitting.
    ("default", Split((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))),
)
SPLITS = {name: split for names, split in _ROWS for name in names.split()}
"""Way of splitting by name. The first name of a way is the one that `export` writes."""
