"""`flexmarl.validate`: says what a configuration resolves to, and refuses what would go wrong before a model loads."""

from dataclasses import dataclass

from flexmarl.api.build import check_inputs
from flexmarl.api.workers import make_tokenizer, model_folder, needs_model
from flexmarl.config import RootConfig
from flexmarl.models import context_length, resolve_model_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationReport:
    """What a valid configuration resolves to."""

    lines: list[str]
    """One statement each, for people."""


_GROUP_KEYS = {
    "agent": "(query, agent): one reward per trajectory, shared by all turns of the agent",
    "query": "(query, policy): one reward per trajectory, the mean over the policy's acting agents",
    "agent_turn": "(query, agent, branch, turn): the turn's reward",
}


def validate(config: RootConfig) -> ValidationReport:
    """Check a configuration and everything it points to.

    Raises:
        ConfigError: something is wrong; says what, where and the fix.
    """
    inputs = check_inputs(config)
    pipeline = config.pipeline
    lines = [
        f"workflow {config.workflow.path}",
        f"data: {len(inputs.train_queries)} training queries, {len(inputs.held_out_queries)} held-out queries",
        f"step: {pipeline.queries_per_step} queries x {pipeline.trajectories_per_query} trajectories",
        f"run: {pipeline.num_steps} steps, mode {pipeline.mode}, seed {config.run.seed}",
    ]
    for name, policy in config.policies.items():
        agents = sorted(agent for agent, setup in config.agents.items() if setup.policy == name)
        algorithm = config.algorithm_of(name)
        lines.append(f"policy {name}: model {policy.model}, agents {', '.join(agents)}{_model_facts(config, name)}")
        lines.append(f"policy {name}: group key {_GROUP_KEYS[algorithm.group_key]}")
        lines.append(
            f"policy {name}: normaliser {algorithm.normaliser}, truncated turns are "
            f"{'masked' if algorithm.truncated == 'mask' else 'trained'}"
        )
    lines.append("valid")
    return ValidationReport(lines=lines)


def _model_facts(config: RootConfig, policy: str) -> str:
    if not needs_model(config):
        return ""
    tokenizer = make_tokenizer(model_folder(config, policy), is_scripted=config.rollout.backend.kind == "scripted")
    context_tokens = context_length(resolve_model_folder(config.policies[policy].model))
    return f", context {context_tokens} tokens, stops at token ids {list(tokenizer.stop_token_ids)}"
