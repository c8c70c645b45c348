"""`flexmarl.validate`: says what a configuration resolves to, and refuses what would go wrong before a model loads."""

from dataclasses import dataclass

from flexmarl.algorithms.scopes import StatisticScope, statistics
from flexmarl.api.build import CheckedInputs, check_inputs
from flexmarl.api.workers import resolved_algorithm
from flexmarl.config import RootConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationReport:
    """What a valid configuration resolves to."""

    lines: list[str]
    """One statement each, for people."""
    warnings: list[str]
    """What may be wrong; also among the lines."""


_SCOPES = {
    StatisticScope.GROUP: "group",
    StatisticScope.POLICY_BATCH: "policy's samples of the step",
    StatisticScope.STEP: "policy's samples of the step, divided once at the update",
}
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
    inputs = check_inputs(config, is_thorough=True)
    pipeline = config.pipeline
    lines = [
        f"workflow {config.workflow.path}",
        f"data: {len(inputs.train_queries)} training queries, {len(inputs.held_out_queries)} held-out queries",
        f"step: {pipeline.queries_per_step} queries x {pipeline.trajectories_per_query} trajectories",
        f"run: {pipeline.num_steps} steps, seed {config.run.seed}",
        f"pipeline: {_pipeline(config)}",
    ]
    for name, policy in config.policies.items():
        agents = sorted(agent for agent, setup in config.agents.items() if setup.policy == name)
        algorithm = config.algorithm_of(name)
        lines.append(f"policy {name}: model {policy.model}, agents {', '.join(agents)}{_model_facts(inputs, name)}")
        lines.append(f"policy {name}: group key {_GROUP_KEYS[algorithm.group_key]}")
        scopes = ", ".join(
            f"{statistic.name} over the {_SCOPES[statistic.scope]}" for statistic in statistics(algorithm)
        )
        lines.append(f"policy {name}: statistics: {scopes}")
        lines.append(f"policy {name}: {_loss(config, name)}")
    lines.append(_dry_run_line(inputs))
    warnings = [*_data_warnings(config, inputs), *(() if inputs.workflow is None else inputs.workflow.warnings)]
    lines += [f"warning: {warning}" for warning in warnings]
    lines.append("valid")
    return ValidationReport(lines=lines, warnings=warnings)


def _pipeline(config: RootConfig) -> str:
    pipeline = config.pipeline
    match pipeline.mode:
        case "serial":
            return "serial: a step trains when it has been generated; staleness 0"
        case "strict":
            return "strict: a group trains when it closes, the update waits for the whole step; staleness 0"
        case "one_step_off":
            return "one_step_off: a step is generated while the one before it trains; staleness at most 1"
        case "bounded_async":
            return (
                f"bounded_async: rollouts run up to {pipeline.max_staleness} steps ahead, which bounds staleness; "
                f"instances {config.rollout.on_publish} when weights are published"
            )


def _loss(config: RootConfig, policy: str) -> str:
    algorithm = resolved_algorithm(config, policy)
    parts = [f"truncated turns are {'masked' if algorithm.truncated == 'mask' else 'trained'}"]
    if algorithm.num_updates > 1:
        parts.append(f"{algorithm.num_epochs} epochs of {algorithm.num_minibatches} updates within the commit")
    else:
        parts.append("one update per step")
    parts.append(f"correction {algorithm.correction}")
    if algorithm.kl_coef > 0:
        parts.append(f"KL {algorithm.kl_coef:g} in the {algorithm.kl_in}")
    return ", ".join(parts)


def _model_facts(inputs: CheckedInputs, policy: str) -> str:
    if policy not in inputs.models:
        return ""
    facts = inputs.models[policy]
    return (
        f", context {facts.context_tokens} tokens, vocabulary {facts.vocab_size} "
        f"(tokenizer {facts.num_tokenizer_ids}), stops at token ids {list(inputs.tokenizers[policy].stop_token_ids)}"
    )


def _data_warnings(config: RootConfig, inputs: CheckedInputs) -> list[str]:
    num_held_out = len(inputs.held_out_queries)
    if not 0 < num_held_out < config.eval.num_queries:
        return []
    return [f"eval.num_queries={config.eval.num_queries}, but there are only {num_held_out} held-out queries"]


def _dry_run_line(inputs: CheckedInputs) -> str:
    if inputs.workflow is None:
        return "dry run: off (workflow.dry_run=false)"
    return f"dry run: {inputs.workflow.num_episodes} episodes with scripted answers"
