"""`nanoinfer serve`: an HTTP server with OpenAI's interface.

Examples:
    nanoinfer serve shakespeare
    nanoinfer serve gpt2 --quantization int8 --port 9000
    nanoinfer serve gpt2 --replicas 2
    nanoinfer serve a.gguf b.gguf --idle-unload 300
"""

from __future__ import annotations

from dataclasses import replace

from nanoinfer.cli.help import argument, command
from nanoinfer.cli.options import flags, generation_config_flag, llm_config, tokenizer_flag
from nanoinfer.cluster.config import ClusterConfig
from nanoinfer.config import LLMConfig
from nanoinfer.errors import NanoinferError, missing_extra
from nanoinfer.server.config import ServerConfig


@command("serve")
@argument(
    "models", metavar="MODEL...", nargs=-1, required=True,
    help="A built-in model, a folder, a GGUF file, a ckpt.pt, a Hub repository, random:PRESET; or several.",
)  # fmt: skip
@tokenizer_flag
@generation_config_flag
@flags(ServerConfig, "server")
@flags(ClusterConfig, "cluster")
@llm_config("pooling", "scheduler", "speculation", "engine")
def serve(models: tuple[str, ...], server: ServerConfig, cluster: ClusterConfig, config: LLMConfig) -> None:
    """Serve models over HTTP with OpenAI's interface."""
    try:
        from nanoinfer.server import auth, descriptors, run
    except ModuleNotFoundError as e:
        package = (e.name or "").partition(".")[0]
        if package not in ("uvicorn", "starlette", "prometheus_client"):
            raise
        raise NanoinferError(missing_extra(package, "server")) from None

    configs = [replace(config, model=model) for model in models]
    server = auth.with_keys(server)
    descriptors.with_max_connections(server)  # before the model is loaded: too many connections are an error at once
    if len(configs) > 1 or cluster.needs_front:
        from nanoinfer.cluster import serve as front  # one model in this process does without: it starts faster

        front.check(configs, server, cluster)
        return front.serve(configs, server, cluster, run.bind(server))
    with run.bind(server) as bound:  # before the model is loaded: a port in use is an error at once
        from nanoinfer.entrypoints.async_llm import AsyncLLM

        run.serve(AsyncLLM.from_config(configs[0]), server, bound)
