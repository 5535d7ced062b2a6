"""Models from the Hub, which a server on this machine stands in for: choice of a file, downloads, the cache."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.gguf_files import tiny_gguf
from helpers.hub_server import HubServer
from helpers.models import TINY, make_folder
from nanoinfer.checkpoints.hub import group_files, having

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
        | {f"play-{tag}.gguf": found for tag, found in content.items()},
        "them/folder": {"config.json": b"{}", "model.safetensors": b"w", "model-Q8_0.gguf": content["Q8_0"]},
        "them/parts": parts,
        "them/two": {"a-Q8_0.gguf": content["Q8_0"], "b-Q8_0.gguf": content["Q4_K_M"]},
        "them/text": {"README.md": b"no model"},
        "them/gpt2": {path.name: path.read_bytes() for path in no_tokenizer.iterdir()},
    }
    with HubServer(repositories) as server:
        yield server


Start = Callable[..., "subprocess.Popen[str]"]
Run = Callable[..., tuple[list[str], str]]
CODE = """
import sys
import huggingface_hub.constants
from nanoinfer.cli.terminal import prepare
from nanoinfer.errors import NanoinferError
from nanoinfer.checkpoints.hub import find

prepare()
huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE = 500
for name in sys.argv[1:]:
    try:
        print(find(name))
    except NanoinferError as e:
        print(e)
"""


@pytest.fixture
def start(hub: HubServer, tmp_path: Path) -> Start:
    """Start a process that finds models, in a cache of the test's own."""

    def start(*names: str, **changes: str) -> subprocess.Popen[str]:
        own = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
        return subprocess.Popen(
            [sys.executable, "-c", CODE, *names],
            env=inherited | own | {"NO_PROXY": "127.0.0.1"} | changes,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    return start


@pytest.fixture
def find(start: Start) -> Run:
    """Find models in a new process; return what each name gives, a path in the cache or an error, and the log."""

    def find(*names: str, **changes: str) -> tuple[list[str], str]:
        process = start(*names, **changes)
        out, err = process.communicate()
        assert process.returncode == 0, err
        return out.splitlines(), err

    return find


def test_a_file_is_found_by_its_quantization_in_any_case(find: Run, hub: HubServer, content: dict[str, bytes]) -> None:
    (first, second, by_path), _ = find(f"{REPO}:q4_k_m", f"hf://{REPO}:Q8_0", f"hf://{REPO}/play-Q8_0.gguf")
    assert Path(first).read_bytes() == content["Q4_K_M"]
    assert Path(second).read_bytes() == content["Q8_0"]
    assert by_path == second
    assert hub.downloads() == [("play-Q4_K_M.gguf", ""), ("play-Q8_0.gguf", "")]


def test_without_a_quantization_the_choice_is_logged(find: Run) -> None:
    (path,), log = find(REPO)
    assert Path(path).name == "play-Q4_K_M.gguf"
    assert (
        log == f"nanoinfer: {REPO} has 2 GGUF files: using play-Q4_K_M.gguf; to use another, give {REPO}:QUANTIZATION\n"
    )


def test_a_repository_with_weights_in_a_folder_is_that_folder(find: Run, hub: HubServer) -> None:
    (folder, file), log = find("them/folder", "them/folder:Q8_0")
    assert sorted(path.name for path in Path(folder).iterdir()) == [
        "config.json",
        "model-Q8_0.gguf",
        "model.safetensors",
    ]
    assert Path(file).parent == Path(folder)
    assert log == ""
    assert sorted(hub.downloads()) == [("config.json", ""), ("model-Q8_0.gguf", ""), ("model.safetensors", "")]


def test_all_parts_of_a_file_are_downloaded(find: Run, hub: HubServer) -> None:
    (path, same), _ = find("them/parts:F16", "hf://them/parts/big-F16-00001-of-00002.gguf")
    assert path == same
    assert sorted(p.name for p in Path(path).parent.iterdir()) == [
        "big-F16-00001-of-00002.gguf",
        "big-F16-00002-of-00002.gguf",
    ]
    assert len(hub.downloads()) == 2


def test_what_cannot_be_found_is_named(find: Run) -> None:
    names = [f"{REPO}:Q4_K", "them/two:Q8_0", "them/two", "them/none:Q8_0", "hf://them/text/../a.gguf"]
    none, several, default, missing, outside = find(*names)[0]
    listed = "its GGUF files: play-Q4_K_M.gguf, play-Q8_0.gguf"
    assert none == f"model {REPO} has no GGUF file with Q4_K in its name; {listed}"
    files = "give one as hf://them/two/FILE: a-Q8_0.gguf, b-Q8_0.gguf"
    assert several == default == f"model them/two has 2 GGUF files with Q8_0 in its name: {files}"
    assert missing.startswith("model 'them/none' could not be fetched from the Hugging Face Hub (")
    assert outside == "model them/text: '../a.gguf' is not the path of a file in a repository"
    assert find("random:x:y", "a b", "hf://a/b/c.bin", "a:Q8_0")[0] == ["None"] * 4


def test_an_interrupted_download_continues(
    start: Start, find: Run, hub: HubServer, content: dict[str, bytes], tmp_path: Path
) -> None:
    hub.hold_after = 1000
    with start(f"{REPO}:Q8_0") as process:
        blobs = tmp_path / "hf/hub" / f"models--{REPO.replace('/', '--')}" / "blobs"
        while not any(path.stat().st_size == 1000 for path in blobs.glob("*.partial")):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        process.communicate()
    assert process.returncode
    hub.hold_after = None
    (path,), _ = find(f"{REPO}:Q8_0")
    assert Path(path).read_bytes() == content["Q8_0"]
    assert hub.downloads() == [("play-Q8_0.gguf", ""), ("play-Q8_0.gguf", "bytes=1000-")]
    assert [path.name for path in blobs.iterdir()] == [hashlib.sha256(content["Q8_0"]).hexdigest()]


def test_a_damaged_file_is_deleted(find: Run, hub: HubServer, content: dict[str, bytes]) -> None:
    hub.damage = True
    (error,), _ = find(f"{REPO}:Q8_0")
    assert error.startswith("'play-Q8_0.gguf' was damaged on the way: its SHA-256 is ")
    assert error.endswith("...: it is deleted: download it again")
    hub.damage = False
    (path,), _ = find(f"{REPO}:Q8_0")
    assert Path(path).read_bytes() == content["Q8_0"]


def test_a_partial_file_that_is_too_long_is_begun_anew(find: Run, content: dict[str, bytes], tmp_path: Path) -> None:
    blobs = tmp_path / "hf/hub" / f"models--{REPO.replace('/', '--')}" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{hashlib.sha256(content['Q8_0']).hexdigest()}.partial").write_bytes(content["Q8_0"] + b"more")
    (path,), _ = find(f"{REPO}:Q8_0")
    assert Path(path).read_bytes() == content["Q8_0"]


@pytest.mark.parametrize("offline", [True, False], ids=["offline", "unreachable"])
def test_the_cache_is_used_without_the_hub(find: Run, hub: HubServer, offline: bool) -> None:
    found, _ = find(f"{REPO}:Q8_0", "them/folder")
    without = {"HF_HUB_OFFLINE": "1"} if offline else {"HF_ENDPOINT": "http://127.0.0.1:9"}
    again, log = find(f"{REPO}:Q8_0", "them/folder", REPO, **without)
    assert again == [*found, found[0]]
    assert log == ""
    (error,), _ = find(f"{REPO}:Q4_K_M", **without)
    assert error == f"model {REPO} has no GGUF file with Q4_K_M in its name; its GGUF files: play-Q8_0.gguf"


def test_the_models_of_the_cache_are_listed(find: Run, hub: HubServer, tmp_path: Path) -> None:
    found, _ = find(REPO, f"{REPO}:Q8_0", "them/folder", "them/gpt2", "hf://them/two/a-Q8_0.gguf")
    hub.requests.clear()
    done = subprocess.run(
        [sys.executable, "-m", "nanoinfer", "models", "--json"],
        env={k: v for k, v in os.environ.items() if not k.startswith("HF_")}
        | {"HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": hub.endpoint, "NO_PROXY": "127.0.0.1"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert list(rows) == [
        "shakespeare",
        "shakespeare-draft",
        "them/folder",
        "them/gpt2",
        f"{REPO}:Q4_K_M",
        f"{REPO}:Q8_0",
        "them/two:Q8_0",
    ]
    assert rows[f"{REPO}:Q4_K_M"]["path"] == found[0]
    assert rows[f"{REPO}:Q4_K_M"]["num_bytes"] == Path(found[0]).stat().st_size
    assert (rows[f"{REPO}:Q4_K_M"]["format"], rows[f"{REPO}:Q4_K_M"]["why_not"]) == ("float32", None)
    assert "model_type" in rows["them/folder"]["why_not"]
    assert rows["them/gpt2"]["why_not"] is None
    assert hub.requests == []  # the tokenizer of a GPT-2 that has none would come from the Hub


def test_a_cache_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = subprocess.run(
        [sys.executable, "-m", "nanoinfer", "models"],
        env=os.environ | {"HF_HUB_CACHE": str(tmp_path / "file")}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == (
        f"nanoinfer: error: the Hub's cache {tmp_path / 'file'} cannot be read: it is not a folder: set HF_HUB_CACHE to"
        " another one\n"
    )


def test_a_part_that_the_hub_does_not_have_is_missed_before_the_download(find: Run, hub: HubServer) -> None:
    del hub.repositories["them/parts"]["big-F16-00002-of-00002.gguf"]
    message = "model them/parts has 1 of the 2 parts of 'big-F16-00001-of-00002.gguf'"
    for found in find("them/parts:F16", "them/parts", "hf://them/parts/big-F16-00001-of-00002.gguf")[0]:
        assert found == f"{message}: give another file"
    assert hub.downloads() == []


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
    ("tag", "found"),
    [("Q4_K", []), ("q4_k_m", ["m-Q4_K_M.gguf", "Q4_K_M/m.gguf"]), ("UD-Q4_K_XL", ["m-UD-Q4_K_XL.gguf"]),
     ("Q4_K_XL", ["m-UD-Q4_K_XL.gguf"]), ("mxfp4", ["m.MXFP4.gguf"]), (".*", [])],
)  # fmt: skip
def test_a_quantization_is_a_whole_word_of_a_name(tag: str, found: list[str]) -> None:
    assert having(tag, ["m-Q4_K_M.gguf", "Q4_K_M/m.gguf", "m-UD-Q4_K_XL.gguf", "m.MXFP4.gguf"]) == found
