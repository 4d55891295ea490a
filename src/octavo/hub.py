"""From a model's name to its files: a local folder, a GGUF file, a pulled model, or a repository of the hub."""

import logging
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub
from huggingface_hub import errors

from octavo import env
from octavo.errors import InvalidConfig, ModelNotFound, OctavoError, shown
from octavo.findings.software import endpoint_is_no_url

logger = logging.getLogger("octavo")

PULLABLE = ("smollm2", "gemma3-270m")  # names that `octavo pull` knows
HUB_TIMEOUT = 4  # seconds; a hub that does not answer is given up before 10
TOKENIZER_FILES = ["*.json", "*.jinja", "tokenizer.model"]
WEIGHT_FILES = ["*.safetensors"]
NOT_NEEDED = ["*/*.safetensors", "*/*.json", "consolidated*"]  # copies of the weights in other layouts
GIVE_LOCAL = "Give the path of a model folder or of a GGUF file instead."

_REPOSITORY = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?", re.ASCII)
_SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-\d{5}\.gguf", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where a model lies: its folder and, for a GGUF model, the (first) file in it."""

    folder: Path
    gguf: Path | None = None


def find_model(
    name: str | Path | None,
    *,
    revision: str | None = None,
    download_dir: str | Path | None = None,
    weights: bool = True,
) -> ModelFiles:
    """The files of model `name`, downloaded where they must be.

    Looked up in this order: a folder or `.gguf` file at that path, a model that `octavo pull` fetched, a
    repository of the hub. None stands for the pulled smollm2. Nothing that is found on disk makes any
    network call. `download_dir` is a hub cache to use in place of the usual one. Without `weights` only
    the tokenizer and the configuration are asked for.

    Raises:
        ModelNotFound: nothing there, or not a model; the message says what to do.
        InvalidConfig: `name` is no string or path, or HF_ENDPOINT is no URL.
    """
    if name is None:
        name = PULLABLE[0]
        if not _is_pulled(name):
            raise ModelNotFound("No model was named.", f"Name one, or run `octavo pull {name}` first.")
    if not isinstance(name, str | Path):
        raise InvalidConfig(f"A model is named by a string or a path, not by {shown(name)}.")
    name = str(name)
    path = os.path.expanduser(name)
    if name and os.path.isdir(path):
        return _in_folder(_absolute(path), weights)
    if name and os.path.isfile(path):
        if not path.lower().endswith(".gguf"):
            raise ModelNotFound(
                f"{name} is a file, and not a GGUF one.", "Give the model's folder, or a file that ends in .gguf."
            )
        return ModelFiles(_absolute(path).parent, _absolute(path))
    if name in PULLABLE:
        if not _is_pulled(name):
            raise ModelNotFound(f"The model {name} is not on this machine.", f"Run `octavo pull {name}` first.")
        return _in_folder(_pulled(name), weights)
    if _looks_like_path(name):
        raise ModelNotFound(
            f"{name!r} looks like a path, and there is nothing at {_absolute(path)}.",
            f"Check its spelling; `octavo pull {PULLABLE[0]}` fetches a small model.",
        )
    return _on_hub(name, revision, Path(download_dir) if download_dir else env.hub_cache(), weights)


def _pulled(name: str) -> Path:
    return env.cache_root() / "models" / name


def _is_pulled(name: str) -> bool:
    return any(_pulled(name).glob("*.gguf"))  # an interrupted pull leaves an empty folder


def _absolute(path: str) -> Path:
    return Path(os.path.abspath(path))


def _looks_like_path(name: str) -> bool:
    return (
        name.startswith((".", "/", "~"))
        or name.endswith(("/", ".gguf", ".safetensors"))
        or "\\" in name
        or name.count("/") > 1
    )


def _in_folder(folder: Path, weights: bool) -> ModelFiles:
    """The model that a folder holds: Hugging Face files first, else its only GGUF model."""
    has_config = (folder / "config.json").is_file()
    has_weights = any(folder.glob("*.safetensors"))
    if (has_config and has_weights) or (not weights and (folder / "tokenizer.json").is_file()):
        return ModelFiles(folder)
    models = _gguf_models(folder)
    if len(models) == 1:
        return ModelFiles(folder, models[0])
    if not weights:
        return ModelFiles(folder)
    if models:
        raise ModelNotFound(
            f"{folder} holds {len(models)} GGUF models: {', '.join(path.name for path in models)}.",
            "Give the path of one of them.",
        )
    if has_weights:
        raise ModelNotFound(f"{folder} has weights and no config.json.", "Copy the model's config.json into it.")
    what = "a config.json and no weights" if has_config else "no config.json and no weights"
    raise ModelNotFound(f"{folder} has {what} (*.safetensors or *.gguf).", _convert(p.name for p in folder.iterdir()))


def _convert(names: Iterable[str]) -> str:
    if any(name.endswith((".bin", ".pt", ".pth")) for name in names):
        return "Its PyTorch files are not read, since they can run code: convert them to safetensors."
    return "Give a complete model folder."


def _gguf_models(folder: Path) -> list[Path]:
    """GGUF models of a folder, a split one by its first file, without the vision parts that lie beside some."""
    found = []
    for path in sorted(folder.iterdir()):
        split = _SPLIT.fullmatch(path.name)
        later = split is not None and split["number"] != "00001"
        if path.suffix.lower() == ".gguf" and not later and not path.name.startswith("mmproj"):
            found.append(path)
    return found


def _on_hub(name: str, revision: str | None, cache: Path, weights: bool) -> ModelFiles:
    endpoint = env.hub_endpoint()
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        raise endpoint_is_no_url(endpoint).as_error()
    if not _REPOSITORY.fullmatch(name):
        raise _no_name(name)

    def snapshot(local_files_only: bool) -> Path:
        return Path(
            huggingface_hub.snapshot_download(
                name,
                revision=revision,
                cache_dir=cache,
                endpoint=endpoint,
                etag_timeout=HUB_TIMEOUT,
                allow_patterns=[*TOKENIZER_FILES, *WEIGHT_FILES] if weights else TOKENIZER_FILES,
                ignore_patterns=NOT_NEEDED,
                local_files_only=local_files_only,
            )
        )

    if env.hub_offline():
        try:
            return _in_folder(snapshot(local_files_only=True), weights)
        except (errors.LocalEntryNotFoundError, errors.HFValidationError):
            raise ModelNotFound(
                f"{name} is not in the cache {cache}, and HF_HUB_OFFLINE is set.", f"Unset it, or: {GIVE_LOCAL}"
            ) from None
    try:
        _ask_hub(name, revision, endpoint, weights)
        return _in_folder(snapshot(local_files_only=False), weights)
    except OctavoError:
        raise
    except Exception as error:  # of an HTTP library that differs with the version of huggingface_hub
        refusal = _explain(name, revision, error)
    try:
        found = _in_folder(snapshot(local_files_only=True), weights)
    except (OctavoError, errors.LocalEntryNotFoundError, errors.HFValidationError):
        raise refusal from None
    logger.warning("%s The copy in %s is used.", refusal.message, found.folder)
    return found


def _ask_hub(name: str, revision: str | None, endpoint: str | None, weights: bool) -> None:
    """One call with a time limit, which the download does not have: is the model there, with weights we read?"""
    hub = huggingface_hub.HfApi(endpoint=endpoint)
    info = hub.model_info(name, revision=revision, timeout=HUB_TIMEOUT)
    names = [file.rfilename for file in info.siblings or []]
    if not weights or any(file.endswith(".safetensors") for file in names):
        return
    if any(file.endswith(".gguf") for file in names):
        raise ModelNotFound(f"{name} has GGUF files only.", "Download one of them and give its path.")
    raise ModelNotFound(f"{name} has no safetensors files.", _convert(names))


def _no_name(name: str) -> ModelNotFound:
    return ModelNotFound(f"{name[:100]!r} is neither a path that exists nor the name of a model.", GIVE_LOCAL)


def _explain(name: str, revision: str | None, error: Exception) -> ModelNotFound:
    if isinstance(error, errors.HFValidationError):
        return _no_name(name)
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    if isinstance(error, errors.GatedRepoError) or (status == 403):
        return ModelNotFound(
            f"{name} is gated: its owner must grant you access.",
            "Ask for it on the model's page, then set HF_TOKEN to a token of your account.",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelNotFound(f"{name} has no revision {revision!r}.", "Give a branch, a tag or a commit of it.")
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 404):
        return ModelNotFound(
            f"There is no model {name!r} on the hub, or it is private.",
            f"Check the spelling, set HF_TOKEN for a private one, or: {GIVE_LOCAL}",
        )
    cause = f"it answered {status}" if status else f"{type(error).__name__}: {error}".splitlines()[0]
    return ModelNotFound(f"{name} cannot be fetched from the hub ({cause}).", f"Check the network, or: {GIVE_LOCAL}")
