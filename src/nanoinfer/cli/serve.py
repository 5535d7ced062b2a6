"""`nanoinfer serve`: an HTTP server with OpenAI's interface."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click

from nanoinfer.cli.help import argument, command
from nanoinfer.cli.options import config_flag, flags, llm_config
from nanoinfer.config import LLMConfig
from nanoinfer.errors import NanoinferError, missing_extra
from nanoinfer.server.config import ClusterConfig, ServerConfig
from nanoinfer.utils.files import read_text


@command("serve")
@argument(
    "models", metavar="MODEL...", nargs=-1, required=True,
    help="A built-in model, a folder, a GGUF file, a ckpt.pt, a Hub repository, random:PRESET; or several.",
)  # fmt: skip
@config_flag("tokenizer")
@click.option(
    "--chat-template", "chat_templates", metavar="[MODEL=]FILE", multiple=True,
    help="Jinja template to use instead of the model's own, of all models or of one. May be repeated.",
)  # fmt: skip
@config_flag("generation_config")
@flags(ServerConfig, "server")
@flags(ClusterConfig, "cluster")
@llm_config("pooling", "scheduler", "speculation", "engine")
def serve(
    models: tuple[str, ...],
    chat_templates: tuple[str, ...],
    server: ServerConfig,
    cluster: ClusterConfig,
    config: LLMConfig,
) -> None:
    """Serve models over HTTP with OpenAI's interface.

    Examples:
        nanoinfer serve shakespeare
        nanoinfer serve gpt2 --quantization int8 --port 9000
        nanoinfer serve gpt2 --replicas 2
        nanoinfer serve a.gguf b.gguf --idle-unload 300
        nanoinfer serve a.gguf b.gguf --chat-template b.gguf=tools.jinja
        nanoinfer serve path/to/base --lora-modules sql=path/to/adapter
    """
    try:
        from nanoinfer.server import access, connections, run
    except ModuleNotFoundError as e:
        package = (e.name or "").partition(".")[0]
        if package not in ("uvicorn", "starlette", "prometheus_client"):
            raise
        raise NanoinferError(missing_extra(package, "server")) from None

    files = _by_model(models, chat_templates)
    config = replace(config, engine=config.engine.with_adapters(len(server.lora_modules)))
    configs = [replace(config, model=model, chat_template=files[model]) for model in models]
    server = access.with_keys(server)
    connections.with_max_connections(server)  # before the model is loaded: too many connections are an error at once
    if len(configs) > 1 or cluster.needs_front:
        from nanoinfer.cluster import front  # one model in this process does without: it starts faster

        front.check(configs, server, cluster)
        return front.serve(configs, server, cluster, run.bind(server))
    with run.bind(server) as bound:  # before the model is loaded: a port in use is an error at once
        from nanoinfer.entrypoints.async_llm import AsyncLLM

        run.serve(AsyncLLM.from_config(configs[0]), server, bound)


def _by_model(models: Sequence[str], values: Sequence[str]) -> dict[str, str | None]:
    """Return the chat template of each model from values of --chat-template, FILE or MODEL=FILE; None: its own."""
    templates: dict[str, str | None] = dict.fromkeys(models)
    for value in sorted(values, key=lambda value: any(value.startswith(f"{model}=") for model in models)):
        model = next((model for model in models if value.startswith(f"{model}=")), None)
        template = read_text(Path(value if model is None else value[len(model) + 1 :]), "a chat template")
        templates |= dict.fromkeys(models if model is None else [model], template)
    return templates
