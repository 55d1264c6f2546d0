"""Every error that a user of graphpasses can meet.

Each message names what is wrong (FQN, pass, rank), what was expected, and what to do about it.
"""


class GraphPassesError(Exception):
    """Base of every error that graphpasses raises for a user's mistake or an unsupported case."""


class IdentityError(GraphPassesError, ValueError):
    """A tie between modules, parameters or buffers is unknown or could not be restored."""


class CaptureError(GraphPassesError, ValueError):
    """A training step could not be captured."""


class FidelityError(CaptureError):
    """A captured step would not call what eager calls."""


class BatchMismatchError(CaptureError):
    """A captured step was called with a batch that does not match the captured one."""


class PipelineError(GraphPassesError):
    """A pipeline was put together wrongly, or one of its passes failed."""


class ShardingError(GraphPassesError, ValueError):
    """A model with embedding tables cannot be planned or sharded as it was asked to be."""


class CheckpointError(GraphPassesError, ValueError):
    """A state_dict does not fit the model."""


class KeyOrderError(GraphPassesError, ValueError):
    """A sharded module was called with features in another order than the one it was first called with."""


class UnknownPassError(PipelineError, ValueError):
    """A pass was named that the pipeline does not have."""


class VerificationError(PipelineError):
    """The graph that a pass left behind is malformed or broke its contract."""


class ProofError(PipelineError):
    """A rewritten step does not compute what the step computed before."""


class PlanError(GraphPassesError, ValueError):
    """A bucket plan does not fit the model."""


class LayoutError(GraphPassesError, ValueError):
    """The graph's bucket layout cannot meet the layout that was asked for."""


class UnsupportedError(GraphPassesError, NotImplementedError):
    """The rewrite that was asked for cannot be proven equal to eager."""


class TopologyError(GraphPassesError, ValueError):
    """A simulated cluster was described inconsistently."""


class ClusterError(GraphPassesError, RuntimeError):
    """A rank of a simulated cluster failed, or the ranks do not go together."""


class TaskError(GraphPassesError, ValueError):
    """A training task that was named cannot be loaded."""


class RunFileError(GraphPassesError, ValueError):
    """A recorded run cannot be read."""


class CompareError(GraphPassesError, ValueError):
    """Two recorded runs cannot be compared."""


class AgreementError(GraphPassesError):
    """Ranks that compile one model together see different collectives in it."""


class ArenaError(GraphPassesError, ValueError):
    """Tables cannot be put into one memory, or no longer lie where they were put."""


class IdError(GraphPassesError, IndexError):
    """A table was looked up with an id that is not one of its rows, or with offsets that make no bags."""
