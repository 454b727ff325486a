"""Libraries that only some components need, and that come as an extra of ddpforge."""

from importlib.util import find_spec

from ddpforge.errors import PluginError

__all__ = ["require"]


def require(module: str, extra: str) -> None:
    """Raises PluginError where a library is not installed; does not import it."""
    if find_spec(module) is None:
        raise PluginError(f"{module} is not installed", hints=[f"pip install 'ddpforge[{extra}]'"])
