"""Exceptions of the package. Their texts say what was asked, what was found and what to do."""


class DeltalinkError(Exception):
    """Anything that goes wrong in this package."""


class InputError(DeltalinkError, ValueError):
    """The tensors or options of a call do not describe a computation. Nothing was computed; the call may be repeated."""


class DeviceError(InputError):
    """A tensor is not where the operation computes."""


class PlanError(DeltalinkError, ValueError):
    """The sequences, the cuts or the number of ranks do not describe a plan, or a plan does not fit the world."""


class WorldError(DeltalinkError, RuntimeError):
    """A world could not be made or a rank failed, left or did not arrive in time. The world is of no further use."""


class HeapError(DeltalinkError, RuntimeError):
    """A buffer of the symmetric heap could not be made."""


class MismatchError(DeltalinkError, RuntimeError):
    """The ranks do not do the same. All of them get this error, with both sides of the first difference."""


class OperationError(DeltalinkError, RuntimeError):
    """A call did not complete. The operation is of no further use: other ranks may have gone on."""


class SavedStateError(DeltalinkError, RuntimeError):
    """A backward call found nothing that its forward call saved, or something that another one did."""


class StillLentError(DeltalinkError, RuntimeError):
    """A world was to be shut down whose memory tensors or graphs still hold. The message names what is still alive."""
