"""`ddpforge completion`: prints a script with which a shell completes ddpforge's commands and options."""

import click
from click.shell_completion import get_completion_class


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a completion script. To enable it: `eval "$(ddpforge completion bash)"`."""
    root = click.get_current_context().find_root().command
    complete = get_completion_class(shell)
    assert complete is not None
    click.echo(complete(root, {}, "ddpforge", "_DDPFORGE_COMPLETE").source())
