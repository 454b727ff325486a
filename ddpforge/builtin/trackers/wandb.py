"""Weights & Biases: one run per run folder, continued when training is, and never in training's way."""

import json
import logging
import os
import secrets
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import urlsplit
from urllib.request import getproxies

from pydantic import AfterValidator, Field

from ddpforge.builtin.extras import stored_id
from ddpforge.interfaces import Histogram, ShownKind, Tracker

if TYPE_CHECKING:
    import wandb

logger = logging.getLogger("ddpforge")

Seconds = Annotated[float, Field(ge=0.001, le=86400)]


def _plain(value: str) -> str:
    if not value.isprintable() or any(c in "/\\#?%:" for c in value):
        raise ValueError("W&B takes neither / \\ # ? % : nor control characters here")
    return value


Name = Annotated[str, Field(min_length=1, max_length=128), AfterValidator(_plain)]

# Where wandb's own environment variable is set, it beats the recipe (wandb by itself would do the opposite).
_ENVIRONMENT = {
    "project": "WANDB_PROJECT",
    "entity": "WANDB_ENTITY",
    "run_group": "WANDB_RUN_GROUP",
    "run_tags": "WANDB_TAGS",
    "mode": "WANDB_MODE",
    "run_name": "WANDB_NAME",
    "run_job_type": "WANDB_JOB_TYPE",
    "run_notes": "WANDB_NOTES",
    "root_dir": "WANDB_DIR",
    "resume": "WANDB_RESUME",
    "init_timeout": "WANDB_INIT_TIMEOUT",
    "finish_timeout": "WANDB_FINISH_TIMEOUT",
}
_PROBE_SECONDS = 2


class WandbTracker(Tracker):
    """Mirrors the run to Weights & Biases, or to an offline run where the server cannot be used.

    wandb's environment variables keep their meaning and beat the recipe. The x axis is `trainer/step`;
    wandb's own step only goes up, and would lose what a resumed run repeats.
    """

    def __init__(
        self,
        project: Annotated[Name, Field(description="The W&B project.")],
        entity: Annotated[
            Name | None, Field(description="The user or team that owns the project; absent: your default one.")
        ] = None,
        group: Annotated[Name | None, Field(description="The group that this run belongs to.")] = None,
        tags: Annotated[tuple[str, ...], Field(description="Labels to find the run by.")] = (),
        mode: Annotated[
            Literal["online", "offline", "disabled"] | None,
            Field(description="Upload, record for `wandb sync`, or do nothing; absent: as wandb is set up."),
        ] = None,
        name: Annotated[
            str | None, Field(description="The name that the run is shown under; absent: the recipe's.")
        ] = None,
        job_type: Annotated[str | None, Field(description='What the run is within its group, e.g. "pretrain".')] = None,
        notes: Annotated[str | None, Field(description="A longer description.")] = None,
        checkpoints: Annotated[
            bool,
            Field(description="Log each checkpoint as an artifact that refers to its folder; nothing is uploaded."),
        ] = False,
        init_timeout: Annotated[
            Seconds, Field(description="Seconds to wait for the server before recording offline.")
        ] = 10,
        finish_timeout: Annotated[Seconds, Field(description="Seconds that uploads may take after training.")] = 60,
    ) -> None:
        self._checkpoints = checkpoints
        self._options = {
            "project": project,
            "entity": entity,
            "run_group": group,
            "run_tags": tags or None,
            "mode": mode,
            "run_name": name,
            "run_job_type": job_type,
            "run_notes": notes,
            "init_timeout": init_timeout,
            "finish_timeout": finish_timeout,
        }

    def start(self, *, name: str, folder: Path, config: Mapping[str, Any], resumed_at: int | None) -> None:
        """Opens the run that belongs to `folder`; an unusable server costs about `init_timeout` at worst."""
        for kind in ("data", "cache"):  # else they fill the home directory
            os.environ.setdefault(f"WANDB_{kind.upper()}_DIR", str((folder / "wandb" / kind).absolute()))
        self._run = self._open(self._settings(name, folder), dict(config))
        self._run.define_metric("trainer/step")
        self._run.define_metric("*", step_metric="trainer/step")
        if resumed_at is not None:
            self.rewind(resumed_at)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Queues the row; wandb's own process uploads it."""
        try:
            self._run.log({"trainer/step": step, **metrics})
        except Exception:
            _tear_down()
            raise

    def show(self, step: int, name: str, value: Any, kind: ShownKind) -> None:
        """As wandb's own media: Image, Histogram, Table; text as Html, which keeps its lines."""
        media = _MEDIA[kind](value)
        self.log(step, {name: media})

    def checkpoint(self, step: int, folder: Path) -> None:
        """Logs a reference to the folder, where the recipe asks for it."""
        if not self._checkpoints:
            return
        import wandb

        artifact = wandb.Artifact(f"checkpoint-{self._run.id}", type="checkpoint", metadata={"step": step})
        # By address alone: to hash gigabytes would hold training up, and retention removes old folders anyway.
        artifact.add_reference(folder.absolute().as_uri(), name=folder.name, checksum=False)
        self._run.log_artifact(artifact, aliases=["latest", f"step-{step}"])

    def rewind(self, step: int) -> None:
        """Marks where training resumed; of two rows for one `trainer/step` the later one counts."""
        self.log(step, {"trainer/resumed_at": step})

    def finish(self, *, state: str, summary: Mapping[str, float]) -> None:
        """Uploads what is left; the run counts as failed unless `state` is done or preempted."""
        try:
            self._run.summary.update({"state": state, **summary})
            self._run.finish(exit_code=0 if state in ("done", "preempted") else 1)
        except TimeoutError:
            logger.warning("W&B: upload cut short; complete it: wandb sync %s", self._run.settings.sync_dir)
        finally:
            _tear_down()

    def _settings(self, name: str, folder: Path) -> "wandb.Settings":
        import wandb

        wanted = {
            "run_name": name,
            "run_id": _run_id(folder),
            "resume": "allow",
            "root_dir": str(folder),
            "silent": True,  # also saves the greeting, which waits for the server
            "console": "off",
            "finish_timeout_raises": True,
            "x_transaction_log_flush_interval": 2,  # seconds of records that a kill may cost
        } | {key: value for key, value in self._options.items() if value is not None}
        return wandb.Settings.model_validate(
            {
                key: value
                for key, value in wanted.items()
                if key in wandb.Settings.model_fields and not os.environ.get(_ENVIRONMENT.get(key, ""))
            }
        )

    def _open(self, settings: "wandb.Settings", config: dict[str, Any]) -> "wandb.Run":
        import wandb

        try:
            _check_server(wandb.setup(settings=settings).settings)
            run = wandb.init(config=config, settings=settings)
        except Exception as error:
            _tear_down()  # a failed init keeps the run's id in use
            settings.mode = "offline"
            run = wandb.init(config=config, settings=settings)
            reason = " ".join(str(error).split())
            logger.warning("W&B: %s; offline now, upload later: wandb sync %s", reason, run.settings.sync_dir)
            return run
        if run.settings.mode == "offline":
            logger.info("W&B: offline; upload it with: wandb sync %s", run.settings.sync_dir)
        elif run.url:
            logger.info("W&B: %s", run.url)
        return run


def _image(value: Any) -> Any:
    import wandb

    return wandb.Image(value)


def _histogram(value: Histogram) -> Any:
    import numpy as np
    import wandb

    return wandb.Histogram(np_histogram=(np.asarray(value.counts), np.asarray(value.edges)))


def _text(value: str) -> Any:
    import wandb

    return wandb.Html(f"<pre>{escape(value)}</pre>", inject=False)


def _table(value: Any) -> Any:
    import wandb

    return wandb.Table(columns=list(value[0]), data=[list(row.values()) for row in value])


_MEDIA: Mapping[ShownKind, Callable[[Any], Any]] = {
    "image": _image,
    "histogram": _histogram,
    "text": _text,
    "table": _table,
}


def _run_id(folder: Path) -> str:
    """The id of the run in `folder`: the environment's, the stored one or a new one, stored before use."""
    file = folder / "wandb.json"
    stored = stored_id(file, "id")
    run_id = os.environ.get("WANDB_RUN_ID") or stored or secrets.token_hex(4)
    if run_id != stored:
        new = file.with_suffix(".tmp")
        new.write_text(json.dumps({"id": run_id}) + "\n")
        os.replace(new, file)
    return run_id


def _check_server(settings: "wandb.Settings") -> None:
    """Raises when a run could not be online: no API key, or nobody answers at the server's address."""
    import wandb

    if settings.mode not in ("online", "shared"):
        return
    if not wandb.login(prompt=False, verify=False):
        raise wandb.Error("no API key (`wandb login` stores one)")

    url = urlsplit(settings.base_url)
    if url.scheme in getproxies():  # the proxy is reached instead; `init_timeout` still holds
        return
    port = url.port or (443 if url.scheme == "https" else 80)
    try:
        socket.create_connection((url.hostname, port), timeout=_PROBE_SECONDS).close()
    except OSError as error:
        raise wandb.Error(f"{settings.base_url} cannot be reached ({error})") from error


def _tear_down() -> None:
    """Ends wandb's own process, and waits until it has written all it knows; it may be dead already."""
    import wandb

    with suppress(Exception, SystemExit):  # left to its exit hook, wandb would print a traceback
        wandb.teardown()
