"""`nanoinfer serve`: an HTTP server with OpenAI's interface.

Examples:
    nanoinfer serve shakespeare
    nanoinfer serve gpt2 --quantization int8 --port 9000
"""

from __future__ import annotations

from nanoinfer.cli.help import argument, command
from nanoinfer.cli.options import flags, generation_config_flag, llm_config, tokenizer_flag
from nanoinfer.config import LLMConfig
from nanoinfer.errors import NanoinferError, missing_extra
from nanoinfer.server.config import ServerConfig


@command("serve")
@argument(
    "model",
    metavar="MODEL",
    help="A built-in model, a folder, a GGUF file, a ckpt.pt, a Hub repository, random:PRESET.",
)
@tokenizer_flag
@generation_config_flag
@flags(ServerConfig, "server")
@llm_config("pooling", "scheduler", "speculation", "engine")
def serve(server: ServerConfig, config: LLMConfig) -> None:
    """Serve a model over HTTP with OpenAI's interface."""
    try:
        from nanoinfer.server import auth, descriptors, run
    except ModuleNotFoundError as e:
        package = (e.name or "").partition(".")[0]
        if package not in ("uvicorn", "starlette", "prometheus_client"):
            raise
        raise NanoinferError(missing_extra(package, "server")) from None

    server = auth.with_keys(server)
    descriptors.with_max_connections(server)  # before the model is loaded: too many connections are an error at once
    with run.bind(server) as bound:  # before the model is loaded: a port in use is an error at once
        from nanoinfer.entrypoints.async_llm import AsyncLLM

        run.serve(AsyncLLM.from_config(config), server, bound)
