"""What workers are made of: the specs that the orchestrator starts, and the factory of episode workers.

Factories of instances and process groups live in their engines; this one needs models and workflows, which only this
layer may bring together.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flexmarl.config import AlgorithmConfig, RootConfig
from flexmarl.core.ids import AgentName, PolicyName, WorkerId
from flexmarl.core.protocols import ServiceKind, Tokenizer, WorkerContext, WorkerSpec
from flexmarl.core.records import SamplingParams
from flexmarl.models import ScriptedTokenizer, load_tokenizer, resolve_model_folder
from flexmarl.workflow.api import AgentSetup
from flexmarl.workflow.load import load_workflow
from flexmarl.workflow.worker import EpisodeWorker

INSTANCE_FACTORY = "flexmarl.rollout.instance:build_instance"
PROCESS_GROUP_FACTORY = "flexmarl.training.process_group:build_process_group"
EPISODE_WORKER_FACTORY = "flexmarl.api.workers:build_episode_worker"


def needs_model(config: RootConfig) -> bool:
    """Whether any engine of the run loads a model."""
    return config.rollout.backend.kind != "scripted" or config.training.backend.kind != "scripted"


def model_folder(config: RootConfig, policy: str) -> str:
    """Return a policy's model folder, or "" when no engine loads a model.

    Raises:
        ConfigError: there is no such model.
    """
    return str(resolve_model_folder(config.policies[policy].model)) if needs_model(config) else ""


def instance_specs(config: RootConfig) -> dict[PolicyName, tuple[int, Callable[[WorkerId], WorkerSpec]]]:
    """Return the number of instances and the maker of their specs, by policy."""
    backend = config.rollout.backend.model_dump(mode="json")

    def maker(policy: str) -> Callable[[WorkerId], WorkerSpec]:
        options = {
            "policy": policy,
            "model_folder": model_folder(config, policy),
            "backend": backend,
            "is_deterministic": config.rollout.deterministic,
        }
        return lambda worker_id: WorkerSpec(
            worker_id=worker_id, kind=ServiceKind.INSTANCE, factory=INSTANCE_FACTORY, options=options
        )

    return {PolicyName(name): (policy.num_instances, maker(name)) for name, policy in config.policies.items()}


def trainer_specs(config: RootConfig) -> dict[PolicyName, Callable[[WorkerId], WorkerSpec]]:
    """Return the maker of process group specs, by policy."""
    backend = config.training.backend.model_dump(mode="json")

    def maker(policy: str) -> Callable[[WorkerId], WorkerSpec]:
        options = {
            "policy": policy,
            "model_folder": model_folder(config, policy),
            "backend": backend,
            "algorithm": resolved_algorithm(config, policy).model_dump(mode="json"),
            "reference_folder": reference_folder(config, policy),
            "optimizer": config.optimizer_of(policy).model_dump(mode="json"),
            "seed": config.run.seed,
        }
        return lambda worker_id: WorkerSpec(
            worker_id=worker_id, kind=ServiceKind.PROCESS_GROUP, factory=PROCESS_GROUP_FACTORY, options=options
        )

    return {PolicyName(name): maker(name) for name in config.policies}


def resolved_algorithm(config: RootConfig, policy: str) -> AlgorithmConfig:
    """Return the algorithm settings of a policy with the correction that its null stands for."""
    algorithm = config.algorithm_of(policy)
    if algorithm.correction is not None:
        return algorithm
    is_on_policy = config.pipeline.mode in ("serial", "strict")
    correction = "decoupled_ppo" if algorithm.num_updates > 1 else "truncated_is"
    return algorithm.model_copy(update={"correction": "none" if is_on_policy else correction})


def reference_folder(config: RootConfig, policy: str) -> str:
    """Return the folder of a policy's frozen reference model, or "" when it has none.

    Raises:
        ConfigError: there is no such model.
    """
    algorithm = config.algorithm_of(policy)
    if algorithm.kl_coef == 0 or not needs_model(config):
        return ""
    return str(resolve_model_folder(algorithm.reference_model or config.policies[policy].model))


def episode_worker_spec(config: RootConfig) -> Callable[[WorkerId], WorkerSpec]:
    """Return the maker of episode worker specs."""
    rollout = config.rollout
    options = {
        "workflow": config.workflow.path,
        "blocked_loop_s": config.workflow.blocked_loop_s,
        # A trace holds the tokens of the policies' own models.
        "is_scripted": rollout.backend.kind == "scripted" and rollout.backend.trace is None,
        "columns": dict(config.store.columns),
        "agents": {
            name: {
                "model_folder": model_folder(config, agent.policy),
                "system_prompt": agent.system_prompt,
                "temperature": agent.temperature or rollout.temperature,
                "max_new_tokens": agent.max_new_tokens or rollout.max_new_tokens,
                "ignore_stop": rollout.ignore_stop,
                "required_columns": _required_columns(config, agent.policy),
            }
            for name, agent in config.agents.items()
        },
    }
    return lambda worker_id: WorkerSpec(
        worker_id=worker_id,
        kind=ServiceKind.EPISODE_WORKER,
        factory=EPISODE_WORKER_FACTORY,
        options=options,
        is_process=config.workflow.num_workers > 0,
    )


def _required_columns(config: RootConfig, policy: str) -> list[str]:
    """Return the user columns that training of the policy reads."""
    column = config.algorithm_of(policy).weight_column
    return [] if column is None else [column]


def build_episode_worker(context: WorkerContext, options: Mapping[str, Any]) -> EpisodeWorker:
    """Build the service of an episode worker: the `factory` of its WorkerSpec."""
    return EpisodeWorker(load_workflow(options["workflow"]), agent_setups(options), context.send)


def agent_setups(options: Mapping[str, Any]) -> dict[AgentName, AgentSetup]:
    """Return the setup of each agent from the options of an episode worker; agents of one model share its tokenizer."""
    tokenizers: dict[str, Tokenizer] = {}
    setups = {}
    for name, agent in options["agents"].items():
        folder = agent["model_folder"]
        if folder not in tokenizers:
            tokenizers[folder] = make_tokenizer(folder, is_scripted=options["is_scripted"])
        setups[AgentName(name)] = AgentSetup(
            tokenizer=tokenizers[folder],
            sampling=SamplingParams(
                temperature=agent["temperature"],
                max_new_tokens=agent["max_new_tokens"],
                ignore_stop=agent["ignore_stop"],
            ),
            system_prompt=agent["system_prompt"],
            column_types=options["columns"],
            required_columns=frozenset(agent["required_columns"]),
        )
    return setups


def make_tokenizer(folder: str, *, is_scripted: bool) -> Tokenizer:
    """Return the tokenizer of a model folder, or that of scripted engines."""
    return ScriptedTokenizer() if is_scripted else load_tokenizer(Path(folder))
