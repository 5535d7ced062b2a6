"""Models from the Hub, which a server on this machine stands in for: choice of a file, downloads, the cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import huggingface_hub.constants
import pytest

from helpers.gguf_files import tiny_gguf
from helpers.hub_server import HubServer
from helpers.models import TINY, make_folder, refuses
from nanoinfer.checkpoints.hub import cached_models, group_files, having
from nanoinfer.checkpoints.hub import find as find_on_hub
from nanoinfer.errors import NanoinferError

REPO = "them/play-GGUF"


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Two models that differ, by quantization."""
    folder = tmp_path_factory.mktemp("content")
    return {tag: tiny_gguf(folder / f"{tag}.gguf", metadata={"a": tag}).read_bytes() for tag in ("Q4_K_M", "Q8_0")}


@pytest.fixture
def hub(content: dict[str, bytes], tmp_path: Path) -> Iterator[HubServer]:
    no_tokenizer = make_folder(tmp_path / "gpt2", replace(TINY, vocab_size=50257), chars=None)
    parts = {f"big-F16-0000{i}-of-00002.gguf": content["Q8_0"] + bytes([i]) for i in (1, 2)}
    repositories = {
        REPO: {"README.md": b"play", "mmproj-Q8_0.gguf": b"other"}
        | {f"play-{tag}.gguf": raw for tag, raw in content.items()},
        "them/folder": {"config.json": b"{}", "model.safetensors": b"w", "model-Q8_0.gguf": content["Q8_0"]},
        "them/parts": parts,
        "them/two": {"a-Q8_0.gguf": content["Q8_0"], "b-Q8_0.gguf": content["Q4_K_M"]},
        "them/gpt2": {path.name: path.read_bytes() for path in no_tokenizer.iterdir()},
    }
    with HubServer(repositories) as server:
        yield server


Find = Callable[..., list[str]]


def use_hub(monkeypatch: pytest.MonkeyPatch, endpoint: str, cache: Path) -> None:
    """Let this process ask another Hub: the library reads the environment when it is imported."""
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)


@pytest.fixture
def find(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Find:
    """Find models in a cache of the test's own; return what each name gives, a path in the cache or an error."""
    use_hub(monkeypatch, hub.endpoint, tmp_path / "cache")

    def find(*names: str) -> list[str]:
        results = []
        for name in names:
            try:
                results.append(str(find_on_hub(name)))
            except NanoinferError as e:
                results.append(str(e))
        return results

    return find


def test_a_file_is_found_by_its_quantization_in_any_case(find: Find, hub: HubServer, content: dict[str, bytes]) -> None:
    first, second, by_path = find(f"{REPO}:q4_k_m", f"hf://{REPO}:Q8_0", f"hf://{REPO}/play-Q8_0.gguf")
    assert Path(first).read_bytes() == content["Q4_K_M"]
    assert Path(second).read_bytes() == content["Q8_0"]
    assert by_path == second
    assert hub.downloads() == ["play-Q4_K_M.gguf", "play-Q8_0.gguf"]


def test_without_a_quantization_the_choice_is_logged(find: Find, caplog: pytest.LogCaptureFixture) -> None:
    (path,) = find(REPO)
    assert Path(path).name == "play-Q4_K_M.gguf"
    message = f"{REPO} has 2 GGUF files: using play-Q4_K_M.gguf; to use another, give {REPO}:QUANTIZATION"
    assert message in caplog.messages


def test_a_repository_with_weights_in_a_folder_is_that_folder(find: Find, hub: HubServer) -> None:
    folder, file = find("them/folder", "them/folder:Q8_0")
    files = ["config.json", "model-Q8_0.gguf", "model.safetensors"]
    assert sorted(path.name for path in Path(folder).iterdir()) == files
    assert Path(file).parent == Path(folder)
    assert sorted(hub.downloads()) == files


def test_all_parts_of_a_file_are_downloaded(find: Find, hub: HubServer) -> None:
    path, same = find("them/parts:F16", "hf://them/parts/big-F16-00001-of-00002.gguf")
    assert path == same
    parts = [f"big-F16-0000{i}-of-00002.gguf" for i in (1, 2)]
    assert sorted(p.name for p in Path(path).parent.iterdir()) == sorted(hub.downloads()) == parts


def test_what_cannot_be_found_is_named(find: Find) -> None:
    names = [f"{REPO}:Q4_K", "them/two:Q8_0", "them/two", "them/none:Q8_0", "hf://them/two/../a.gguf"]
    none, several, default, missing, outside = find(*names)
    listed = f"give one as hf://{REPO}/FILE: play-Q4_K_M.gguf, play-Q8_0.gguf"
    assert none == f"model {REPO} has no GGUF files with Q4_K in its name: {listed}"
    files = "give one as hf://them/two/FILE: a-Q8_0.gguf, b-Q8_0.gguf"
    assert several == default == f"model them/two has 2 GGUF files with Q8_0 in its name: {files}"
    assert missing.startswith("model 'them/none' could not be fetched from the Hugging Face Hub (")
    assert outside.startswith("model them/two has no GGUF files with the path ../a.gguf: ")
    assert find("random:x:y", "a b", "hf://a/b/c.bin", "a:Q8_0") == ["None"] * 4


@pytest.mark.parametrize("offline", [True, False], ids=["offline", "unreachable"])
def test_the_cache_is_used_without_the_hub(
    find: Find, tmp_path: Path, offline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = find(f"{REPO}:Q8_0", "them/folder")
    if offline:
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    else:
        use_hub(monkeypatch, "http://127.0.0.1:9", tmp_path / "cache")
    assert find(f"{REPO}:Q8_0", "them/folder", REPO) == [*paths, paths[0]]
    (error,) = find(f"{REPO}:Q4_K_M")
    assert error.startswith(f"model {REPO} has no GGUF files with Q4_K_M in its name: give one as ")


def test_the_models_of_the_cache_are_listed(find: Find, hub: HubServer, tmp_path: Path) -> None:
    paths = find(REPO, f"{REPO}:Q8_0", "them/folder", "them/gpt2")
    hub.requests.clear()
    done = subprocess.run(
        [sys.executable, "-m", "nanoinfer", "models", "--json"],
        env=os.environ | {"HF_HUB_CACHE": str(tmp_path / "cache"), "HF_ENDPOINT": hub.endpoint},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    files = [f"hf://{REPO}/play-{tag}.gguf" for tag in ("Q4_K_M", "Q8_0")]
    rows.pop("smollm2", None)  # where its package is installed
    assert list(rows) == ["shakespeare", "shakespeare-draft", *files, "them/folder", "them/gpt2"]
    assert (rows[files[0]]["path"], rows[files[0]]["num_bytes"]) == (paths[0], Path(paths[0]).stat().st_size)
    assert (rows[files[0]]["format"], rows[files[0]]["why_not"]) == ("float32", None)
    assert "model_type" in rows["them/folder"]["why_not"]
    assert rows["them/gpt2"]["why_not"] is None
    assert hub.requests == []  # the tokenizer of a GPT-2 that has none would come from the Hub


def test_a_cache_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "file"))
    refuses(cached_models, f"the Hub's cache {tmp_path / 'file'} cannot be read", "set HF_HUB_CACHE to another one")


def test_files_are_grouped_by_model() -> None:
    files = [
        "b/x-00002-of-00002.gguf",
        "b/x-00001-of-00002.gguf",
        "a.Q8_0.GGUF",
        "mmproj-a.gguf",
        "imatrix.gguf",
        "a.bin",
    ]
    groups = {"a.Q8_0.GGUF": ["a.Q8_0.GGUF"], "b/x.gguf": ["b/x-00001-of-00002.gguf", "b/x-00002-of-00002.gguf"]}
    assert group_files(files) == groups


@pytest.mark.parametrize(
    ("tag", "files"),
    [("Q4_K", []), ("q4_k_m", ["m-Q4_K_M.gguf", "Q4_K_M/m.gguf"]), ("UD-Q4_K_XL", ["m-UD-Q4_K_XL.gguf"]),
     ("Q4_K_XL", ["m-UD-Q4_K_XL.gguf"]), ("mxfp4", ["m.MXFP4.gguf"]), (".*", [])],
)  # fmt: skip
def test_a_quantization_is_a_whole_word_of_a_name(tag: str, files: list[str]) -> None:
    assert having(tag, ["m-Q4_K_M.gguf", "Q4_K_M/m.gguf", "m-UD-Q4_K_XL.gguf", "m.MXFP4.gguf"]) == files
