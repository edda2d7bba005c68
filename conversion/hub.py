"""Publishing on the hub: what can be refused is refused before the work, and what is finished is not lost."""

import shlex
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from .errors import RetrofitError, one_line

# Left over from a model that was pushed before, shards and their index would be loaded in the place of the new ones, and
# reports would be taken for the new one's.
STALE = ["model*.safetensors*", "heal.*", "verify.*", "rank.*"]


def is_hub_id(name: str) -> bool:
    """Whether it has the form `owner/name`."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return "/" in name


def prepare_repo(repo: str) -> None:
    """Makes the model repository unless it is there, and asks whether this login may write to it.

    Raises:
        RetrofitError: it may not, or there is no login, no network, or no such name.
    """
    if not is_hub_id(repo):
        raise RetrofitError(f"`--push-to-hub {repo}` is not a hub id. Use `owner/name`, such as `me/model`.")
    api = HfApi()
    try:
        api.create_repo(repo, exist_ok=True)
        api.auth_check(repo, write=True)  # `create_repo` is content if somebody else's repository is there
    except Exception as error:  # no token, no network, no right to write: the client has a class for each
        raise RetrofitError(
            f"Cannot push to {repo!r}: {one_line(error)}. Run `hf auth login`, choose a name that this login may write to, or "
            "leave out --push-to-hub."
        ) from error


def push(repo: str, folder: Path, message: str) -> None:
    """Uploads a finished model folder as one more commit.

    Raises:
        RetrofitError: the upload failed; the folder is as it was.
    """
    try:
        HfApi().upload_folder(repo_id=repo, folder_path=folder, commit_message=message, delete_patterns=STALE)
    except Exception as error:  # the hub's client has many
        command = shlex.join(
            ["hf", "upload", repo, str(folder), *(part for pattern in STALE for part in ("--delete", pattern))]
        )
        raise RetrofitError(
            f"The model is finished in {folder}, but pushing it to {repo!r} failed: {one_line(error)}. Nothing is lost: "
            f"upload it with `{command}`."
        ) from error
