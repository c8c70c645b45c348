"""The seams of the system. Engines, stores and runtimes implement these; only `api` imports an implementation."""

from flexmarl.core.protocols.engines import (
    BackendStep,
    CompletionStamp,
    GradientResult,
    InferenceBackend,
    TrainingBackend,
    UpdateResult,
)
from flexmarl.core.protocols.objects import ObjectInfo, ObjectPlane, PendingSet, Tier
from flexmarl.core.protocols.runtime import (
    AsyncService,
    Clock,
    EventSink,
    Inbox,
    Runtime,
    Service,
    ServiceKind,
    ServiceStep,
    Timer,
    WorkerContext,
    WorkerHandle,
    WorkerSpec,
)
from flexmarl.core.protocols.store import AdvantageValue, ExperienceStore, Lease, PolicyProgress
from flexmarl.core.protocols.workflow import AgentClient, ChatMessage, Tokenizer

__all__ = [
    "AdvantageValue",
    "AgentClient",
    "AsyncService",
    "BackendStep",
    "ChatMessage",
    "Clock",
    "CompletionStamp",
    "EventSink",
    "ExperienceStore",
    "GradientResult",
    "Inbox",
    "InferenceBackend",
    "Lease",
    "ObjectInfo",
    "ObjectPlane",
    "PendingSet",
    "PolicyProgress",
    "Runtime",
    "Service",
    "ServiceKind",
    "ServiceStep",
    "Tier",
    "Timer",
    "Tokenizer",
    "TrainingBackend",
    "UpdateResult",
    "WorkerContext",
    "WorkerHandle",
    "WorkerSpec",
]
