"""Configuration of a training run. Its fields are the flags of `nanoinfer train`."""

from __future__ import annotations

from dataclasses import dataclass

from nanoinfer.errors import NanoinferError, show
from nanoinfer.utils.checks import bounded, chosen, keep_fields, require_float

MAX_INT = 2**31 - 1


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
    distill_tokens: int = bounded(1_000_000, 1, MAX_INT)
    """Tokens that the target model generates, half of them greedily."""
    tokenizer: str = "char"
    """char, bpe (a new byte-level BPE) or a model's; init and distill use that of their model."""
    vocab_size: int = bounded(2048, 256, 1 << 20)
    """Vocabulary size of a new byte-level BPE."""
    n_layer: int = bounded(4, 1, MAX_INT)
    """Number of transformer blocks."""
    n_head: int = bounded(4, 1, MAX_INT)
    """Attention heads per block."""
    n_embd: int = bounded(128, 1, MAX_INT)
    """Width of the residual stream."""
    block_size: int = bounded(64, 1, MAX_INT)
    """Context length; with init, at most that of the model."""
    bias: bool = True
    """Whether linear layers and layer norms have biases."""
    dropout: float = 0.0
    """Dropout probability of embeddings and residuals."""
    batch_size: int = bounded(12, 1, MAX_INT)
    """Windows of block_size tokens per step."""
    max_steps: int = bounded(2000, 1, MAX_INT)
    """Number of training steps."""
    learning_rate: float = bounded(1e-3, 0.0, 1e3, low_open=True)
    """Peak learning rate."""
    min_learning_rate: float = 1e-4
    """Learning rate at the end of the cosine schedule."""
    warmup_steps: int = bounded(100, 0, MAX_INT)
    """Steps of linear warmup."""
    weight_decay: float = bounded(0.1, 0.0, 1e3)
    """Weight decay of matrices and embeddings; biases and norms have none."""
    beta1: float = 0.9
    """Adam's first-moment decay."""
    beta2: float = 0.99
    """Adam's second-moment decay."""
    grad_clip: float = bounded(1.0, 0.0, 1e6, low_open=True)
    """Maximum norm of the gradient."""
    eval_interval: int = bounded(250, 1, MAX_INT)
    """Steps between validations; each saves the state for --resume."""
    eval_tokens: int = bounded(200_000, 1, MAX_INT)
    """Validation tokens scored each time, spread evenly over the held-out text."""
    val_fraction: float = 0.1
    """Fraction of the text, at its end, held out for validation."""
    seed: int = bounded(1337, 0, MAX_INT)
    """Seed of weights, batches and dropout."""
    device: str = "auto"
    """cpu, cuda, cuda:N, or auto (cuda if available)."""
    autocast: str = chosen("float32", ("float32", "bfloat16"))
    """Dtype of matrix products in training: float32 or bfloat16. Weights stay float32."""
    save_dtype: str = chosen("float32", ("float32", "bfloat16", "float16"))
    """Dtype of the weights on disk: float32, bfloat16 or float16."""

    def __post_init__(self) -> None:
        if not isinstance(self.data, (tuple, list)):
            raise NanoinferError(f"data={show(self.data)} is not a tuple of text files")
        if not self.data:
            raise NanoinferError("data is empty: give at least one text file")
        keep_fields(self)
        require_float("dropout", self.dropout, 0.0, 1.0, high_open=True)
        require_float("val_fraction", self.val_fraction, 0.0, 1.0, low_open=True, high_open=True)
        require_float("min_learning_rate", self.min_learning_rate, 0.0, self.learning_rate)
        for name in ("beta1", "beta2"):
            require_float(name, getattr(self, name), 0.0, 1.0, high_open=True)
