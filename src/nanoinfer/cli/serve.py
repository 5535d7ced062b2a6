"""`nanoinfer serve`: an HTTP server with OpenAI's interface.

Examples:
    nanoinfer serve shakespeare
    nanoinfer serve gpt2 --quantization int8 --port 9000
"""

from __future__ import annotations

from nanoinfer.cli.help import argument, command
from nanoinfer.cli.options import flags, generation_config_flag, tokenizer_flag
from nanoinfer.config import EngineConfig, LLMConfig, SchedulerConfig, SpeculationConfig
from nanoinfer.errors import NanoinferError, missing_extra
from nanoinfer.pooling_params import PoolingConfig
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
@flags(PoolingConfig, "pooling")
@flags(SchedulerConfig, "scheduler")
@flags(SpeculationConfig, "speculation")
@flags(EngineConfig, "engine_config")
def serve(
    model: str,
    tokenizer: str | None,
    generation_config: str,
    server: ServerConfig,
    engine_config: EngineConfig,
    speculation: SpeculationConfig,
    scheduler: SchedulerConfig,
    pooling: PoolingConfig,
) -> None:
    """Serve a model over HTTP with OpenAI's interface."""
    config = LLMConfig(
        model,
        tokenizer,
        generation_config=generation_config,
        engine=engine_config,
        speculation=speculation,
        scheduler=scheduler,
        pooling=pooling,
    )
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
