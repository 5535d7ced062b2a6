"""Configuration of a training run. Its fields are the flags of `nanoinfer train`."""

from __future__ import annotations

from dataclasses import dataclass

from nanoinfer.errors import NanoinferError
from nanoinfer.utils.checks import require_bool, require_choice, require_float, require_int, show


@dataclass(frozen=True)
class TrainConfig:
    """A training run. Defaults are nanoGPT's for character-level Shakespeare on a CPU.

    Raises:
        NanoinferError: a field is out of range (named).
    """

    data: tuple[str, ...]
    """UTF-8 text file to train on; may be given several times."""
    out: str
    """Folder for the model, written in the Hugging Face layout."""
    init: str = "scratch"
    """scratch, or a model whose weights and tokenizer to start from."""
    distill: str | None = None
    """Target model: train on its probabilities, on the data and on sequences that it generates."""
    distill_tokens: int = 1_000_000
    """Tokens that the target model generates, half of them greedily."""
    draft_head: str | None = None
    """Target model: train a draft head for it, on the data and on sequences that it generates."""
    head_hidden: int = 1024
    """Width of a draft head's hidden layer."""
    tokenizer: str = "char"
    """char, bpe (a new byte-level BPE) or a model's; init, distill and draft_head use that of their model."""
    vocab_size: int = 2048
    """Vocabulary size of a new byte-level BPE."""
    n_layer: int = 4
    """Number of transformer blocks."""
    n_head: int = 4
    """Attention heads per block."""
    n_embd: int = 128
    """Width of the residual stream."""
    block_size: int = 64
    """Context length; with init, at most that of the model."""
    bias: bool = True
    """Whether linear layers and layer norms have biases."""
    dropout: float = 0.0
    """Dropout probability of embeddings and residuals."""
    batch_size: int = 12
    """Windows of block_size tokens per step."""
    max_steps: int = 2000
    """Number of training steps."""
    learning_rate: float = 1e-3
    """Peak learning rate."""
    min_learning_rate: float = 1e-4
    """Learning rate at the end of the cosine schedule."""
    warmup_steps: int = 100
    """Steps of linear warmup."""
    weight_decay: float = 0.1
    """Weight decay of matrices and embeddings; biases and norms have none."""
    beta1: float = 0.9
    """Adam's first-moment decay."""
    beta2: float = 0.99
    """Adam's second-moment decay."""
    grad_clip: float = 1.0
    """Maximum norm of the gradient."""
    eval_interval: int = 250
    """Steps between validations; each saves the state for --resume."""
    eval_tokens: int = 200_000
    """Validation tokens scored each time, spread evenly over the held-out text."""
    val_fraction: float = 0.1
    """Fraction of the text, at its end, held out for validation."""
    seed: int = 1337
    """Seed of weights, batches and dropout."""
    device: str = "auto"
    """cpu, cuda, cuda:N, or auto (cuda if available)."""
    autocast: str = "float32"
    """Dtype of matrix products in training: float32 or bfloat16. Weights stay float32."""
    save_dtype: str = "float32"
    """Dtype of the weights on disk: float32, bfloat16 or float16."""

    def __post_init__(self) -> None:
        if not isinstance(self.data, (tuple, list)):
            raise NanoinferError(f"data={show(self.data)} is not a tuple of text files")
        if not self.data:
            raise NanoinferError("data is empty: give at least one text file")
        ints = "distill_tokens head_hidden n_layer n_head n_embd block_size batch_size max_steps eval_interval"
        for name in (*ints.split(), "eval_tokens"):
            require_int(name, getattr(self, name), 1, 2**31 - 1)
        if self.draft_head is not None and (self.distill is not None or self.init != "scratch"):
            raise NanoinferError(f"draft_head={self.draft_head!r} trains a head from scratch: remove distill and init")
        require_int("vocab_size", self.vocab_size, 256, 1 << 20)
        require_int("warmup_steps", self.warmup_steps, 0, 2**31 - 1)
        require_int("seed", self.seed, 0, 2**31 - 1)
        require_bool("bias", self.bias)
        require_float("dropout", self.dropout, 0.0, 1.0, high_open=True)
        require_float("val_fraction", self.val_fraction, 0.0, 1.0, low_open=True, high_open=True)
        require_float("learning_rate", self.learning_rate, 0.0, 1e3, low_open=True)
        require_float("min_learning_rate", self.min_learning_rate, 0.0, self.learning_rate)
        require_float("weight_decay", self.weight_decay, 0.0, 1e3)
        require_float("grad_clip", self.grad_clip, 0.0, 1e6, low_open=True)
        for name in ("beta1", "beta2"):
            require_float(name, getattr(self, name), 0.0, 1.0, high_open=True)
        require_choice("autocast", self.autocast, ("float32", "bfloat16"))
        require_choice("save_dtype", self.save_dtype, ("float32", "bfloat16", "float16"))
