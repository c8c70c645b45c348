"""The error tree. Backends translate third-party errors into it at their edge.

FlexMARLError
  ConfigError      bad input of the user: configuration, data row, reward, workflow (also a ValueError)
  CapacityError    not now; the same call may succeed later
  BackendError     an engine, process or file failed; the cause is kept
    StoreError     the experience store or the object plane cannot be read or written
  WorkflowError    the user's workflow, tool or reward raised, or broke a rule of the workflow API
  FencedError      the caller's lease or incarnation is over; it must not act any more
  InvariantError   a bug of ours
"""


class FlexMARLError(Exception):
    """Base of every error that FlexMARL raises on purpose."""


class ConfigError(FlexMARLError, ValueError):
    """Input of the user is wrong; the message says what, where and the fix."""


class CapacityError(FlexMARLError):
    """There is no room at this moment; retrying later may succeed."""


class BackendError(FlexMARLError):
    """An engine, a process or a file failed."""


class StoreError(BackendError):
    """The experience store, the object plane or a run folder cannot be read or written."""


class WorkflowError(FlexMARLError):
    """The user's workflow, tool or reward raised, or broke a rule of the workflow API."""


class FencedError(FlexMARLError):
    """The caller's lease or incarnation has ended; what it reports is refused."""


class InvariantError(FlexMARLError):
    """A rule that FlexMARL itself must keep was broken: a bug of ours, please report it."""
