"""Identity: names, and the key of a sample.

A sample is identified by (step, query, trajectory, agent, branch, turn) and the attempt number of its trajectory.
Keys are totally ordered, so every tie in the system can be broken by key.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

AgentName = NewType("AgentName", str)
PolicyName = NewType("PolicyName", str)
WorkerId = NewType("WorkerId", str)
InstanceId = NewType("InstanceId", str)
RequestId = NewType("RequestId", str)
HolderId = NewType("HolderId", str)
"""Who holds a lease: one incarnation of a process group, `<policy>#<incarnation>`."""


class Purpose(StrEnum):
    """Why a trajectory runs. Rows of an evaluation never enter the experience store."""

    TRAIN = "train"
    EVAL = "eval"


@dataclass(frozen=True, slots=True, order=True)
class TrajectoryKey:
    """One run of the workflow on one query."""

    step: int
    """The step that dispatched it, counted from 0; its policy_version in serial and strict mode."""
    query: int
    """Row number of the query in its data set (the paper's input_id)."""
    trajectory: int
    """Number within the query's trajectories of this step, counted from 0."""

    def __str__(self) -> str:
        return f"s{self.step}/q{self.query}/t{self.trajectory}"


@dataclass(frozen=True, slots=True, order=True)
class SampleKey:
    """One turn: a generation of one agent in one branch of a trajectory."""

    step: int
    query: int
    trajectory: int
    agent: AgentName
    branch: int
    turn: int
    """Index of this agent's generation within the branch, counted from 0."""

    @property
    def trajectory_key(self) -> TrajectoryKey:
        """The trajectory this turn belongs to."""
        return TrajectoryKey(self.step, self.query, self.trajectory)

    @property
    def sample_id(self) -> str:
        """Display form of the paper, `{input_id}_{turn}_{trajectory_id}`; not unique across agents and branches."""
        return f"{self.query}_{self.turn}_{self.trajectory}"

    def __str__(self) -> str:
        return f"{self.trajectory_key}/{self.agent}/b{self.branch}/n{self.turn}"


@dataclass(frozen=True, slots=True, order=True)
class ObjectKey:
    """Name of an immutable set of tensors on the object plane."""

    kind: str
    """What it is: `weights`, `state` or `seal`."""
    owner: str
    """Whose it is, usually a policy name."""
    version: int
    """weights_version of the content, or a number that is never reused (seals)."""

    def __str__(self) -> str:
        return f"{self.kind}/{self.owner}/{self.version}"
