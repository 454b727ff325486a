"""Client of a server that generates: the completions API of OpenAI, as vLLM and SGLang offer it."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import torch
from ddpforge.errors import SetupError, UsageError
from ddpforge.interfaces import World
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ddpforge_transformers.sampling import Completion, SamplingSettings

__all__ = ["RolloutServer", "update_weights_from_disk"]

_AT_ONCE = 64  # requests
# Settings that a request lacks are those of the model's generation_config.json, e.g. a penalty of repetitions.
_PLAIN = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
_KEY = "task.server"


class RolloutServer:
    """Server at `url` that generates with the weights it was given last.

    Requests are POST /v1/completions, one per prompt, with tokens as the prompt. Answers need the tokens and their
    log-probabilities: `token_ids`, or `logprobs.tokens` of the form "token_id:7", and `logprobs.token_logprobs`.
    """

    def __init__(self, url: str, update: Callable[..., Any] | None, *, timeout: float = 600.0) -> None:
        """Raises ValueError for an address that is not one of HTTP."""
        if not url.startswith(("http://", "https://")):
            raise ValueError(f'server: {url} is not an address of HTTP; write e.g. server = "http://127.0.0.1:8000"')
        self.url = url.rstrip("/").removesuffix("/v1")
        self._update, self._timeout = update or update_weights_from_disk, timeout
        self._model = ""

    def sample(
        self, prompts: Sequence[list[int]], seeds: Sequence[int], each: int, how: SamplingSettings
    ) -> list[list[Completion]]:
        """Returns `each` completions of every prompt; raises SetupError or UsageError for a server that cannot."""
        self._model = self._model or str(self._call("/v1/models")["data"][0]["id"])
        bodies = [
            {
                "model": self._model,
                "prompt": prompt,
                "n": each,
                "max_tokens": how.max_tokens,
                "temperature": how.temperature,
                "top_p": 1.0 if how.top_p is None else how.top_p,
                "top_k": -1 if how.top_k is None else how.top_k,
                **_PLAIN,
                "seed": seed % 2**31,
                "stop_token_ids": list(how.ends),
                "logprobs": 1,
                "return_token_ids": True,
                "return_tokens_as_token_ids": True,
            }
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        with ThreadPoolExecutor(min(_AT_ONCE, len(bodies))) as pool:
            found = list(pool.map(lambda body: self._call("/v1/completions", body), bodies))
        return [self._completions(one, each, how.max_tokens) for one in found]

    def _completions(self, answer: Mapping[str, Any], each: int, most: int) -> list[Completion]:
        choices = sorted(answer.get("choices", ()), key=lambda one: int(one.get("index", 0)))
        if len(choices) != each:
            raise self._fault(f"returned {len(choices)} completions, not {each} (`n`)")
        return [self._completion(one, most) for one in choices]

    def _completion(self, choice: Mapping[str, Any], most: int) -> Completion:
        logprobs = choice.get("logprobs") or {}
        values, shown = logprobs.get("token_logprobs"), logprobs.get("tokens") or []
        tokens = choice.get("token_ids")
        if tokens is None and shown and all(str(one).startswith("token_id:") for one in shown):
            tokens = [int(one.removeprefix("token_id:")) for one in shown]
        if tokens is None:
            raise self._fault(
                "returns no token ids (`token_ids`): its texts would be tokenized again, to other tokens",
                "vLLM returns them since 0.10.2 (`return_token_ids`)",
            )
        if values is None or len(values) != len(tokens) or None in values:
            raise self._fault("returns no log-probability for each token (`logprobs.token_logprobs`)")
        if not 1 <= len(tokens) <= most:
            raise self._fault(f"returned a completion of {len(tokens)} tokens; expected 1 to {most}")
        return Completion([int(one) for one in tokens], [float(one) for one in values])

    @torch.no_grad()
    def push(self, model: nn.Module, form: nn.Module, folder: Path, world: World) -> None:
        """Writes the weights to `folder` and requests that the server loads them. Collective; rank 0 writes and calls.

        `form` is the model before the strategy changed it. The folder is one that `from_pretrained` reads.
        """
        weights: dict[str, Tensor] = {}
        for (name, _), theirs in zip(form.named_parameters(), model.parameters(), strict=True):
            whole = theirs.full_tensor() if isinstance(theirs, DTensor) else theirs
            if world.is_rank_zero:
                weights[name] = whole.detach().cpu().contiguous()
        if world.is_rank_zero:
            folder.mkdir(exist_ok=True)
            config: Any = form.config
            config.architectures = [type(form).__name__]
            config.save_pretrained(folder)
            draft = folder / ".model.safetensors"
            save_file(weights, draft, metadata={"format": "pt"})
            os.replace(draft, folder / "model.safetensors")
            self._tell(folder)
        world.global_ranks.barrier()

    def _tell(self, folder: Path) -> None:
        try:
            self._update(self.url, folder)
        except (UsageError, SetupError):
            raise
        except Exception as error:
            if isinstance(error, URLError | ConnectionError) and not isinstance(error, HTTPError):
                raise self._silent("the request to load weights", error) from error
            raise UsageError(
                f"the server at {self.url} did not take the weights: {type(error).__name__}: {error}",
                hints=["task.server_update names a function f(url, folder) that makes the server load the folder"],
                key="task.server_update",
            ) from error

    def _call(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        try:
            return call(self.url + path, body, self._timeout)
        except HTTPError as error:
            raise self._fault(f"refused {path}: {error.code} {error.read()[:300].decode(errors='replace')}") from error
        except (URLError, OSError, HTTPException) as error:
            raise self._silent(path, error) from error
        except ValueError as error:
            raise self._fault(f"answered {path} with something that is not JSON: {error}") from error

    def _silent(self, what: str, error: Exception) -> SetupError:
        return SetupError(
            f"the server at {self.url} does not answer {what}: {getattr(error, 'reason', None) or error}",
            hints=["start it first, with the model of the recipe; or remove task.server to generate in process"],
            key=_KEY,
        )

    def _fault(self, what: str, *hints: str) -> UsageError:
        return UsageError(f"the server at {self.url} {what}", hints=hints, key=_KEY)


def call(url: str, body: Mapping[str, Any] | None, timeout: float) -> dict[str, Any]:
    """Returns the JSON object that a server answers; POST with a body, else GET. Raises the errors of urllib."""
    data = None if body is None else json.dumps(body).encode()
    request = Request(url, data, {"Content-Type": "application/json"})
    with urlopen(request, timeout=timeout) as answer:
        found = json.loads(answer.read() or b"{}")
    if not isinstance(found, dict):
        raise ValueError("it is not an object")
    return found


def update_weights_from_disk(url: str, folder: Path) -> None:
    """Tells a server of SGLang to load the weights in `folder`, which it must be able to read."""
    found = call(f"{url}/update_weights_from_disk", {"model_path": str(folder.resolve())}, 600.0)
    if found.get("success") is False:
        raise RuntimeError(str(found.get("message", found)))
