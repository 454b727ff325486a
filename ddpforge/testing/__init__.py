"""The conformance kit: checks that a component keeps the contract of its kind, for authors and for ddpforge itself.

`ddpforge plugins test`, `pytest --pyargs ddpforge.testing --ddpforge-dist NAME` and `conform` run the same checks. What
a component needs in order to be tried out is read from `ddpforge_testing.toml`; see `ddpforge.testing.settings`.
"""

from ddpforge.testing.kit import Kit, conform
from ddpforge.testing.report import Breach, Result

__all__ = ["Breach", "Kit", "Result", "conform"]
