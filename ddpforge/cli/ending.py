"""How a process that may be one rank of many ends: in words, with an exit code, and without hanging."""

import logging
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import click

from ddpforge.cli import complain
from ddpforge.errors import ExitCode, ForgeError
from ddpforge.launch import record_verdict


@contextmanager
def ending() -> Iterator[None]:
    """Runs a command to its end and leaves with the exit code that `errors.ExitCode` gives it."""
    try:
        yield
    except ForgeError as error:
        complain(error)
        leave(error.exit_code)
    except KeyboardInterrupt:
        leave(ExitCode.INTERRUPTED)
    except Exception:
        click.echo(f"[rank {os.environ.get('RANK', '0')}] {traceback.format_exc()}", err=True)
        leave(ExitCode.FAILED)
    leave(ExitCode.DONE)


def leave(code: ExitCode) -> NoReturn:
    """Ends the process; a rank of a launched world without the interpreter's clean-up.

    Everything is on disk by now. gloo's threads now and then abort a process that takes the long way out, and a
    failed rank must not wait for peers; either would turn a finished run into a failed one.
    """
    record_verdict(code)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    if "RANK" in os.environ:
        os._exit(code)
    sys.exit(code)
